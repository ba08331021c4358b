"""Build the parts of a run from what a project gives: dataset, task, model, preprocessing, and its
own functions.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from timm_parallel.batch import Batch
from timm_parallel.data.dataset import ImageDataset, Split
from timm_parallel.data.loader import BatchStep, EvalLoader, TrainLoader, Transform
from timm_parallel.data.on_device import DevicePrefetcher
from timm_parallel.errors import UnreadableImageError
from timm_parallel.keys import ResolvedConfig
from timm_parallel.machine.process import start_clock
from timm_parallel.model.checks import check_batch_norm, check_networks, check_sharded_model
from timm_parallel.parallel.strategy import Strategy
from timm_parallel.run.meter import build_hooks
from timm_parallel.run.parts import (
    Learning,
    RunParts,
    build_networks,
    build_state,
    evaluation_networks,
)
from timm_parallel.run.replica_checks import check_same_data
from timm_parallel.run.telemetry import Telemetry
from timm_parallel.task import Targets, Task


def build_eval_loaders(
    splits: Mapping[str, tuple[Split, Transform | None]],
    targets: Targets | None,
    strategy: Strategy,
    preprocessing: Any,
    *,
    batch_size: int,
    seed: int = 0,
    workers: int | str = "auto",
    on_error: str = "raise",
    channels_last: bool = False,
) -> dict[str, EvalLoader]:
    """Build the loaders of splits that are evaluated, each image once over all ranks.

    `splits`: by name, with the function (uint8 image, target) -> (image, target) that prepares a
    sample; None: images in memory are read by whole batches. `targets`: the task, which collates
    targets; None: as numbers. `preprocessing`: has mean and std of images in 0..1. `batch_size`:
    images over all ranks. `on_error`: raise ends the run at an unreadable image; skip leaves it
    out.
    """
    prefetcher = DevicePrefetcher(
        strategy.device, preprocessing.mean, preprocessing.std, channels_last
    )
    return {
        name: EvalLoader(
            split,
            targets,
            prefetcher,
            strategy.group,
            batch_size=batch_size,
            transform=transform,
            seed=seed,
            workers=workers,
            on_error=on_error,
        )
        for name, (split, transform) in splits.items()
    }


def build_parts(
    config: ResolvedConfig,
    strategy: Strategy,
    dataset: ImageDataset,
    task: Task[Any],
    model: nn.Module,
    preprocessing: Any,
    eval_loaders: Mapping[str, EvalLoader],
    *,
    image_size: tuple[int, int],
    learning: Callable[[str, dict[str, nn.Module], int], Learning],
    transform: Transform | None = None,
    on_pixels: BatchStep | None = None,
    on_normalized: BatchStep | None = None,
    mixing: Callable[[Batch], Batch] | None = None,
    workers: int | str = "auto",
    on_error: str = "raise",
    copies: int = 1,
    balance: float = 0.0,
    replay: int | None = None,
    compile_network: Callable[[nn.Module], nn.Module] = lambda network: network,
) -> RunParts:
    """Build loader, networks, optimizers and timers of a training run. All ranks must call this
    function. Raises ValueError if they do not fit together.

    `model`: on the device, with its weights, and not wrapped. `eval_loaders`: at least that of val.
    `image_size`: height and width of training images. `learning`: builds the optimizer of a phase,
    from its name, the networks that it trains, without the wrapper of a strategy, and the optimizer
    steps of an epoch. `transform`: augments a sample. `on_pixels`, `on_normalized`: augment batches
    of uint8 images and of normalized ones. `mixing`: mixup or cutmix of a batch. `copies`:
    differently augmented copies of an image in a batch. `balance`: 1 draws all classes equally
    often. `replay`: batches to read once and then replay. `compile_network`: wraps a network by
    torch.compile.
    """
    # Compare the data of all ranks, because ranks that read different files would train on wrong
    # labels without an error.
    check_same_data(dataset, strategy.group)
    first_loader = next(iter(eval_loaders.values()))
    train_loader = TrainLoader(
        dataset.train,
        task,
        first_loader.prefetcher,
        strategy.group,
        batch_size=config.global_batch,
        seed=config.seed,
        transform=transform,
        on_pixels=on_pixels,
        on_normalized=on_normalized,
        workers=workers,
        on_error=on_error,
        accumulate=config.train.accumulate,
        copies=copies,
        limit=config.data.limit_train,
        balance=balance,
        replay=replay,
    )
    steps_per_epoch, total_steps = config.train.count_steps(train_loader.sampler.batches_per_epoch)
    task.prepare(train_loader.labels())
    networks = build_networks(task, model, strategy.device)
    check_networks(task, networks, first_loader.peek(1))
    state = build_state(
        config,
        strategy,
        task,
        networks,
        lambda phase, trained: learning(phase, trained, steps_per_epoch),
        sample=_sample(train_loader, mixing) if strategy.group.is_first else None,
        compile_network=compile_network,
    )
    start_clock.end("model")
    if strategy.traits.shards:
        evaluated = evaluation_networks(state.evaluated(), config, strategy)
        check_sharded_model(evaluated, task, first_loader, strategy.group)
    else:
        check_batch_norm(state.model, train_loader, config)
    telemetry = Telemetry(strategy.devices, strategy.group)
    return RunParts(
        config=config,
        strategy=strategy,
        dataset=dataset,
        task=task,
        preprocessing=preprocessing,
        image_size=image_size,
        train_loader=train_loader,
        eval_loaders=eval_loaders,
        state=state,
        mixing=mixing,
        steps_per_epoch=steps_per_epoch,
        telemetry=telemetry,
        hooks=build_hooks(
            config,
            strategy,
            [phase.communication for phase in state.phases],
            telemetry.energy,
            total_steps,
        ),
    )


def _sample(loader: TrainLoader, mixing: Callable[[Batch], Batch] | None) -> Batch | None:
    """Return two samples as a training step gets them, with which its FLOPs are counted. Return
    None if one cannot be read, because the step that reads it names it.
    """
    try:
        sample = loader.peek(2)
    except UnreadableImageError:
        return None
    return sample if mixing is None else copy.copy(mixing)(sample)

"""Training function of the small project, which contains a run from top to bottom."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from torch import nn
from torch.distributed import Store
from torch.optim import Optimizer

from small.config import ResolvedConfig
from small.data import MEAN, SIDE, STD
from timm_parallel import (
    DevicePrefetcher,
    EvalLoader,
    Learning,
    Ranks,
    RefusedError,
    Run,
    RunParts,
    Strategy,
    Task,
    TrainLoader,
    build_networks,
    build_state,
    build_strategy,
    check_same_data,
    import_class,
    load_dataset,
)

# Each rank reads its tiny images itself, without loader workers.
WORKERS = 0


@dataclass(frozen=True)
class Preprocessing:
    """Size and normalization of the images, which a checkpoint stores."""

    # Channels, height and width.
    input_size: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]


def train(config: ResolvedConfig, folder: Path, ranks: Ranks, store: Store | None) -> None:
    """Train as one rank of a run. All ranks must call this function."""
    with start(config, folder, ranks, store).training() as training:
        for step in training.steps():
            training.log(step.train())


def start(config: ResolvedConfig, folder: Path, ranks: Ranks, store: Store | None) -> Run:
    """Build a run on this rank. Continue from the newest checkpoint in the run folder, if there is
    one. All ranks must call this function.
    """
    # Seed every rank alike, so that every rank and every strategy starts from the same weights.
    torch.manual_seed(config.seed)
    try:
        strategy = build_strategy(config.parallel, ranks, store, config.train.deterministic)
        strategy.choose_precision(config.train)
        return Run(build(config, strategy), folder)
    except ValueError as error:
        raise RefusedError(str(error)) from error


def build(config: ResolvedConfig, strategy: Strategy) -> RunParts:
    """Build data, model and optimizer of a run on this rank. All ranks must call this function."""
    dataset, device = load_dataset(config), strategy.device
    check_same_data(dataset, strategy.group)
    task = Task.find(config.train.task)(config, dataset.target_names)
    model_class = import_class("model.name", config.model.name, nn.Module)
    model = model_class(task.num_outputs, config.model.width, **config.model.kwargs).to(device)
    prefetcher = DevicePrefetcher(device, MEAN, STD, channels_last=False)
    train_loader = TrainLoader(
        dataset.train,
        task,
        prefetcher,
        strategy.group,
        batch_size=config.global_batch,
        seed=config.seed,
        accumulate=config.train.accumulate,
        limit=config.data.limit_train,
        workers=WORKERS,
    )
    val_loader = EvalLoader(
        dataset.val,
        task,
        prefetcher,
        strategy.group,
        batch_size=config.global_batch,
        workers=WORKERS,
    )
    # The schedule ends with train.epochs and does not depend on train.max_steps, so that a run that
    # max_steps has stopped can continue.
    batches = config.train.epochs * train_loader.sampler.batches_per_epoch
    total = batches // config.train.accumulate

    def learning(phase: str, networks: dict[str, nn.Module]) -> Learning:
        optim, trained = config.optim.of_phase(phase), nn.ModuleDict(networks)
        if optim.is_own:
            own_class = import_class("optim.opt", optim.opt, Optimizer)
            optimizer = own_class(trained.parameters(), lr=optim.lr)  # type: ignore[call-arg]
        else:
            optimizer = create_optimizer_v2(trained, opt=optim.opt, lr=optim.lr)
        return Learning(optimizer, CosineLRScheduler(optimizer, t_initial=total, t_in_epochs=False))

    networks = build_networks(task, model, device)
    state = build_state(config, strategy, task, networks, learning)
    return RunParts(
        config=config,
        strategy=strategy,
        dataset=dataset,
        task=task,
        preprocessing=Preprocessing((dataset.in_chans, SIDE, SIDE), MEAN, STD),
        image_size=(SIDE, SIDE),
        train_loader=train_loader,
        eval_loaders={"val": val_loader},
        state=state,
    )

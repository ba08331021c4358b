"""Training function of the small project, which contains a run from top to bottom."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from torch import Tensor, nn
from torch.distributed import Store

from small.config import ResolvedConfig
from small.data import MEAN, SIDE, STD
from timm_parallel import (
    DevicePrefetcher,
    EpochSteps,
    EvalLoader,
    Ranks,
    RefusedError,
    Run,
    RunParts,
    Strategy,
    Task,
    TrainLoader,
    TrainState,
    build_strategy,
    check_same_data,
    evaluate,
    import_class,
    load_dataset,
)


@dataclass(frozen=True)
class Preprocessing:
    """Size and normalization of the images, which a checkpoint stores."""

    # Channels, height and width.
    input_size: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]


class TrainStep(nn.Module):
    """Computes the loss and the metrics of a batch, as code for a single device."""

    def __init__(self, model: nn.Module, task: Task[Any]) -> None:
        super().__init__()
        self.model, self.task, self.criterion = model, task, task.build_criterion(None)

    def forward(self, images: Tensor, targets: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return self.task.step(self.model, self.criterion, images, targets)


def train(config: ResolvedConfig, folder: Path, ranks: Ranks, store: Store | None) -> None:
    """Train as one rank of a run. Continue from the newest checkpoint in the run folder, if there
    is one. All ranks must call this function.
    """
    # Seed every rank alike, so that every rank and every strategy starts from the same weights.
    torch.manual_seed(config.seed)
    try:
        strategy = build_strategy(config.parallel, ranks, store, config.train.deterministic)
        run = Run(build(config, strategy), folder)
        run.resume()
    except ValueError as error:
        raise RefusedError(str(error)) from error
    try:
        with run.begin():
            while not is_finished(run.parts):
                train_epoch(run)
            # A resumed run may have no step left, but its result needs an evaluation.
            if "val" not in run.evaluations:
                evaluate_val(run)
        run.end()
    finally:
        run.close()


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
        limit=config.data.limit_train,
    )
    val_loader = EvalLoader(
        dataset.val, task, prefetcher, strategy.group, batch_size=config.global_batch
    )
    step = TrainStep(model, task).to(device)
    wrapped = strategy.wrap(step)
    # Build the optimizer after wrapping, because fsdp replaces the model's parameters.
    optimizer = create_optimizer_v2(model, opt=config.optim.opt, lr=config.optim.lr)
    # The schedule ends with train.epochs and does not depend on train.max_steps, so that a run that
    # max_steps has stopped can continue.
    total = config.train.epochs * train_loader.sampler.batches_per_epoch
    schedule = CosineLRScheduler(optimizer, t_initial=total, t_in_epochs=False)
    return RunParts.assemble(
        config,
        strategy,
        train_loader,
        TrainState(model, step, wrapped, optimizer, schedule, scaler=None, ema=None),
        dataset=dataset,
        task=task,
        preprocessing=Preprocessing((dataset.in_chans, SIDE, SIDE), MEAN, STD),
        image_size=(SIDE, SIDE),
        eval_loaders={"val": val_loader},
        mixing=None,
        flops_per_step=None,
    )


def is_finished(parts: RunParts) -> bool:
    """Return True if all epochs are done, or train.max_steps has ended the last one."""
    progress = parts.progress
    ended_early = progress.step >= parts.total_steps and progress.ended_at == progress.step
    return ended_early or progress.epoch >= parts.config.train.epochs


def train_epoch(run: Run) -> None:
    """Train until the epoch ends, train.max_steps is reached, or a stop signal arrives. Then
    evaluate and save. All ranks must call this function.
    """
    parts, state, strategy = run.parts, run.parts.state, run.strategy
    batches, steps = run.train_batches(), EpochSteps(parts)
    state.wrapped.train()
    for _ in steps:
        images, targets = steps.fetch(batches)
        loss, metrics = state.wrapped(images, targets)
        parts.hooks.start_backward()
        loss.backward()
        steps.add(loss, metrics, len(images))
        state.optimizer.step()
        state.optimizer.zero_grad()
        means = steps.end()
        if means is not None:
            run.log_step({f"train/{name}": value for name, value in means.items()})
            run.save_if_due()
    if strategy.group.stop.stopped and state.progress.step_in_epoch < parts.steps_per_epoch:
        run.stop()
    is_best = evaluate_val(run)
    run.end_epoch(is_evaluated=True)
    run.save(is_best)


def evaluate_val(run: Run) -> bool:
    """Evaluate the weights on val and log the metrics. Return True if they are the best so far. All
    ranks must call this function.
    """
    parts, strategy = run.parts, run.strategy
    with parts.hooks.aside():
        evaluation = evaluate(
            strategy.for_evaluation(parts.state.model),
            parts.eval_loaders["val"],
            parts.task,
            strategy.group,
            should_stop=strategy.group.stop.stop_requested,
            batches=run.eval_batches("val"),
        )
    if evaluation is None:
        run.stop()
    return run.log_evaluation("val", evaluation)

"""The loop: tensors in, numbers out. It knows no file, no logger and no Hydra; src/run.py hands its numbers on.

Between two boundaries (a step to log or save at, an epoch's end) nothing waits for the device: losses are added up
there, and fetched at the boundary, once, summed over the ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from timm.scheduler.scheduler import Scheduler
from timm.utils import ModelEmaV3
from torch import Tensor, nn

from src.config.schema import TrainConfig
from src.draws import seed_for
from src.parallel.single import Single
from src.telemetry.meters import Meter
from src.training.metrics import Evaluation

Batch = tuple[Tensor, Tensor]
Mix = Callable[[Tensor, Tensor], Batch]


class NotFiniteError(RuntimeError):
    """The loss became NaN or infinite; every rank raises this at the same step."""


@dataclass
class Progress:
    """Where training is, in all of its units; saved and restored as it stands. One step is one optimizer step."""

    step: int = 0
    epoch: int = 0  # the epoch under way
    step_in_epoch: int = 0
    loss_sum: float = 0.0  # over this epoch's steps up to the last boundary, mean of the ranks
    open_loss: float = 0.0  # the same over the steps since that boundary; not 0 only in a checkpoint between boundaries
    open_steps: int = 0
    best: float | None = None  # of checkpoint.metric; higher is better (a loss is negated)
    best_acc: float = 0.0
    evaluations_since_best: int = 0

    def note_evaluation(self, found: Evaluation, metric: str) -> bool:
        """Keep the books of an evaluation on val; returns whether it is the best by `metric` (val/acc or val/loss)."""
        value = found.acc if metric == "val/acc" else -found.loss
        self.best_acc = max(self.best_acc, found.acc)
        is_best = self.best is None or value > self.best
        self.best = value if is_best else self.best
        self.evaluations_since_best = 0 if is_best else self.evaluations_since_best + 1
        return is_best


@dataclass
class Trainee:
    """Everything that a step changes."""

    model: nn.Module  # bare
    wrapped: nn.Module  # (images, targets) -> mean loss
    optimizer: torch.optim.Optimizer
    schedule: Scheduler | None
    scaler: torch.amp.GradScaler | None
    ema: ModelEmaV3 | None


@dataclass
class StepReport:
    """Numbers at a boundary. Losses are means over global batches, times in seconds."""

    step: int
    epoch: float
    loss: float  # since the last boundary
    lr: float
    grad_norm: float | None  # of this step's gradients before clipping


def train_epoch(
    trainee: Trainee,
    batches: Iterator[Batch],
    progress: Progress,
    *,
    strategy: Single,
    config: TrainConfig,
    clip_grad: float | None,
    seed: int,
    steps_per_epoch: int,
    is_boundary: Callable[[int], bool],
    meter: Meter,
    mix: Mix | None = None,
) -> Iterator[StepReport]:
    """Train to the end of the epoch (or max_steps, or until `strategy.stopping`), yielding at each boundary.

    `progress` moves along.

    Errors: NotFiniteError, on all ranks at the same boundary.
    """
    trainee.wrapped.train()
    losses = torch.full((), progress.open_loss, device=strategy.device)
    since, last_lr = progress.open_steps, _lr(trainee.optimizer)
    progress.open_loss, progress.open_steps = 0.0, 0
    grad_norm: Tensor | None = None
    while progress.step_in_epoch < steps_per_epoch and progress.step < (config.max_steps or math.inf):
        upcoming = progress.step + 1
        ends = progress.step_in_epoch + 1 == steps_per_epoch or upcoming == config.max_steps
        boundary = ends or is_boundary(upcoming)
        strategy.stopping.starts(upcoming)
        seed_step(seed, upcoming, strategy.rank)
        loss = _forward_backward(trainee, batches, config, strategy, meter, mix)
        grad_norm = _update(trainee, clip_grad, wants_norm=boundary)
        losses += loss
        since += 1
        last_lr = _lr(trainee.optimizer) if boundary else last_lr
        if trainee.schedule is not None:
            trainee.schedule.step_update(upcoming)
        if trainee.ema is not None:
            trainee.ema.update(trainee.model, upcoming)
        progress.step = upcoming
        progress.step_in_epoch += 1
        meter.step_done()
        stops = strategy.stopping.is_due(upcoming)
        if boundary or stops:
            total = strategy.sum(losses).item() / strategy.world_size
            meter.synchronised()
            if not math.isfinite(total):
                raise NotFiniteError(f"the loss is {total} at step {upcoming - since + 1} to {upcoming}")
            if not boundary:
                progress.open_loss, progress.open_steps = total, since
                return
            progress.loss_sum += total
            epoch = progress.epoch + progress.step_in_epoch / steps_per_epoch
            yield StepReport(upcoming, epoch, total / since, last_lr, None if grad_norm is None else grad_norm.item())
            losses.zero_()
            since = 0
            trainee.wrapped.train()  # whoever took the report may have evaluated
            meter.resume()
            if stops:
                return


def _forward_backward(
    trainee: Trainee, batches: Iterator[Batch], config: TrainConfig, strategy: Single, meter: Meter, mix: Mix | None
) -> Tensor:
    """Gradients of one optimizer step, over `accumulate` batches; returns the mean loss, still on the device."""
    mean = torch.zeros((), device=strategy.device) if config.accumulate > 1 else None
    for index in range(config.accumulate):
        meter.before_fetch()
        images, targets = next(batches)
        meter.after_fetch()
        if mix is not None:
            images, targets = mix(images, targets)
        if index + 1 < config.accumulate:
            with strategy.skip_sync(trainee.wrapped):
                loss = trainee.wrapped(images, targets) / config.accumulate
                _backward(trainee, loss)
        else:
            loss = trainee.wrapped(images, targets)
            loss = loss if mean is None else loss / config.accumulate
            _backward(trainee, loss)
        mean = loss.detach() if mean is None else mean + loss.detach()
    assert mean is not None
    return mean


def _backward(trainee: Trainee, loss: Tensor) -> None:
    (loss if trainee.scaler is None else trainee.scaler.scale(loss)).backward()


def _update(trainee: Trainee, clip_grad: float | None, wants_norm: bool) -> Tensor | None:
    """One optimizer step. Returns the gradient norm before clipping, where it was computed."""
    norm: Tensor | None = None
    if trainee.scaler is not None and (clip_grad is not None or wants_norm):
        trainee.scaler.unscale_(trainee.optimizer)
    if clip_grad is not None:
        norm = nn.utils.clip_grad_norm_(trainee.model.parameters(), clip_grad)
    elif wants_norm:
        norm = nn.utils.get_total_norm([p.grad for p in trainee.model.parameters() if p.grad is not None])
    if trainee.scaler is not None:
        trainee.scaler.step(trainee.optimizer)
        trainee.scaler.update()
    else:
        trainee.optimizer.step()
    trainee.optimizer.zero_grad(set_to_none=True)
    return norm


def seed_step(seed: int, step: int, rank: int) -> None:
    """Make a step's random draws (dropout, drop path) a function of (seed, step, rank).

    So a run resumed at any step draws what it would have drawn, without random states in its checkpoints.
    """
    mixed = seed_for(seed, step, rank)
    torch.default_generator.manual_seed(mixed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(mixed)


def _lr(optimizer: torch.optim.Optimizer) -> float:
    """The largest rate of all parameter groups: with layer decay, the head's."""
    return max(float(group["lr"]) for group in optimizer.param_groups)

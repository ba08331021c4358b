"""The loop: tensors in, numbers out. It knows no file, no logger and no Hydra; src/run/lifecycle.py hands its numbers on.

Between two boundaries (a step to log or save at, an epoch's end) nothing waits for the device: losses stay there, and
are fetched at the boundary, once, summed over the ranks. (`train.on_nonfinite=skip` looks at every step's gradients.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from timm.scheduler.scheduler import Scheduler
from timm.utils import ModelEmaV3
from torch import Tensor, nn

from src.data.draws import seed_for
from src.engine.machine.pulse import BACKWARD, FORWARD, READING, pulse
from src.engine.record.meter import Meter
from src.parallel.single import Single
from src.schema import TrainConfig
from src.training.finite import Buffers, LossWindow, NotFiniteError
from src.training.metrics import Evaluation

Batch = tuple[Tensor, Tensor]
Mix = Callable[[Tensor, Tensor], Batch]


@dataclass
class Progress:
    """Where training is, in all of its units; saved and restored as it stands. One step is one optimizer step."""

    step: int = 0
    epoch: int = 0  # the epoch under way
    step_in_epoch: int = 0
    loss_sum: float = 0.0  # over this epoch's steps up to the last boundary, mean of the ranks
    open_loss: float = 0.0  # the same over the steps since that boundary; not 0 only in a checkpoint between boundaries
    open_steps: int = 0
    loss_steps: int = 0  # how many losses are in loss_sum: all of the epoch's steps but the skipped
    skipped: int = 0  # steps without an update, because their gradients were not finite
    best: float | None = None  # of checkpoint.metric; higher is better (a loss is negated)
    best_acc: float = 0.0
    evaluations_since_best: int = 0

    def begin_epoch(self) -> None:
        self.epoch, self.step_in_epoch, self.loss_sum, self.loss_steps = self.epoch + 1, 0, 0.0, 0

    def note_evaluation(self, found: Evaluation, metric: str) -> bool:
        """Keep the books of the evaluation on val that `metric` is of; returns whether it is the best so far."""
        value = found.acc if metric.startswith("val/acc") else -found.loss
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
    window = LossWindow(progress.open_loss, progress.open_steps)
    last_lr = _lr(trainee.optimizer)
    progress.open_loss, progress.open_steps = 0.0, 0
    while progress.step_in_epoch < steps_per_epoch and progress.step < (config.max_steps or math.inf):
        upcoming = progress.step + 1
        ends = progress.step_in_epoch + 1 == steps_per_epoch or upcoming == config.max_steps
        boundary = ends or is_boundary(upcoming)
        strategy.stopping.starts(upcoming)
        pulse.step = upcoming
        seed_step(seed, upcoming, strategy)
        buffers = Buffers(trainee.model) if config.on_nonfinite == "skip" else None
        loss = _forward_backward(trainee, batches, config, strategy, meter, mix)
        grad_norm = _gradient_norm(trainee, clip_grad, wanted=boundary or buffers is not None)
        if buffers is not None and _is_bad(trainee, grad_norm, loss, strategy):
            _skip(trainee, buffers, progress, config, upcoming)
        else:
            _update(trainee)
            window.add(upcoming, loss)
        last_lr = _lr(trainee.optimizer) if boundary else last_lr
        if trainee.schedule is not None:
            trainee.schedule.step_update(upcoming)
        if trainee.ema is not None:
            trainee.ema.update(trainee.model, upcoming)
        progress.step = upcoming
        progress.step_in_epoch += 1
        pulse.steps_done += 1
        meter.step_done()
        stops = strategy.stopping.is_due(upcoming)
        if boundary or stops:
            total = window.fetch(strategy)
            meter.synchronised()
            if not boundary:
                progress.open_loss, progress.open_steps = total, window.count
                return
            progress.loss_sum += total
            progress.loss_steps += window.count
            epoch = progress.epoch + progress.step_in_epoch / steps_per_epoch
            loss_mean = total / window.count if window.count else math.nan
            yield StepReport(upcoming, epoch, loss_mean, last_lr, None if grad_norm is None else grad_norm.item())
            window = LossWindow()
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
        pulse.at(READING)
        meter.before_fetch()
        images, targets = next(batches)
        meter.after_fetch()
        pulse.at(FORWARD)
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
    pulse.at(BACKWARD)
    (loss if trainee.scaler is None else trainee.scaler.scale(loss)).backward()


def _gradient_norm(trainee: Trainee, clip_grad: float | None, wanted: bool) -> Tensor | None:
    """The norm of the whole gradient before clipping, where it is wanted or clipped; clips."""
    if clip_grad is None and not wanted:
        return None
    if trainee.scaler is not None:
        trainee.scaler.unscale_(trainee.optimizer)
    if clip_grad is not None:
        return nn.utils.clip_grad_norm_(trainee.model.parameters(), clip_grad)
    return nn.utils.get_total_norm([p.grad for p in trainee.model.parameters() if p.grad is not None])


def _is_bad(trainee: Trainee, grad_norm: Tensor | None, loss: Tensor, strategy: Single) -> bool:
    """Whether this step must not be taken. Gradients are equal on all ranks here, so all decide the same.

    An overflow in fp16 is none of this: the scaler skips such a step by itself and goes on with a smaller scale.
    """
    assert grad_norm is not None
    if bool(grad_norm.isfinite()):
        return False
    return trainee.scaler is None or not bool(strategy.sum(loss).isfinite())


def _skip(trainee: Trainee, buffers: Buffers, progress: Progress, config: TrainConfig, step: int) -> None:
    """Leave the weights as they are. Errors: NotFiniteError after more than `train.max_skipped` such steps."""
    buffers.restore()
    trainee.optimizer.zero_grad(set_to_none=True)
    if trainee.scaler is not None:
        trainee.scaler.update()
    progress.skipped += 1
    if progress.skipped > config.max_skipped:
        raise NotFiniteError(
            f"gradients were not finite in {progress.skipped} steps, more than train.max_skipped={config.max_skipped}; "
            f"the last was step {step}",
            step,
        )


def _update(trainee: Trainee) -> None:
    """One optimizer step."""
    if trainee.scaler is not None:
        trainee.scaler.step(trainee.optimizer)
        trainee.scaler.update()
    else:
        trainee.optimizer.step()
    trainee.optimizer.zero_grad(set_to_none=True)


def seed_step(seed: int, step: int, strategy: Single) -> None:
    """Make a step's random draws (dropout, drop path) a function of (seed, step, rank, device of the rank).

    So a run resumed at any step draws what it would have drawn, without random states in its checkpoints.
    """
    strategy.seed([seed_for(seed, step, strategy.rank, device) for device in range(len(strategy.devices))])


def _lr(optimizer: torch.optim.Optimizer) -> float:
    """The largest rate of all parameter groups: with layer decay, the head's."""
    return max(float(group["lr"]) for group in optimizer.param_groups)

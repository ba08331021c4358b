"""The loop: tensors in, numbers out. It knows no file, no logger and no Hydra; src/run/lifecycle.py hands its numbers on.

Between two boundaries (a step to log or save at, an epoch's end) nothing waits for the device: losses stay there, and
are fetched at the boundary, once, summed over the ranks. (`train.on_nonfinite=skip` does wait in every step, to look at
its gradients.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass

from torch import Tensor, nn

from src.data.feed import Batch
from src.data.sampling import seed_for
from src.engine.machine.pulse import BACKWARD, FORWARD, READING
from src.parallel.single import Single
from src.schema import Config
from src.training.finite import LossWindow, NotFiniteError
from src.training.moments import Moments
from src.training.state import TrainState

Mix = Callable[[Tensor, Tensor], Batch]


@dataclass
class StepReport:
    """Numbers at a boundary."""

    loss: float  # mean over the global batches since the last boundary; cross entropy in nats
    lr: float  # of this step, the largest of all parameter groups: with layer decay the head's, which was asked for
    grad_norm: float | None  # 2-norm of this step's whole gradient before clipping


def train_epoch(
    state: TrainState,
    batches: Iterator[Batch],
    config: Config,
    strategy: Single,
    moments: Moments,
    steps_per_epoch: int,
    mix: Mix | None = None,
) -> Iterator[StepReport]:
    """Train to the end of the epoch (or max_steps, or a stop signal), yielding at each boundary. `state` moves along.

    Raises NotFiniteError, on all ranks at the same boundary.
    """
    progress, window = state.progress, LossWindow()
    last_step, may_skip = config.train.max_steps or math.inf, config.train.on_nonfinite == "skip"
    state.wrapped.train()
    while progress.step_in_epoch < steps_per_epoch and progress.step < last_step:
        step = progress.step + 1
        boundary = _is_boundary(step, config) or step == last_step or progress.step_in_epoch + 1 == steps_per_epoch
        moments.step_begins(step)
        seed_step(config.seed, step, strategy)
        buffers = [buffer.clone() for buffer in state.model.buffers()] if may_skip else []
        loss = _forward_backward(state, batches, config.train.accumulate, strategy, moments, mix)
        moments.update_begins()
        grad_norm = _gradient_norm(state, config.optim.clip_grad, strategy, needed=boundary or may_skip)
        if may_skip and _is_bad(state, grad_norm, loss, strategy):
            _skip(state, buffers, step, config.train.max_skipped)
        else:
            _update(state)
            window.add(step, loss)
        # Before the schedule sets the next step's.
        lr = max(float(group["lr"]) for group in state.optimizer.param_groups) if boundary else math.nan
        if state.schedule is not None:
            state.schedule.step_update(step)
        if state.ema is not None:
            state.ema.update(state.model, step)
        progress.step, progress.step_in_epoch = step, progress.step_in_epoch + 1
        stops = moments.step_ends()
        if boundary or stops:
            progress.add_losses(window.fetch(strategy))
            moments.synchronised()
        if boundary:
            yield StepReport(progress.close_window(), lr, None if grad_norm is None else grad_norm.item())
            state.wrapped.train()  # whoever took the report may have evaluated
        if stops:
            return


def _is_boundary(step: int, config: Config) -> bool:
    """True at the steps that are logged, or saved."""
    every = config.checkpoint.every_steps
    return step % config.train.log_every == 0 or (every is not None and step % every == 0)


def _forward_backward(
    state: TrainState, batches: Iterator[Batch], accumulate: int, strategy: Single, moments: Moments, mix: Mix | None
) -> Tensor:
    """Gradients of one optimizer step, over `accumulate` batches; returns the mean loss, still on the device."""
    mean: Tensor | None = None
    for index in range(accumulate):
        moments.at(READING)
        images, targets = next(batches)
        moments.at(FORWARD)
        if mix is not None:
            images, targets = mix(images, targets)
        is_last = index + 1 == accumulate
        with nullcontext() if is_last else strategy.skip_sync(state.wrapped):
            loss = state.wrapped(images, targets)
            loss = loss / accumulate if accumulate > 1 else loss
            moments.at(BACKWARD)
            _backward(state, loss)
        mean = loss.detach() if mean is None else mean + loss.detach()
    assert mean is not None
    return mean


def _backward(state: TrainState, loss: Tensor) -> None:
    (loss if state.scaler is None else state.scaler.scale(loss)).backward()


def _gradient_norm(state: TrainState, clip_grad: float | None, strategy: Single, needed: bool) -> Tensor | None:
    """Clip; the norm of the whole gradient before that, None where it is neither needed nor clipped."""
    if clip_grad is None and not needed:
        return None
    if state.scaler is not None:
        state.scaler.unscale_(state.optimizer)
    if clip_grad is not None:
        return strategy.whole(nn.utils.clip_grad_norm_(state.model.parameters(), clip_grad))
    return strategy.whole(nn.utils.get_total_norm([p.grad for p in state.model.parameters() if p.grad is not None]))


def _is_bad(state: TrainState, grad_norm: Tensor | None, loss: Tensor, strategy: Single) -> bool:
    """True if this step must not be taken. Gradients are equal on all ranks here, so all decide the same.

    An overflow in fp16 does not count: the scaler skips such a step by itself and goes on with a smaller scale.
    """
    assert grad_norm is not None
    if bool(grad_norm.isfinite()):
        return False
    return state.scaler is None or not bool(strategy.sum(loss).isfinite())


def _skip(state: TrainState, buffers: list[Tensor], step: int, max_skipped: int) -> None:
    """Leave the weights as they are, and BatchNorm's averages as they were.

    Raises NotFiniteError after more than `train.max_skipped` such steps.
    """
    progress = state.progress
    for buffer, before in zip(state.model.buffers(), buffers, strict=True):
        buffer.copy_(before)
    state.optimizer.zero_grad(set_to_none=True)
    if state.scaler is not None:
        state.scaler.update()
    progress.skipped += 1
    if progress.skipped > max_skipped:
        raise NotFiniteError(
            f"gradients were not finite in {progress.skipped} steps, more than train.max_skipped={max_skipped}; "
            f"the last was step {step}",
            step,
        )


def _update(state: TrainState) -> None:
    """One optimizer step."""
    if state.scaler is not None:
        state.scaler.step(state.optimizer)
        state.scaler.update()
    else:
        state.optimizer.step()
    state.optimizer.zero_grad(set_to_none=True)


def seed_step(seed: int, step: int, strategy: Single) -> None:
    """Make a step's random draws (dropout, drop path) a function of (seed, step, rank, device of the rank).

    So a run resumed at any step draws what it would have drawn, without random states in its checkpoints.
    """
    strategy.seed([seed_for(seed, step, strategy.rank, device) for device in range(len(strategy.devices))])

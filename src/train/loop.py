"""The training loop: tensors in, numbers out. It does not use files, loggers or Hydra; run.py
writes its numbers.

A sync step is a step to log or save at, or the last of an epoch. Between two of them nothing waits
for the device: losses and metrics stay there, and are fetched once, summed over the ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass

from timm.models import model_parameters
from torch import Tensor, nn

from src.schema import Config, OptimConfig
from src.train.optim import clip_adaptively
from timm_parallel.data.prefetch import Batch
from timm_parallel.faults.liveness import BACKWARD, FORWARD, READING
from timm_parallel.parallel.strategy import Strategy
from timm_parallel.runtime.determinism import seed_step
from timm_parallel.runtime.interfaces import TrainState
from timm_parallel.runtime.metric_window import MetricWindow
from timm_parallel.runtime.step_hooks import StepHooks

Mix = Callable[[Tensor, Tensor, int], Batch]  # images, targets, epoch


@dataclass(frozen=True)
class StepReport:
    """Training metrics since the previous report, for the log."""

    means: dict[str, float]  # loss and metrics over the images since the last report
    lr: float  # largest of all parameter groups at this step
    grad_norm: float | None  # 2-norm of this step's gradient before clipping


def train_epoch(
    state: TrainState,
    batches: Iterator[Batch],
    config: Config,
    strategy: Strategy,
    hooks: StepHooks,
    steps_per_epoch: int,
    mix: Mix | None = None,
) -> Iterator[StepReport]:
    """Train to the end of the epoch (or max_steps, or a stop signal). Yield a report at each step
    that is logged or saved.

    Updates `state`. Raises NotFiniteError for a loss that is not finite, on all ranks at the same
    step.
    """
    progress, window = state.progress, MetricWindow(strategy.device)
    last_step = config.train.max_steps or math.inf
    # Without this check, no step would follow and the epoch would never end.
    if progress.step_in_epoch > steps_per_epoch:
        raise RuntimeError(
            f"the checkpoint is at step {progress.step_in_epoch} of its epoch, but an epoch now "
            f"has {steps_per_epoch} steps: the training data changed after it was saved"
        )
    state.wrapped.train()
    while progress.step_in_epoch < steps_per_epoch and progress.step < last_step:
        step = progress.step + 1
        is_sync_step = _is_logged_or_saved(step, config) or step == last_step
        is_sync_step |= progress.step_in_epoch + 1 == steps_per_epoch
        hooks.start_step(step)
        seed_step(config.seed, step, strategy.group.rank, strategy.devices)

        # Compute the gradients of the step.
        for index in range(config.train.accumulate):
            is_last = index + 1 == config.train.accumulate
            with nullcontext() if is_last else strategy.skip_sync(state.wrapped):
                _add_batch(state, batches, config.train.accumulate, window, hooks, mix)

        # Update the weights, then what follows them.
        hooks.start_update()
        grad_norm = _clip_gradients(state, config.optim, strategy, needed=is_sync_step)
        _step_optimizer(state)
        strategy.after_step(step)
        # Read the rate before the schedule sets it for the next step.
        lr = (
            max(float(group["lr"]) for group in state.optimizer.param_groups)
            if is_sync_step
            else math.nan
        )
        if state.ema is not None:
            state.ema.update(state.model, step)
        progress.step, progress.step_in_epoch = step, progress.step_in_epoch + 1
        state.schedule.step_update(progress.schedule_step(steps_per_epoch))

        # Synchronize and report.
        stops = hooks.end_step()
        if is_sync_step or stops:
            progress.add_steps(window.fetch(strategy.group))
            hooks.synchronized()
        if is_sync_step:
            yield StepReport(
                progress.close_window(), lr, None if grad_norm is None else grad_norm.item()
            )
            # The caller may have switched to evaluation mode.
            state.wrapped.train()
        if stops:
            return


def _is_logged_or_saved(step: int, config: Config) -> bool:
    every = config.checkpoint.every_steps
    return step % config.train.log_every == 0 or (every is not None and step % every == 0)


def _add_batch(
    state: TrainState,
    batches: Iterator[Batch],
    accumulate: int,
    window: MetricWindow,
    hooks: StepHooks,
    mix: Mix | None,
) -> None:
    """Train on one batch: add its gradients, divided by `accumulate`,
    to the gradients of the step.
    """
    hooks.at(READING)
    images, targets = next(batches)
    hooks.at(FORWARD)
    if mix is not None:
        images, targets = mix(images, targets, state.progress.epoch)
    loss, metrics = state.wrapped(images, targets)
    window.add(state.progress.step + 1, loss, metrics, len(images))
    if accumulate > 1:
        loss = loss / accumulate
    hooks.at(BACKWARD)
    (loss if state.scaler is None else state.scaler.scale(loss)).backward()


def _clip_gradients(
    state: TrainState, optim: OptimConfig, strategy: Strategy, needed: bool
) -> Tensor | None:
    """Clip the gradients. Return their norm before clipping; None if it is neither `needed` nor
    used for clipping.
    """
    limit, mode = optim.clip_grad, optim.clip_mode
    if limit is None and not needed:
        return None
    if state.scaler is not None:
        state.scaler.unscale_(state.optimizer)
    if limit is not None and mode == "norm":
        return strategy.whole(nn.utils.clip_grad_norm_(state.parameters(), limit))
    norm = None
    if needed:
        gradients = [p.grad for p in state.parameters() if p.grad is not None]
        norm = strategy.whole(nn.utils.get_total_norm(gradients))
    if limit is not None:
        if mode == "agc":
            # As in timm, agc leaves the head alone, and so the parameters of a loss.
            clip_adaptively(model_parameters(state.model, exclude_head=True), limit)
        else:
            nn.utils.clip_grad_value_(state.parameters(), limit)
    return norm


def _step_optimizer(state: TrainState) -> None:
    if state.scaler is not None:
        state.scaler.step(state.optimizer)
        state.scaler.update()
    else:
        state.optimizer.step()
    state.optimizer.zero_grad(set_to_none=True)

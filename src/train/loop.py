"""The training loop: tensors in, numbers out. It does not use files, loggers or Hydra; run.py
writes its numbers.

Losses and metrics stay on the device until a step that is logged or saved (EpochSteps).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import cast

from timm.models import model_parameters
from torch import Tensor, nn

from src.schema import OptimConfig
from src.train.optim import clip_adaptively
from timm_parallel import EpochSteps, RunParts, Strategy, TrainState

Batch = tuple[Tensor, Tensor]  # images, targets


@dataclass(frozen=True)
class StepReport:
    """Training metrics since the previous report, for the log."""

    means: dict[str, float]  # loss and metrics over the images since the last report
    lr: float  # largest of all parameter groups at this step
    grad_norm: float | None  # 2-norm of this step's gradient before clipping


def run_steps(run: RunParts, batches: Iterator[Batch]) -> Iterator[StepReport]:
    """Train to the end of the epoch (or max_steps, or a stop signal). Yield a report at each step
    that is logged or saved.

    Updates `run.state`. Raises NotFiniteError for a loss that is not finite, on all ranks at the
    same step.
    """
    config, strategy, state, hooks = run.config, run.strategy, run.state, run.hooks
    steps, optim = EpochSteps(run), cast(OptimConfig, config.optim)
    accumulate = config.train.accumulate
    state.wrapped.train()
    for step in steps:
        # Compute the gradients of the step.
        for index in range(accumulate):
            images, targets = steps.fetch(batches)
            # Gradients are sums until the last batch, so only that one has to send them.
            is_last = index + 1 == accumulate
            with nullcontext() if is_last else strategy.skip_sync(state.wrapped):
                loss, metrics = _add_gradients(run, images, targets)
            steps.add(loss, metrics, len(images))

        # Update the weights, then what follows them.
        hooks.start_update()
        grad_norm = _clip_gradients(state, optim, strategy, needed=steps.is_sync_step)
        _step_optimizer(state)
        strategy.after_step(step)
        # Read the rate before the schedule sets it for the next step.
        lr = (
            max(float(group["lr"]) for group in state.optimizer.param_groups)
            if steps.is_sync_step
            else math.nan
        )
        # After the strategy, which may change the weights, so that every rank averages the same.
        if state.ema is not None:
            state.ema.update(state.model, step)

        # Synchronize and report.
        means = steps.end()
        state.schedule.step_update(state.progress.schedule_step(run.steps_per_epoch))
        if means is not None:
            yield StepReport(means, lr, None if grad_norm is None else grad_norm.item())
            # The caller may have switched to evaluation mode.
            state.wrapped.train()


def _add_gradients(
    run: RunParts, images: Tensor, targets: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Add the gradients of a batch, divided by train.accumulate, to those of the step. Return its
    loss and metrics.
    """
    state, accumulate = run.state, run.config.train.accumulate
    loss, metrics = state.wrapped(images, targets)
    scaled = loss / accumulate if accumulate > 1 else loss
    run.hooks.start_backward()
    (scaled if state.scaler is None else state.scaler.scale(scaled)).backward()
    return loss.detach(), metrics


def _clip_gradients(
    state: TrainState, optim: OptimConfig, strategy: Strategy, needed: bool
) -> Tensor | None:
    """Clip the gradients. Return their norm before clipping; None if it is neither `needed` nor
    used for clipping.
    """
    limit, mode = optim.clip_grad, optim.clip_mode
    if limit is None and not needed:
        return None
    # Under fp16 the gradients carry the loss scale, which their norm must not contain.
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
        # Skips a step whose gradients overflowed. Averaged gradients overflow on all ranks alike.
        state.scaler.step(state.optimizer)
        state.scaler.update()
    else:
        state.optimizer.step()
    # None and not zero: the next backward pass then writes gradients instead of adding to them.
    state.optimizer.zero_grad(set_to_none=True)

"""The training loop: takes tensors and returns numbers. It does not use files, loggers or Hydra;
run.py writes the numbers.

Losses and metrics stay on the device until a step that is logged or saved (EpochSteps), because
reading them waits for the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import cast

from timm.models import model_parameters
from torch import Tensor, nn

from src.schema import OptimConfig
from src.train.optim import clip_adaptively
from timm_parallel import EpochSteps, RunParts, Strategy, TrainState

# Images and targets of one batch.
Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class StepReport:
    """Training metrics of the steps since the previous report, to be logged."""

    # Means of the loss and of each metric over the images since the previous report.
    means: dict[str, float]
    # Largest learning rate of all parameter groups at this step.
    lr: float
    # 2-norm of the gradient of this step, before clipping.
    grad_norm: float | None


def run_steps(run: RunParts, batches: Iterator[Batch]) -> Iterator[StepReport]:
    """Train until the epoch ends, train.max_steps is reached, or a stop signal arrives. Yield a
    report at each step that is logged or saved. All ranks must call this function.

    The function updates `run.state`. It raises NotFiniteError on all ranks at the same step if a
    loss is not finite.
    """
    config, strategy, state, hooks = run.config, run.strategy, run.state, run.hooks
    steps, optim = EpochSteps(run), cast(OptimConfig, config.optim)
    accumulate = config.train.accumulate
    state.wrapped.train()
    for _ in steps:
        for index in range(accumulate):
            images, targets = steps.fetch(batches)
            # Skip the synchronization of gradients until the last batch of the step, because the
            # ranks need only the sum over these batches.
            is_last = index + 1 == accumulate
            with nullcontext() if is_last else strategy.skip_sync(state.wrapped):
                loss, metrics = _add_gradients(run, images, targets)
            steps.add(loss, metrics, len(images))

        hooks.start_update()
        grad_norm = _clip_gradients(state, optim, strategy, needed=steps.is_sync_step)
        _step_optimizer(state)

        # Update the averaged weights and the learning rate too.
        means = steps.end()
        if means is not None:
            yield StepReport(means, steps.lr, None if grad_norm is None else grad_norm.item())
            # Turn training mode on again, because the caller may have evaluated the model after the
            # report.
            state.wrapped.train()


def _add_gradients(
    run: RunParts, images: Tensor, targets: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Run the forward and backward pass of a batch, and add its gradients to those of the step.
    Gradients are divided by train.accumulate. Return the loss and metrics of the batch.
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
    """Clip the gradients. Return their norm before clipping, or None if neither the log nor the
    clipping needs it.
    """
    limit, mode = optim.clip_grad, optim.clip_mode
    if limit is None and not needed:
        return None
    # With fp16, remove the loss scale from the gradients, because clipping and the logged norm need
    # unscaled ones.
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
            # As in timm, adaptive clipping does not change the head; nor does it change the
            # parameters of a loss.
            clip_adaptively(model_parameters(state.model, exclude_head=True), limit)
        else:
            nn.utils.clip_grad_value_(state.parameters(), limit)
    return norm


def _step_optimizer(state: TrainState) -> None:
    if state.scaler is not None:
        # The scaler skips a step whose gradients overflowed. All ranks have the same averaged
        # gradients, so all of them skip the step.
        state.scaler.step(state.optimizer)
        state.scaler.update()
    else:
        state.optimizer.step()
    # Set gradients to None instead of 0. The next backward pass then writes the gradients, which is
    # faster than adding to zeros.
    state.optimizer.zero_grad(set_to_none=True)

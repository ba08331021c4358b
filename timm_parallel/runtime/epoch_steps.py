"""Iterate over the training steps of an epoch, and handle their limits, stop signals, times and
metrics.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from torch import Tensor

from timm_parallel.data.prefetch import Batch
from timm_parallel.faults.liveness import FORWARD, READING
from timm_parallel.measure.metric_window import MetricWindow
from timm_parallel.model.freeze import check_statistics_move, write_counts
from timm_parallel.runtime.determinism import seed_step
from timm_parallel.state.parts import RunParts


class EpochSteps:
    """Iterator over the remaining steps of an epoch, which ends early at train.max_steps or after a
    stop signal.

    The training loop calls `fetch` and `add` for each batch of a step, steps the optimizer, and
    then calls `end`, which also averages the weights and steps the schedule. A sync step
    is a step that logs, saves or evaluates, or the last step of an epoch. Losses and metrics stay
    on the device until the next sync step, at which they are summed over the ranks. Between two
    sync steps, the CPU does not wait for the device.
    """

    def __init__(self, parts: RunParts) -> None:
        progress, config, strategy = parts.progress, parts.config, parts.strategy
        steps_per_epoch = parts.steps_per_epoch
        # Raise an error, because an epoch with fewer steps than the checkpoint has trained would
        # never end.
        if progress.step_in_epoch > steps_per_epoch:
            raise RuntimeError(
                f"the checkpoint was saved at step {progress.step_in_epoch} of an epoch, but an "
                f"epoch now has {steps_per_epoch} steps, because the training data changed"
            )
        self.progress, self.config, self.strategy = progress, config, strategy
        self.state = parts.state
        self.hooks, self.mixing = parts.hooks, parts.mixing
        self.steps_per_epoch, self.last_step = steps_per_epoch, config.train.max_steps or math.inf
        self.window = MetricWindow(strategy.device)
        self.is_sync_step = self.stops = False
        # In the first step of an epoch, how often its frozen modules had been written before.
        self.written: list[tuple[int, int]] | None = None
        # Number of batches that the loop has added in the current step.
        self.batches = 0
        # Largest learning rate of all parameter groups at the newest sync step.
        self.lr = math.nan

    def __iter__(self) -> Iterator[int]:
        """Yield the number of each step, which counts from 1 at the start of the run."""
        progress = self.progress
        while (
            progress.step_in_epoch < self.steps_per_epoch
            and progress.step < self.last_step
            and not self.stops
        ):
            step = progress.step + 1
            is_last = progress.step_in_epoch + 1 == self.steps_per_epoch or step == self.last_step
            self.is_sync_step = is_last or self._is_logged_or_saved(step)
            self.batches = 0
            is_first = progress.step_in_epoch == 0
            self.written = write_counts(self.state.train_step) if is_first else None
            self.hooks.start_step(step)
            seed_step(self.config.seed, step, self.strategy.group.rank, self.strategy.devices)
            yield step

    def fetch(self, batches: Iterator[Batch]) -> Batch:
        """Return the next batch, with mixup or cutmix if configured, and measure how long the
        device waits.
        """
        self.hooks.at(READING)
        batch = next(batches)
        self.hooks.at(FORWARD)
        if self.mixing is not None:
            batch = self.mixing(*batch, self.progress.epoch)
        return batch

    def add(self, loss: Tensor, metrics: dict[str, Tensor], images: int) -> None:
        """Add the loss and metrics of one batch to those of the current step.

        The values are means over the `images` images of the batch.
        """
        self.batches += 1
        self.window.add(self.progress.step + 1, loss, metrics, images)

    def end(self) -> dict[str, float] | None:
        """End a training step after the optimizer has changed the weights: update the averaged
        weights and the learning rate.

        At a step that logs, saves or evaluates, returns the mean loss and metrics of all ranks
        since the last such step; else None. Raises NotFiniteError on all ranks if a loss is not
        finite, and RuntimeError if the loop has not added train.accumulate batches. All ranks must
        call this function.
        """
        progress, state = self.progress, self.state
        step, accumulate = progress.step + 1, self.config.train.accumulate
        if self.batches != accumulate:
            raise RuntimeError(
                f"train.accumulate={accumulate}: the training loop added {self.batches} batches in "
                f"step {step}; it must call fetch and add for each batch of a step"
            )
        if self.written is not None:
            check_statistics_move(self.written, write_counts(state.train_step))
        self.strategy.after_step(step)
        if self.is_sync_step:
            self.lr = max(float(group["lr"]) for group in state.optimizer.param_groups)
        # Average the weights after the strategy's own update, which may change them, so that all
        # ranks average equal weights.
        if state.ema is not None:
            state.ema.update(state.model, step)
        progress.step, progress.step_in_epoch = step, progress.step_in_epoch + 1
        self.stops = self.hooks.end_step()
        if self.is_sync_step or self.stops:
            progress.add_steps(self.window.fetch(self.strategy.group))
            self.hooks.synchronized()
        state.schedule.step_update(progress.schedule_step(self.steps_per_epoch))
        return progress.close_window() if self.is_sync_step else None

    def _is_logged_or_saved(self, step: int) -> bool:
        config = self.config
        periods = (
            config.train.log_every,
            config.checkpoint.every_steps,
            config.train.evaluate_every_steps,
        )
        return any(step % period == 0 for period in periods if period is not None)

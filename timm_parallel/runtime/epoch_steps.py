"""Steps of an epoch for a training loop: their limits, stop signals, times and metrics."""

from __future__ import annotations

import math
from collections.abc import Iterator

from torch import Tensor

from timm_parallel.data.prefetch import Batch
from timm_parallel.faults.liveness import FORWARD, READING
from timm_parallel.measure.metric_window import MetricWindow
from timm_parallel.runtime.determinism import seed_step
from timm_parallel.state.parts import RunParts


class EpochSteps:
    """Iterator over the remaining steps of an epoch, which ends early at train.max_steps or after a
    stop signal. The loop calls `fetch` and `add` for each batch of a step, then `end`.

    A sync step is a step to log, save or evaluate at, or the last of an epoch. Between two of them
    nothing waits for the device: losses and metrics stay there, and are fetched once, summed over
    the ranks.
    """

    def __init__(self, parts: RunParts) -> None:
        progress, config, strategy = parts.progress, parts.config, parts.strategy
        steps_per_epoch = parts.steps_per_epoch
        # Without this check, no step would follow and the epoch would never end.
        if progress.step_in_epoch > steps_per_epoch:
            raise RuntimeError(
                f"the checkpoint is at step {progress.step_in_epoch} of its epoch, but an epoch "
                f"now has {steps_per_epoch} steps: the training data changed after it was saved"
            )
        self.progress, self.config, self.strategy = progress, config, strategy
        self.hooks, self.mixing = parts.hooks, parts.mixing
        self.steps_per_epoch, self.last_step = steps_per_epoch, config.train.max_steps or math.inf
        self.window = MetricWindow(strategy.device)
        self.is_sync_step = self.stops = False

    def __iter__(self) -> Iterator[int]:
        """Yield the number of each step, from 1 in the first epoch."""
        progress = self.progress
        while (
            progress.step_in_epoch < self.steps_per_epoch
            and progress.step < self.last_step
            and not self.stops
        ):
            step = progress.step + 1
            is_last = progress.step_in_epoch + 1 == self.steps_per_epoch or step == self.last_step
            self.is_sync_step = is_last or self._is_logged_or_saved(step)
            self.hooks.start_step(step)
            seed_step(self.config.seed, step, self.strategy.group.rank, self.strategy.devices)
            yield step

    def fetch(self, batches: Iterator[Batch]) -> Batch:
        """Return the next batch, with mixup or cutmix, and measure the wait for it."""
        self.hooks.at(READING)
        batch = next(batches)
        self.hooks.at(FORWARD)
        if self.mixing is not None:
            batch = self.mixing(*batch, self.progress.epoch)
        return batch

    def add(self, loss: Tensor, metrics: dict[str, Tensor], images: int) -> None:
        """Add the loss and metrics of a batch, means over its `images` images, to those of the
        step.
        """
        self.window.add(self.progress.step + 1, loss, metrics, images)

    def end(self) -> dict[str, float] | None:
        """End the step after the optimizer's. At a sync step, return the means of loss and metrics
        since the last one over all ranks, else None.

        Collective. Raises NotFiniteError for a loss that is not finite, on all ranks at the same
        step.
        """
        progress = self.progress
        progress.step, progress.step_in_epoch = progress.step + 1, progress.step_in_epoch + 1
        self.stops = self.hooks.end_step()
        if self.is_sync_step or self.stops:
            progress.add_steps(self.window.fetch(self.strategy.group))
            self.hooks.synchronized()
        return progress.close_window() if self.is_sync_step else None

    def _is_logged_or_saved(self, step: int) -> bool:
        config = self.config
        periods = (
            config.train.log_every,
            config.checkpoint.every_steps,
            config.train.evaluate_every_steps,
        )
        return any(step % period == 0 for period in periods if period is not None)

"""Training progress, saved in every checkpoint: steps, epochs, sums of the logged metrics, and best
evaluations.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from timm_parallel.keys import TrainConfig
from timm_parallel.metric import Metric


@dataclass
class Progress:
    """Steps and epochs trained, sums of training metrics, and best evaluation. A step is an
    optimizer step.
    """

    step: int = 0
    epoch: int = 0  # the current one, from 0
    step_in_epoch: int = 0
    # By metric, sums over images: since the last logged step (window), and from the epoch's start
    # to that step (epoch).
    window_sums: dict[str, float] = field(default_factory=dict)
    window_images: int = 0
    epoch_sums: dict[str, float] = field(default_factory=dict)
    epoch_images: int = 0
    epoch_means: dict[str, float] = field(
        default_factory=dict
    )  # of the newest whole or partial epoch
    ended_at: int = 0  # step at which the last epoch ended, whole or cut off by train.max_steps
    best: float | None = None  # of checkpoint.metric; higher is better (a loss is negated)
    best_metric: str | None = None  # of `best`, e.g. acc_ema; None: not evaluated
    best_values: dict[str, float] = field(default_factory=dict)  # by metric
    evaluations_since_best: int = 0
    score: float | None = (
        None  # of checkpoint.metric in the newest evaluation, as `best`; None: NaN
    )
    evaluated_at: int | None = None  # step of the newest evaluation

    def schedule_step(self, steps_per_epoch: int) -> int:
        """Return the step at which to read the learning-rate schedule: as if all epochs had
        `steps_per_epoch` steps.
        """
        return self.epoch * steps_per_epoch + self.step_in_epoch

    def last_step(self, train: TrainConfig, steps_per_epoch: int) -> int:
        """Return the step at which the run ends. Counts from the current step, because earlier
        epochs may have had a different number of steps.
        """
        left = (train.epochs - self.epoch) * steps_per_epoch - self.step_in_epoch
        return min(self.step + left, train.max_steps or sys.maxsize)

    def start_new_best(self, metric: str) -> bool:
        """Forget the best evaluation if it was measured by another metric than `metric`. Return
        True if so.
        """
        is_other = self.best_metric not in (None, metric)
        if is_other:
            self.best, self.evaluations_since_best = None, 0
            if metric.endswith("_ema") != str(self.best_metric).endswith("_ema"):
                self.best_values = {}
        self.best_metric = metric
        return is_other

    def add_steps(self, steps: Iterable[tuple[dict[str, float], int]]) -> None:
        """Add the (metric sums, number of images) of each step to the window."""
        # One step at a time, so that a stop and resume in between does not change the rounding.
        for sums, images in steps:
            for name, value in sums.items():
                self.window_sums[name] = self.window_sums.get(name, 0.0) + value
            self.window_images += images

    def close_window(self) -> dict[str, float]:
        """Return the mean of each metric since the last logged step, add the sums to the epoch, and
        start a new window.
        """
        means = {name: value / self.window_images for name, value in self.window_sums.items()}
        for name, value in self.window_sums.items():
            self.epoch_sums[name] = self.epoch_sums.get(name, 0.0) + value
        self.epoch_images += self.window_images
        self.window_sums, self.window_images = {}, 0
        return means

    def end_epoch(self, is_whole: bool) -> None:
        """Store the means of the metrics over the epoch. If `is_whole`, begin the next epoch; else
        a resume continues it.
        """
        self.ended_at = self.step
        self.epoch_means = {
            name: value / self.epoch_images for name, value in self.epoch_sums.items()
        }
        if is_whole:
            self.epoch += 1
            self.step_in_epoch, self.epoch_sums, self.epoch_images = 0, {}, 0

    def add_evaluation(
        self, numbers: dict[str, Any], metric: str, metrics: Mapping[str, Metric]
    ) -> bool:
        """Record an evaluation on the validation split. Return True if it is the best so far by
        `metric`.

        `numbers`: value by metric, also `<metric>_ema`. `metric`: checkpoint.metric without `val/`.
        `metrics`: of the task.
        """
        self.start_new_best(metric)
        is_averaged = metric.endswith("_ema")
        for name, known in metrics.items():
            value = numbers.get(f"{name}_ema" if is_averaged else name)
            if value is not None and not math.isnan(value):
                better_of = min if known.lower_is_better else max
                self.best_values[name] = better_of(self.best_values.get(name, value), value)
        value = (
            -numbers[metric]
            if metrics[metric.removesuffix("_ema")].lower_is_better
            else numbers[metric]
        )
        self.score, self.evaluated_at = None if math.isnan(value) else value, self.step
        is_best = not math.isnan(value) and (self.best is None or value > self.best)
        self.best = value if is_best else self.best
        self.evaluations_since_best = 0 if is_best else self.evaluations_since_best + 1
        return is_best

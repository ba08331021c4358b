"""Progress of the training: steps, epochs, sums of the logged metrics, and best evaluations.

Every checkpoint stores it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from timm_parallel.keys import TrainConfig
from timm_parallel.metric import Metric


@dataclass
class Progress:
    """Steps and epochs trained so far, sums of training metrics, and the best evaluation.

    A step is an optimizer step.
    """

    step: int = 0
    # Number of the current epoch, from 0.
    epoch: int = 0
    step_in_epoch: int = 0
    # Seconds of rank 0 in training steps up to the last logged one, over all segments. Steps that a
    # resume has trained again count once.
    seconds: float = 0.0
    # Sums of each metric over images. The window starts at the last logged step. The epoch sums
    # include all steps from the start of the epoch to the last logged step.
    window_sums: dict[str, float] = field(default_factory=dict)
    window_images: int = 0
    epoch_sums: dict[str, float] = field(default_factory=dict)
    epoch_images: int = 0
    # Means of the training metrics over the newest epoch, which may have ended early.
    epoch_means: dict[str, float] = field(default_factory=dict)
    # Step at which the newest epoch ended, or at which train.max_steps or train.max_minutes ended
    # it early.
    ended_at: int = 0
    # Best value of checkpoint.metric so far. A loss is negated, so higher is always better.
    best: float | None = None
    # Name of the metric that `best` measures, such as acc_ema. None before the first evaluation.
    best_metric: str | None = None
    # Dictionary from the name of each metric to its best value so far.
    best_values: dict[str, float] = field(default_factory=dict)
    evaluations_since_best: int = 0
    # Step of the newest evaluation.
    evaluated_at: int | None = None

    def schedule_step(self, steps_per_epoch: int) -> int:
        """Return the step number with which to update the learning-rate schedule.

        Each earlier epoch counts as `steps_per_epoch` steps, even if it had another number of steps
        before a resume. The learning rate therefore depends only on the position in the training,
        in epochs.
        """
        return self.epoch * steps_per_epoch + self.step_in_epoch

    def epochs_done(self, steps_per_epoch: int) -> float:
        """Return the number of epochs trained so far, for example 2.5 in the middle of the third
        epoch.
        """
        return self.epoch + self.step_in_epoch / steps_per_epoch

    def last_step(self, train: TrainConfig, steps_per_epoch: int) -> int:
        """Return the step at which the run ends, which is the current one if train.max_minutes is
        reached.

        The remaining steps are added to the current step, because earlier epochs may have had other
        numbers of steps.
        """
        if train.is_out_of_time(self.seconds):
            return self.step
        left = (train.epochs - self.epoch) * steps_per_epoch - self.step_in_epoch
        return min(self.step + left, train.max_steps or sys.maxsize)

    def start_new_best(self, metric: str) -> bool:
        """Discard the best value so far if the run now selects checkpoints by another metric.

        `metric`: the name of this metric. Returns True if the best value was discarded.
        """
        is_other = self.best_metric not in (None, metric)
        if is_other:
            self.best, self.evaluations_since_best = None, 0
            if metric.endswith("_ema") != str(self.best_metric).endswith("_ema"):
                self.best_values = {}
        self.best_metric = metric
        return is_other

    def end_epoch(self, is_whole: bool) -> None:
        """Compute the means of the training metrics over the epoch.

        If `is_whole`, the next epoch starts. Else the epoch was stopped early, and a resume
        continues it.
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
        """Record an evaluation on the val split, and return True if it is the best so far.

        `metric`: checkpoint.metric without `val/`, which decides what is best. `numbers`:
        dictionary from metric to value, which also has `<metric>_ema` if weights are averaged.
        `metrics`: the metrics of the task.
        """
        self.start_new_best(metric)
        is_averaged = metric.endswith("_ema")
        for name, known in metrics.items():
            value = numbers.get(f"{name}_ema" if is_averaged else name)
            if value is not None and not math.isnan(value):
                better_of = min if known.lower_is_better else max
                self.best_values[name] = better_of(self.best_values.get(name, value), value)
        value = math.nan if numbers[metric] is None else numbers[metric]
        if metrics[metric.removesuffix("_ema")].lower_is_better:
            value = -value
        self.evaluated_at = self.step
        is_best = not math.isnan(value) and (self.best is None or value > self.best)
        self.best = value if is_best else self.best
        self.evaluations_since_best = 0 if is_best else self.evaluations_since_best + 1
        return is_best

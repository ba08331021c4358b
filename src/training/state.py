"""What training changes: the modules and tensors of a step, and how far it has come. Saved and restored as one."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from timm.scheduler.scheduler import Scheduler
from timm.utils import ModelEmaV3
from torch import nn

from src.schema import TrainConfig
from src.training.metrics import is_lower_better


@dataclass
class Progress:
    """Where training is, in all of its units. One step is one optimizer step."""

    step: int = 0
    epoch: int = 0  # the epoch under way
    step_in_epoch: int = 0
    loss_sum: float = 0.0  # over this epoch's steps up to the last boundary, mean of the ranks
    loss_steps: int = 0  # how many losses are in loss_sum: all of the epoch's steps but the skipped
    # The same over the steps since that boundary, as far as they were fetched: for a checkpoint between two boundaries.
    open_loss: float = 0.0
    open_steps: int = 0
    skipped: int = 0  # steps without an update, because their gradients were not finite
    ended_at: int = 0  # the step after which an epoch, whole or cut off by train.max_steps, was last closed
    epoch_loss: float | None = None  # mean over the steps of the newest whole or partial epoch; None without any
    best: float | None = None  # of checkpoint.metric; higher is better (a loss is negated)
    best_acc: float = 0.0
    evaluations_since_best: int = 0

    def add_losses(self, losses: Iterable[float]) -> None:
        """Add one by one: so a run that was stopped between two boundaries and resumed gets bitwise the same sum."""
        for loss in losses:
            self.open_loss += loss
            self.open_steps += 1

    def close_window(self) -> float:
        """The mean loss since the last boundary, which is now here; NaN where all steps were skipped."""
        mean = self.open_loss / self.open_steps if self.open_steps else float("nan")
        self.loss_sum += self.open_loss
        self.loss_steps += self.open_steps
        self.open_loss, self.open_steps = 0.0, 0
        return mean

    def end_epoch(self, is_whole: bool) -> None:
        """Note its mean loss. One that train.max_steps cuts off stays under way, for a run that goes on with it."""
        self.ended_at = self.step
        self.epoch_loss = self.loss_sum / self.loss_steps if self.loss_steps else None
        if is_whole:
            self.epoch, self.step_in_epoch, self.loss_sum, self.loss_steps = self.epoch + 1, 0, 0.0, 0

    def note_evaluation(self, numbers: dict[str, Any], metric: str) -> bool:
        """Update the best values by an evaluation on val. True if it is the best so far by `metric`, e.g. `acc_ema`."""
        value = -numbers[metric] if is_lower_better(metric) else numbers[metric]
        self.best_acc = max(self.best_acc, numbers["acc_ema" if metric.endswith("_ema") else "acc"])
        is_best = not math.isnan(value) and (self.best is None or value > self.best)
        self.best = value if is_best else self.best
        self.evaluations_since_best = 0 if is_best else self.evaluations_since_best + 1
        return is_best


def count_steps(train: TrainConfig, batches_per_epoch: int) -> tuple[int, int]:
    """(optimizer steps per epoch, those of the whole training)."""
    per_epoch = batches_per_epoch // train.accumulate
    return per_epoch, min(train.epochs * per_epoch, train.max_steps or sys.maxsize)


@dataclass
class TrainState:
    """Everything that a step changes."""

    model: nn.Module  # bare
    wrapped: nn.Module  # (images, targets) -> mean loss
    optimizer: torch.optim.Optimizer
    schedule: Scheduler | None
    scaler: torch.amp.GradScaler | None
    ema: ModelEmaV3 | None
    progress: Progress = field(default_factory=Progress)

    @property
    def modules(self) -> dict[str, nn.Module]:
        """The bare model, and the averaged one where there is one, by their names in a checkpoint."""
        return {"model": self.model} | ({} if self.ema is None else {"ema": self.ema.module})

"""Training state: everything that a step changes and a checkpoint stores."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

import torch
from timm.scheduler.scheduler import Scheduler
from timm.utils import ModelEmaV3
from torch import nn

from src.engine.runtime.progress import Progress
from src.schema import TrainConfig


@dataclass
class TrainState:
    """Model, optimizer, schedule, EMA and progress, which a training step changes."""

    model: nn.Module  # bare
    wrapped: nn.Module  # (images, targets) -> (mean loss, metrics)
    optimizer: torch.optim.Optimizer
    schedule: Scheduler
    scaler: torch.amp.GradScaler | None
    ema: ModelEmaV3 | None
    progress: Progress = field(default_factory=Progress)

    @property
    def modules(self) -> dict[str, nn.Module]:
        """The unwrapped model and, with model.ema, the averaged model, by their names in a checkpoint."""
        modules = {"model": self.model}
        return modules if self.ema is None else modules | {"ema": self.ema.module}


def count_steps(train: TrainConfig, batches_per_epoch: int) -> tuple[int, int]:
    """Return the optimizer steps per epoch and in total."""
    per_epoch = batches_per_epoch // train.accumulate
    return per_epoch, min(train.epochs * per_epoch, train.max_steps or sys.maxsize)

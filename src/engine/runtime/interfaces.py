"""Objects that src/train/ builds and the engine uses: the training state, and the parts of a run on one rank."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import nn

from src.engine.data.dataset import ImageDataset, split_fingerprint
from src.engine.data.loader import Loader, TrainLoader
from src.engine.parallel.communication import Communication
from src.engine.parallel.strategy import Strategy
from src.engine.runtime.progress import Progress
from src.engine.runtime.step_hooks import StepHooks
from src.schema import ResolvedConfig


@dataclass
class TrainState:
    """Model, optimizer, schedule, EMA and progress: all that a training step changes. A checkpoint stores it."""

    model: nn.Module  # without the wrapper of the strategy
    wrapped: nn.Module  # (images, targets) -> (mean loss, metrics)
    optimizer: torch.optim.Optimizer
    schedule: Any  # timm's Scheduler; has step_update(step)
    scaler: torch.amp.GradScaler | None
    ema: Any  # None, or timm's ModelEmaV3: has a `module` and update(model, step)
    progress: Progress = field(default_factory=Progress)

    @property
    def modules(self) -> dict[str, nn.Module]:
        """The unwrapped model and, with model.ema, the averaged model, by their names in a checkpoint."""
        modules = {"model": self.model}
        return modules if self.ema is None else modules | {"ema": self.ema.module}


class BuiltRun:
    """Objects of a run on one rank, ready to train: config, strategy, training state, data loaders and step hooks."""

    config: ResolvedConfig
    strategy: Strategy
    communication: Communication
    state: TrainState
    hooks: StepHooks
    train: TrainLoader
    evaluation: dict[str, Loader]  # by split
    steps_per_epoch: int
    total_steps: int
    numbers: dict[str, dict[str, Any]]  # of the newest evaluation, by split
    dataset: ImageDataset
    image_size: int  # pixels of a side of training images
    preprocessing: Any  # a dataclass: how images are prepared
    mixing: Any  # None, or has a `batch`: how many batches were mixed
    segments: list[dict[str, Any]]  # attempts of the run; see Result

    @property
    def epochs_done(self) -> float:
        """Return the epochs trained so far, for example 2.5 in the middle of the third."""
        return self.state.progress.epoch + self.state.progress.step_in_epoch / self.steps_per_epoch

    @cached_property
    def listing(self) -> str:
        """Return the fingerprint of the training images."""
        return split_fingerprint(self.dataset.train)

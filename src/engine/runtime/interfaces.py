"""Interfaces between the engine and your code: attributes of the objects that src/train/ builds and the engine uses."""

from __future__ import annotations

from functools import cached_property
from typing import Any, Protocol

import torch
from torch import nn

from src.engine.data.dataset import ImageDataset, split_fingerprint
from src.engine.data.loader import Loader, TrainLoader
from src.engine.parallel.communication import Communication
from src.engine.parallel.strategy import Strategy
from src.engine.runtime.progress import Progress
from src.engine.runtime.step_hooks import StepHooks
from src.schema import ResolvedConfig


class TrainingState(Protocol):
    """Model, optimizer, EMA and progress: what a training step changes and a checkpoint stores."""

    model: nn.Module  # bare
    wrapped: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: Any  # has step_update(step)
    scaler: torch.amp.GradScaler | None
    ema: Any  # None, or has a `module`
    progress: Progress

    @property
    def modules(self) -> dict[str, nn.Module]:
        """Return name -> module of each set of weights in a checkpoint: `model` and, with EMA, `ema`."""


class BuiltRun:
    """Objects of a run on one rank, ready to train: config, strategy, training state, data loaders and step hooks."""

    config: ResolvedConfig
    strategy: Strategy
    communication: Communication
    state: TrainingState
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

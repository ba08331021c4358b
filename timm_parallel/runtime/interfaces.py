"""Objects that src/train/ builds and the engine uses: the training state, and the parts of a run on
one rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from timm_parallel.data.dataset import ImageDataset, split_fingerprint
from timm_parallel.data.loader import Loader, TrainLoader
from timm_parallel.keys import ResolvedConfig
from timm_parallel.parallel.communication import Communication
from timm_parallel.parallel.strategy import Strategy, own_parameters
from timm_parallel.runtime.progress import Progress
from timm_parallel.runtime.step_hooks import StepHooks

# Begins the names of the step's own parameters, after those of the model.
OF_STEP = "train_step"


@dataclass
class TrainState:
    """Model, training step, optimizer, schedule, EMA and progress: all that a step changes. A
    checkpoint stores it.
    """

    model: nn.Module  # without the wrapper of the strategy
    train_step: nn.Module  # the model, the loss and what else a step has; also without the wrapper
    wrapped: nn.Module  # (images, targets) -> (mean loss, metrics)
    optimizer: torch.optim.Optimizer
    schedule: Any  # timm's Scheduler; has step_update(step)
    scaler: torch.amp.GradScaler | None
    ema: Any  # None, or timm's ModelEmaV3: has a `module` and update(model, step)
    progress: Progress = field(default_factory=Progress)

    @property
    def modules(self) -> dict[str, nn.Module]:
        """The unwrapped model and, with model.ema, the averaged model, by their names in a
        checkpoint.
        """
        modules = {"model": self.model}
        return modules if self.ema is None else modules | {"ema": self.ema.module}

    @cached_property
    def own_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters of the training step besides the model's, by name: those of the loss, or
        of a projector.
        """
        return own_parameters(self.train_step, self.model)

    def own_tensors(self) -> dict[str, Tensor]:
        """Return the parameters of the training step besides the model's, and its buffers that a
        state dict has, by name.
        """
        of_model = {id(buffer) for buffer in self.model.buffers()}
        saved = self.train_step.state_dict().keys()
        # Looked up in each call, because a module may replace its buffers.
        buffers = self.train_step.named_buffers()
        own = {
            name: buffer for name, buffer in buffers if name in saved and id(buffer) not in of_model
        }
        return {**self.own_parameters, **own}

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the names and parameters of the model,
        then those of the training step's own ones.
        """
        yield from self.model.named_parameters()
        yield from (
            (f"{OF_STEP}.{name}", parameter) for name, parameter in self.own_parameters.items()
        )

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield all parameters of the training step, the model's first."""
        yield from self.model.parameters()
        yield from self.own_parameters.values()


class BuiltRun:
    """Objects of a run on one rank, ready to train: config, strategy, training state, data loaders
    and step hooks.
    """

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
    flops_per_step: int | None  # of the whole step, see Result; on rank 0, None elsewhere
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

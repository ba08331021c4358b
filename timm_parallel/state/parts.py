"""Objects that src/train/ builds and the library uses: the training state, and the parts of a run
on one rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from timm_parallel.data.dataset import ImageDataset, split_fingerprint
from timm_parallel.data.loader import Loader, TrainLoader
from timm_parallel.keys import ResolvedConfig, leaves
from timm_parallel.machine.secrets import hide_in
from timm_parallel.measure.step_hooks import StepHooks
from timm_parallel.measure.step_profiler import build_hooks
from timm_parallel.model.checks import check_is_complete, check_sharded_model
from timm_parallel.parallel.communication import Communication
from timm_parallel.parallel.strategy import HasParameters, Strategy, own_parameters
from timm_parallel.state.progress import Progress
from timm_parallel.task import Task

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


@dataclass(frozen=True)
class RunParts:
    """Parts of a training run on one rank, as built from the config. Training changes only what
    `state`, `hooks`, `communication` and `mixing` refer to.
    """

    config: ResolvedConfig
    strategy: Strategy
    dataset: ImageDataset
    task: Task[Any]
    preprocessing: Any  # a dataclass: how images are prepared
    image_size: tuple[int, int]  # height and width of training images in pixels
    train_loader: TrainLoader
    eval_loaders: dict[str, Loader]  # by split
    state: TrainState
    mixing: Any  # None, or (images, targets, epoch) -> mixed images and targets
    communication: Communication
    hooks: StepHooks
    steps_per_epoch: int  # optimizer steps, each of train.accumulate global batches
    flops_per_step: int | None  # of the whole step, see Result; on rank 0, None elsewhere

    @classmethod
    def assemble(
        cls,
        config: ResolvedConfig,
        strategy: Strategy,
        train_loader: TrainLoader,
        state: TrainState,
        profiled: tuple[int | None, int | None] = (None, None),
        **parts: Any,
    ) -> RunParts:
        """Put the parts of a run together, with what times its steps and its communication.

        `profiled`: number of first steps that are not timed, and of those of them that are
        profiled. `parts`: the other fields. Raises ValueError if the optimizer lacks a parameter
        that is to be trained, or if a sharded model cannot be evaluated. Collective.
        """
        check_is_complete(state.optimizer, state)
        if strategy.shards:
            step: Any = state.train_step
            size = parts["preprocessing"].input_size
            check_sharded_model(strategy.for_evaluation(step.model), size, strategy.group)
        batches = train_loader.sampler.batches_per_epoch
        steps_per_epoch, total_steps = config.train.count_steps(batches)
        communication = strategy.communication(state.wrapped)
        hooks = build_hooks(config, strategy, communication, total_steps, *profiled)
        return cls(
            config=config,
            strategy=strategy,
            train_loader=train_loader,
            state=state,
            communication=communication,
            hooks=hooks,
            steps_per_epoch=steps_per_epoch,
            **parts,
        )

    @property
    def progress(self) -> Progress:
        return self.state.progress

    @property
    def total_steps(self) -> int:
        """Count the steps of the whole run, including those before a resume."""
        return self.progress.last_step(self.config.train, self.steps_per_epoch)

    @property
    def epochs_done(self) -> float:
        """Return the epochs trained so far, for example 2.5 in the middle of the third."""
        return self.progress.epoch + self.progress.step_in_epoch / self.steps_per_epoch

    @cached_property
    def listing(self) -> str:
        """Return the fingerprint of the training images."""
        return split_fingerprint(self.dataset.train)


def data_of_a_step(parts: RunParts) -> dict[str, Any]:
    """Return all settings that decide which images a step reads; the number of devices is not one
    of them.
    """
    config = parts.config
    return {
        "images": parts.train_loader.sampler.num_images,
        "listing": parts.listing,
        "steps_per_epoch": parts.steps_per_epoch,
        "images_per_step": config.global_batch * config.train.accumulate,
        "seed": config.seed,
        **config.data.sampling,
    }


def plain_config(parts: RunParts) -> dict[str, Any]:
    """Return the config of a run as dotted key -> value, with secrets replaced."""
    return dict(hide_in({key: value for key, value, _ in leaves(parts.config)}))


def parameter_names(optimizer: Optimizer, model: HasParameters) -> list[str]:
    """Return the names of the optimizer's parameters, in the order of their numbers in
    `state_dict()`.
    """
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    return [
        name_of[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]
    ]


def count_parameters(model: nn.Module) -> int:
    """Return the number of elements in all parameters of `model`."""
    return sum(parameter.numel() for parameter in model.parameters())

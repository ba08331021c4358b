"""Objects that src/train/ builds and the library uses: the training state, and the parts
of a run.
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
from timm_parallel.machine.start_clock import start_clock
from timm_parallel.measure.step_hooks import StepHooks
from timm_parallel.measure.step_profiler import build_hooks
from timm_parallel.model.checks import check_batch_norm, check_is_complete, check_sharded_model
from timm_parallel.parallel.communication import Communication
from timm_parallel.parallel.strategy import HasParameters, Strategy, own_parameters
from timm_parallel.state.progress import Progress
from timm_parallel.task import Task

# Prefix of the names of parameters that the training step has in addition to its model.
OF_STEP = "train_step"


@dataclass
class TrainState:
    """Model, training step, optimizer, schedule, averaged weights and progress of a run.

    These are all objects that a training step changes. A checkpoint stores their state.
    """

    # The model without the wrapper of the strategy.
    model: nn.Module
    # The training step, which holds the model and the loss, without the wrapper of the strategy.
    train_step: nn.Module
    # The training step in the wrapper of the strategy. It maps images and targets to the mean loss
    # and the metrics.
    wrapped: nn.Module
    optimizer: torch.optim.Optimizer
    # A learning-rate schedule of timm, with a method step_update(step).
    schedule: Any
    scaler: torch.amp.GradScaler | None
    # The averaged weights, an object of timm's ModelEmaV3, or None.
    ema: Any
    progress: Progress = field(default_factory=Progress)

    @property
    def modules(self) -> dict[str, nn.Module]:
        """Return the models that a checkpoint stores, as a dictionary.

        The key `model` holds the unwrapped model. If weights are averaged, the key `ema` holds the
        averaged model.
        """
        modules = {"model": self.model}
        return modules if self.ema is None else modules | {"ema": self.ema.module}

    @cached_property
    def own_parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters that the training step has in addition to its model, by name.

        Examples are the parameters of a loss or of a projector.
        """
        return own_parameters(self.train_step, self.model)

    def own_tensors(self) -> dict[str, Tensor]:
        """Return the parameters and buffers that the training step has in addition to its model, by
        name.

        Buffers that are not in the state dict are left out.
        """
        of_model = {id(buffer) for buffer in self.model.buffers()}
        saved = self.train_step.state_dict().keys()
        # Look up the buffers in each call, because a module may replace its buffers.
        buffers = self.train_step.named_buffers()
        own = {
            name: buffer for name, buffer in buffers if name in saved and id(buffer) not in of_model
        }
        return {**self.own_parameters, **own}

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield names and parameters of the model, and then those that only the training
        step has.
        """
        yield from self.model.named_parameters()
        yield from (
            (f"{OF_STEP}.{name}", parameter) for name, parameter in self.own_parameters.items()
        )

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield all parameters of the training step, starting with those of the model."""
        return (parameter for _, parameter in self.named_parameters())


@dataclass(frozen=True)
class RunParts:
    """The objects of a training run on one rank, such as config, dataset, task, loaders and
    training state.

    Training changes only the objects `state`, `hooks`, `communication` and `mixing`.
    """

    config: ResolvedConfig
    strategy: Strategy
    dataset: ImageDataset
    task: Task[Any]
    # A dataclass with the settings that prepare images, such as size, mean and std.
    preprocessing: Any
    # Height and width of the training images in pixels.
    image_size: tuple[int, int]
    train_loader: TrainLoader
    # Dictionary from the name of each split to evaluate to its loader.
    eval_loaders: dict[str, Loader]
    state: TrainState
    # Function that maps images, targets and epoch to a batch with mixup or cutmix, or None.
    mixing: Any
    communication: Communication
    hooks: StepHooks
    # Number of optimizer steps per epoch. Each step has train.accumulate global batches.
    steps_per_epoch: int
    # Floating-point operations of an optimizer step over all devices. None on all ranks but rank 0.
    flops_per_step: int | None

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
        """Build the object that holds the parts of a run, and the objects that time its steps and
        its communication.

        `profiled`: (number of steps at the start that are not timed, number of these steps to
        profile), or (None, None). `parts`: the fields that have no argument here, such as the
        dataset and the task. Raises ValueError if a trainable parameter is missing from the
        optimizer, if a sharded model cannot be evaluated, or if BatchNorm cannot train on the
        images of a device. All ranks must call this function.
        """
        start_clock.end("model")
        check_is_complete(state.optimizer, state)
        if strategy.shards:
            step: Any = state.train_step
            size = parts["preprocessing"].input_size
            check_sharded_model(strategy.for_evaluation(step.model), size, strategy.group)
        else:
            image = (parts["preprocessing"].input_size[0], *parts["image_size"])
            check_batch_norm(state.model, image, config, parts["task"].views)
        steps_per_epoch, total_steps = config.train.count_steps(
            train_loader.sampler.batches_per_epoch
        )
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
        """Return the number of steps of the whole run, including those before a resume."""
        return self.progress.last_step(self.config.train, self.steps_per_epoch)

    @property
    def epochs_done(self) -> float:
        """Return the number of epochs trained so far, for example 2.5 in the middle of the third
        epoch.
        """
        return self.progress.epoch + self.progress.step_in_epoch / self.steps_per_epoch

    @cached_property
    def listing(self) -> str:
        """Return a hash of the names and labels of the training images."""
        return split_fingerprint(self.dataset.train)


def data_of_a_step(parts: RunParts) -> dict[str, Any]:
    """Return all settings that determine which images each training step reads, as a dictionary.

    The number of devices is not among them.
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
    """Return the config of a run as a dictionary from dotted key to value, with secrets masked."""
    return dict(hide_in({key: value for key, value, _ in leaves(parts.config)}))


def parameter_names(optimizer: Optimizer, model: HasParameters) -> list[str]:
    """Return the names of an optimizer's parameters, in the order of their numbers in its state
    dict.
    """
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    return [
        name_of[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]
    ]


def count_parameters(model: nn.Module) -> int:
    """Return the number of elements in all parameters of a model."""
    return sum(parameter.numel() for parameter in model.parameters())

"""Base class of tasks. A task defines what is learned: networks, losses, metrics, predictions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor, nn

from timm_parallel.app import current
from timm_parallel.batch import Batch
from timm_parallel.keys import ResolvedConfig
from timm_parallel.machine.imports import import_class
from timm_parallel.machine.ranks import Ranks
from timm_parallel.metric import Metric
from timm_parallel.parallel.group import ProcessGroup

C = TypeVar("C", bound=ResolvedConfig)
T = TypeVar("T", bound="Task[Any]")


@dataclass
class Evaluation:
    """Result of evaluating a model on a whole split of the data, combined over all ranks."""

    samples: int
    # Metric name -> value.
    numbers: dict[str, float | None]
    # Function `sums` of a metric -> total over all batches and ranks, on the CPU.
    sums: dict[Any, Tensor]
    # Indices [N] of all readable samples, in the order of the dataset, and what `Task.rows` returns
    # for them, each [N, …]. None unless the evaluation was asked to keep them (keep_rows).
    rows: tuple[Tensor, ...] | None = None
    # What the function `keep` of `evaluate` returned for these samples, in the same order.
    kept: tuple[Tensor, ...] | None = None


class Targets:
    """Builds the targets of a batch from the targets of single samples."""

    # Names of the fields that are normalized like images. Other fields travel as they are.
    images: ClassVar[tuple[str, ...]] = ("image",)

    def collate(self, targets: Sequence[Any]) -> Any:
        """Build the targets of a batch from those of its samples: numbers, and lists or tensors of
        them of equal shape, become a tensor [B, …], other values a list, and dictionaries a
        dictionary of fields.
        """
        first = targets[0]
        if isinstance(first, dict):
            return {name: Targets.collate(self, [of[name] for of in targets]) for name in first}
        if isinstance(first, Tensor):
            is_equal = all(target.shape == first.shape for target in targets)
            return torch.stack(list(targets)) if is_equal else list(targets)
        try:
            return torch.tensor(targets)
        # Texts, and lists of unequal length.
        except (TypeError, ValueError):
            return list(targets)

    def check_targets(self, targets: Any) -> None:
        """Raise ValueError if the task cannot learn from the targets of a batch, for example
        because a class number is too large. On a GPU, such targets would abort the process without
        a reason.
        """


@dataclass
class NoOptions:
    """Options (train.task_kwargs) of a task that has no options."""


class Task(Targets, Generic[C]):
    """A task: networks, losses, metrics and predictions. A project extends this class, one file per
    task.

    Attributes of an object are plain values, because a checkpoint stores none of them. Tensors and
    modules that change belong into a network.
    """

    # Type of target that the task needs from the dataset: `label`, `labels`, `numbers`, `mask`, or
    # a name that the project invents. The class of a dataset lists its types in `targets`. `none`
    # accepts any dataset and ignores its targets.
    target: ClassVar[str] = "label"
    # Phases of a training step, in order: name -> names of the networks that it trains. Each has an
    # optimizer, whose keys are those of `optim` and of `optim.of.<phase>`.
    phases: Mapping[str, tuple[str, ...]] = {"train": ("model",)}
    # Moving averages: name -> network and decay. They are networks too, without gradients and in
    # evaluation mode, and move once per optimizer step.
    averages: Mapping[str, tuple[str, float]] = {}
    metrics: Mapping[str, Metric] = {}
    # Metric by which the best checkpoint is chosen, if checkpoint.metric is auto.
    headline: ClassVar[str] = "loss"
    # Dataclass of the task's options: the keys of train.task_kwargs, each with a default.
    Options: ClassVar[type[Any]] = NoOptions

    def __init__(self, config: C, names: Sequence[str]) -> None:
        """`names`: the meaning of each model output, from the dataset. They are class names, or
        names of columns with numbers.
        """
        self.config, self.names = config, list(names)
        self.options: Any = self.Options(**config.train.task_kwargs)
        # Collectives of the ranks, for a loss over all samples of a step (`ranks.gather_rows`). A
        # run replaces those of one process by its own.
        self.ranks = ProcessGroup(Ranks())

    # What is learned.

    @property
    def num_outputs(self) -> int:
        """Number of outputs that the model must have."""
        return len(self.names)

    def prepare(self, labels: Tensor | None) -> None:
        """Called once before `networks`. `labels`: the targets of all training samples; None if the
        dataset does not list them.
        """

    def networks(self, model: nn.Module) -> dict[str, nn.Module]:
        """Return the networks by name. `model` is the one that is exported and evaluated by
        default. A network named `loss` gets outputs instead of images, and computes in float32.
        """
        return {"model": model}

    def weight(self, batch: Batch) -> Tensor | int:
        """Return what the mean over an optimizer step divides by, over all ranks and accumulated
        batches: the number of samples, or of boxes, pixels or tokens. The losses of a batch are
        sums over these. By default, all ranks know the number without communication.
        """
        return len(batch)

    def losses(self, networks: Any, batch: Batch, phase: str) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute the losses of the samples of a batch [B], and numbers for the log by name, each
        [B] and detached.

        A loss or a number may also be a scalar, which is taken as the mean over the batch. Random
        numbers come from the batch (`batch.normal`), so that they are equal on any number of ranks.
        Under DataParallel, outputs may be on another device than the batch.
        """
        raise NotImplementedError

    def after_step(self, networks: Any, ranks: ProcessGroup) -> None:
        """Update buffers of networks, such as a center or a queue, after an optimizer step. All
        ranks call this method, without gradients; `ranks.sum(tensor)` adds over them.
        """

    # Evaluation.

    def predict(self, networks: Any, batch: Batch) -> Any:
        """Compute the outputs for a batch: any tree of tensors [B, …]. Outputs of the model beyond
        `num_outputs` are dropped.
        """
        return networks.model(batch.image).float()[:, : self.num_outputs]

    def check_outputs(self, outputs: Any, batch: Batch) -> None:
        """Raise ValueError if what `predict` returns for a first batch does not fit the task."""

    def rows(self, outputs: Any, batch: Batch) -> tuple[Tensor, ...]:
        """Return what `Evaluation.rows` stores of each sample: tensors [B, …] whose other sides are
        equal in all batches.
        """
        return outputs, batch.target

    # Presentation, which is optional.

    def details(self, evaluation: Evaluation) -> dict[str, Any]:
        """Return further results of an evaluation for result.json, such as the number of samples or
        the accuracy of each class. Metrics are not included.
        """
        return {"samples": evaluation.samples}

    def draw(self, evaluation: Evaluation) -> dict[str, Any]:
        """Draw images of an evaluation for the trackers. Return a dictionary from name to a uint8
        array [H, W, 3]. The base class draws none.
        """
        return {}

    def pictures(self, networks: Any) -> dict[str, Any]:
        """Make pictures for the trackers at every evaluation on val, such as samples of a
        generator. Return a dictionary from name to a uint8 array [H, W, 3], a PIL image or a
        matplotlib figure. The base class makes none.
        """
        return {}


def find_task(name: str, base: type[T]) -> type[T]:
    """Import the task class that a value of `train.task` names. Raises ValueError if the class does
    not extend `base`, which is Task or a class of the project.
    """
    return import_class("train.task", name, base, current().tasks)

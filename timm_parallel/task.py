"""Base class of tasks. A task defines the targets, model outputs, loss, metrics and predictions of
a training.

Modules of tasks import torch inside functions only, because train.py reads the names of losses and
metrics before torch is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from timm_parallel.app import current
from timm_parallel.errors import refuse_wrong_arguments
from timm_parallel.keys import ResolvedConfig
from timm_parallel.machine.imports import import_class, import_name
from timm_parallel.metric import Metric

if TYPE_CHECKING:
    import pandas as pd
    from torch import Tensor, nn

C = TypeVar("C", bound=ResolvedConfig)
Criterion = Callable[["Tensor", "Tensor"], "Tensor"]
# Training options that only some tasks support. A config that uses an option with another task is
# rejected.
OPTIONS = ("mixup", "erasing", "auto_augment", "smoothing", "class_weights", "balance")


@dataclass(frozen=True)
class Loss:
    """One value of `train.loss`: the training loss, and the loss of each sample in evaluation."""

    # Function that builds the training loss. Arguments: config, and train.loss_kwargs as keywords.
    # The result maps outputs [B, …] and targets [B, …] to the mean loss of the batch. A result that
    # is a module may have parameters of its own.
    build: Callable[..., Criterion]
    # Function that maps scores [B, …] and targets [B, …] to the loss of each sample [B], for
    # evaluation.
    of_samples: Callable[[Tensor, Tensor], Tensor]
    # Training options (entries of OPTIONS) that this loss supports.
    reads: tuple[str, ...] = ()


@dataclass
class Evaluation:
    """Result of evaluating a model on a whole split of the data, combined over all ranks."""

    samples: int
    # Metric name -> value.
    numbers: dict[str, float | None]
    # Function `sums` of a metric -> total over all batches and ranks, on the CPU.
    sums: dict[Any, Tensor]
    # Indices [N], scores [N, …] and targets of all readable images, in the order of the dataset.
    # None unless the evaluation was asked to keep them (keep_rows).
    rows: tuple[Tensor, Tensor, Tensor] | None = None

    def with_averaged(self, averaged: Evaluation | None) -> dict[str, float | None]:
        """Return the metrics of this evaluation as a dictionary by name. Add those of the averaged
        (EMA) weights with the suffix `_ema`.

        `averaged`: the evaluation of the averaged weights; None if the run has none.
        """
        other = {} if averaged is None else averaged.numbers
        return self.numbers | {f"{name}_ema": value for name, value in other.items()}

    def table(self, split: Any, task: Task[Any]) -> pd.DataFrame:
        """Build a table of predictions with one row per image. The columns are the path of the
        image (or its index) and the columns of the task. The evaluation must have been run with
        keep_rows.

        `split`: the evaluated split of the dataset.
        """
        import pandas as pd

        assert self.rows is not None
        files = getattr(split, "files", None)
        paths = [str(files[index][0]) if files else index for index in self.rows[0].tolist()]
        # With another type, pandas would use pyarrow, if it is installed, and fail for a name that
        # is not UTF-8.
        return pd.DataFrame({"path": paths, **task.table(self)}, dtype=object)


class Targets:
    """Builds the targets of a batch from the targets of single samples. This class stacks numbers,
    or tensors of equal shape.
    """

    def collate(self, targets: Sequence[Any]) -> Tensor:
        """Build the targets of a batch [B, …] from the targets of single samples."""
        import torch

        if isinstance(targets[0], torch.Tensor):
            return torch.stack(list(targets))
        return torch.tensor(targets)

    def check_targets(self, targets: Tensor) -> None:
        """Raise ValueError if the task cannot learn from the targets [B, …], for example because a
        class number is too large. On a GPU, such targets would abort the process without a reason.
        """


@dataclass
class NoOptions:
    """Options (train.task_kwargs) of a task that has no options."""


class Task(Targets, Generic[C]):
    """A task: the targets, outputs, loss, metrics and predictions of a training. A project extends
    this class, one file per task.
    """

    # Type of target that the task needs from the dataset: `label`, `labels`, `numbers`, `mask`, or
    # a name that the project invents. The class of a dataset lists its types in `targets`. `none`
    # accepts any dataset and ignores its targets.
    target: ClassVar[str] = "label"
    # Word for the model outputs in the console lines of a run, e.g. `classes`.
    names_are: ClassVar[str] = "classes"
    # Name in train.loss -> loss. If train.loss is a class of the project, the first of these losses
    # computes the evaluation loss.
    losses: ClassVar[Mapping[str, Loss]]
    metrics: Mapping[str, Metric]
    # Training options (entries of OPTIONS) that this task supports.
    applies: ClassVar[tuple[str, ...]] = ()
    # Name of the task in transformers (problem_type), which export.py format=hub writes into its
    # files. None if transformers needs none.
    problem_type: ClassVar[str | None] = None
    # Endings that `write` appends to its `name`, one per file, for example `.png`. predict.py
    # refuses to overwrite these files.
    endings: ClassVar[tuple[str, ...]] = ()
    # Number of images per sample in a training step, for example 2 for two augmented views.
    views: ClassVar[int] = 1
    # Dataclass of the task's options: the keys of train.task_kwargs, each with a default.
    Options: ClassVar[type[Any]] = NoOptions

    def __init__(self, config: C, names: Sequence[str]) -> None:
        """`names`: the meaning of each model output, from the dataset. They are class names, or
        names of columns with numbers.
        """
        self.config, self.names = config, list(names)
        self.options: Any = self.Options(**config.train.task_kwargs)
        self.loss = self.find_loss(config.train.loss)

    @staticmethod
    def find(name: str) -> type[Task[Any]]:
        """Import the task class that a value of `train.task` names. Raises ValueError if the class
        does not extend Task.
        """
        return import_class("train.task", name, Task, current().tasks)

    @classmethod
    def find_loss(cls, name: str) -> Loss:
        """Return the loss with this name. A dotted name is imported as a loss class of the
        project.
        """
        return cls.losses[name] if name in cls.losses else cls.own_loss(import_name(name))

    @classmethod
    def own_loss(cls, loss_class: Any) -> Loss:
        """Build a Loss from a loss class of the project. The first loss of the task computes the
        evaluation loss.
        """
        return Loss(
            lambda config, **given: loss_class(**given),
            next(iter(cls.losses.values())).of_samples,
            getattr(loss_class, "reads", ()),
        )

    @classmethod
    def options_of_loss(cls, name: str) -> tuple[str, ...]:
        """Return the training options (entries of OPTIONS) that a loss supports. The loss is given
        by its name or by the dotted name of a class of the project.
        """
        if name in cls.losses:
            return cls.losses[name].reads
        return tuple(getattr(import_name(name), "reads", ()))

    # Methods for the data of the task.

    def train_transform(self, size: tuple[int, int], resize: bool, mean: tuple[float, ...]) -> Any:
        """Build the augmentation of training samples, a function (uint8 image, target) -> (image,
        target). Return None if samples are not augmented.

        `size`: height and width in pixels. `resize`: True if images may have another size. `mean`:
        mean of each image channel, from 0 to 1. The function must draw random numbers from the
        global generators of torch, random and numpy, which are seeded for each sample.
        """
        raise NotImplementedError

    def preprocessing(self, given: Any) -> Any:
        """Return the preprocessing of evaluation images, which checkpoints and exports store.
        `given`: the preprocessing that the config, the dataset and the model define. A task may
        return a changed copy.
        """
        return given

    def evaluation_transform(self, preprocessing: Any) -> Any:
        """Build the preprocessing of evaluation samples, a function (uint8 image, target) ->
        (image, target).
        """
        raise NotImplementedError

    def batch_augmentation(self, rows: Any, size: tuple[int, int]) -> Any:
        """Build an augmentation of whole batches, which replaces `train_transform`. Return None if
        there is none.

        `rows`: the training split, if it is in memory. `size`: height and width in pixels.
        """
        return None

    # Methods for the model and the training step.

    @property
    def num_outputs(self) -> int:
        """Number of outputs that the model must have."""
        return len(self.names)

    def check_outputs(self, outputs: Any) -> None:
        """Raise ValueError if the outputs of the model for images [B, C, H, W] do not fit the task.
        Called before `build_criterion`.
        """
        shape = tuple(getattr(outputs, "shape", ()))
        if len(shape) != 2 or shape[1] < self.num_outputs:
            raise ValueError(
                f"model.name: expected {self.num_outputs} or more outputs per image, shape "
                f"[1, {self.num_outputs}], got {list(shape) or type(outputs).__name__}"
            )

    def build_criterion(self, targets: Tensor | None) -> Criterion:
        """Build the training loss from the config.

        `targets`: targets of all training samples; None if the dataset does not list them.
        """
        train, weights = self.config.train, self.class_weights(targets)
        given = {**dict.fromkeys(weights, "of train.class_weights"), **train.loss_kwargs}
        with refuse_wrong_arguments("train.loss_kwargs", given, train.loss):
            return self.loss.build(self.config, **weights, **train.loss_kwargs)

    def class_weights(self, targets: Tensor | None) -> dict[str, Tensor]:
        """Compute the keyword arguments that pass train.class_weights to the loss. The base class
        returns none.

        `targets`: targets of all training samples; None if the dataset does not list them.
        """
        return {}

    def step(
        self, model: nn.Module, criterion: Criterion, images: Tensor, targets: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute the mean loss of a training batch, and metrics for the log as a dictionary from
        name to a detached scalar tensor. Each metric is a mean over the samples.

        Under DataParallel, the outputs of the model may be on another device than the targets.
        """
        outputs = model(images)
        targets = targets.to(outputs.device, non_blocking=True)
        loss = criterion(outputs, targets)
        return loss, self.train_metrics(outputs.detach()[:, : self.num_outputs], targets)

    def train_metrics(self, scores: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Compute metrics of a training batch for the log. Return a dictionary from name to a
        scalar tensor. The base class has none.
        """
        return {}

    # Methods for evaluation.

    def blank(self, count: int, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Build scores and targets of zeros for `count` samples whose images have height and width
        `size`. They are needed by a rank without samples, and to estimate memory without data.
        """
        raise NotImplementedError

    def predict(self, model: nn.Module, images: Tensor) -> Tensor:
        """Compute the scores [B, …] of images [B, C, H, W]. Outputs of the model beyond
        `num_outputs` are dropped.
        """
        scores: Tensor = model(images)
        return scores.float()[:, : self.num_outputs]

    @property
    def evaluates_one_by_one(self) -> bool:
        """True if evaluation images keep their own sizes, so that they cannot form a batch."""
        return False

    def rows(self, scores: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scores and targets of a batch [B, …] in the form in which `Evaluation.rows`
        stores them. The shape after the first dimension must be equal in all batches.
        """
        return scores, targets

    @property
    def checked_metrics(self) -> dict[str, Metric]:
        """Metrics that evaluate.py computes, by name. They may be more than those of a training
        run.
        """
        return dict(self.metrics)

    def check_metric(self, name: str) -> None:
        """Raise ValueError if the metric with this name, a value of checkpoint.metric, requires
        more outputs than the model has.
        """
        if self.num_outputs < self.metrics[name].min_outputs:
            others = ", ".join(
                f"val/{other}"
                for other, metric in self.metrics.items()
                if metric.min_outputs <= self.num_outputs
            )
            raise ValueError(
                f"checkpoint.metric=val/{name}: not defined for a model with {self.num_outputs} "
                f"outputs; use one of {others}"
            )

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

    # Methods for predictions.

    def table(self, evaluation: Evaluation) -> dict[str, list[Any]]:
        """Build the columns of the prediction table that evaluate.py writes, from
        `evaluation.rows`. Return a dictionary from column name to one value per image. Raises
        ValueError if the task has no table.
        """
        raise ValueError(
            f"predictions: train.task={self.config.train.task} has no table of predictions; remove "
            "this option"
        )

    def predictions(self, scores: Tensor, topk: int) -> list[dict[str, Any]]:
        """Convert the scores of images [B, …] to one prediction per image, a dictionary of plain
        values. `topk`: number of classes to include, for tasks with classes.
        """
        return [dict(zip(self.names, row, strict=True)) for row in scores.tolist()]

    @property
    def unreadable(self) -> dict[str, Any]:
        """Prediction, in JSON, for an image that cannot be read."""
        return dict.fromkeys(self.names)

    def columns(self, prediction: Mapping[str, Any]) -> dict[str, str]:
        """Convert a prediction to the columns of a CSV file. Return a dictionary from column name
        to text.
        """
        return {name: str(value) for name, value in prediction.items()}

    def text(self, prediction: Mapping[str, Any]) -> str:
        """Format a prediction as one line for the console."""
        return ", ".join(f"{name} {value:.4f}" for name, value in prediction.items())

    def write(self, scores: Tensor, image: Path, folder: Path, name: str) -> None:
        """Write the prediction of one image as files into `folder`. Raises ValueError if the task
        writes no files.

        `scores`: scores of the image. `image`: its path. `name`: name of the files without suffix,
        which may include subfolders.
        """
        raise ValueError(
            f"folder={folder}: train.task={self.config.train.task} writes no files per image; "
            "remove this option"
        )

"""Base class of tasks: targets, outputs, loss, metrics and predictions of what is learned.

Their modules import torch in functions only, because train.py reads the names of losses and metrics
before torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from timm_parallel.class_source import class_attributes
from timm_parallel.errors import refuse_wrong_arguments
from timm_parallel.keys import ResolvedConfig
from timm_parallel.machine.process import import_class, import_name
from timm_parallel.metric import Metric
from timm_parallel.project import current

if TYPE_CHECKING:
    import pandas as pd
    from torch import Tensor, nn

C = TypeVar("C", bound=ResolvedConfig)
Criterion = Callable[["Tensor", "Tensor"], "Tensor"]
# Options of a run that only some tasks allow. Each of them is refused for the other tasks.
OPTIONS = ("mixup", "erasing", "auto_augment", "smoothing", "class_weights", "balance")


@dataclass(frozen=True)
class Loss:
    """An option of `train.loss`: training loss, and loss of each sample in evaluation."""

    # (config, **train.loss_kwargs) -> criterion, which maps outputs [B, …] and targets [B, …] to
    # the mean loss of the samples. A module may own parameters.
    build: Callable[..., Criterion]
    # (scores [B, …], targets [B, …]) -> the loss of each sample: [B].
    of_samples: Callable[[Tensor, Tensor], Tensor]
    # Those of OPTIONS that the loss reads.
    reads: tuple[str, ...] = ()


@dataclass
class Evaluation:
    """Metrics of a model on a whole split of the data, over all ranks."""

    samples: int
    numbers: dict[str, float | None]  # values by metric name
    sums: dict[Any, Tensor]  # on the CPU, by the metric function that computed them
    # With keep_rows: indices [N], scores [N, …] and targets of all readable images, in the order of
    # the dataset.
    rows: tuple[Tensor, Tensor, Tensor] | None = None

    def with_averaged(self, averaged: Evaluation | None) -> dict[str, float | None]:
        """Return these metrics by name, and those of `averaged` (the EMA weights, if any) with the
        suffix `_ema`.
        """
        other = {} if averaged is None else averaged.numbers
        return self.numbers | {f"{name}_ema": value for name, value in other.items()}

    def table(self, split: Any, task: Task[Any]) -> pd.DataFrame:
        """Return a table with a row per image, after an evaluation with keep_rows: path (or index),
        and the columns of the task.
        """
        import pandas as pd

        assert self.rows is not None
        files = getattr(split, "files", None)
        paths = [str(files[index][0]) if files else index for index in self.rows[0].tolist()]
        return pd.DataFrame({"path": paths, **task.table(self)})


class Targets:
    """Forms batches of targets. This class stacks numbers or tensors of equal shapes."""

    def collate(self, targets: Sequence[Any]) -> Tensor:
        """Form the targets of a batch from those of its samples: [B, …]."""
        import torch

        if isinstance(targets[0], torch.Tensor):
            return torch.stack(list(targets))
        return torch.tensor(targets)

    def check_targets(self, targets: Tensor) -> None:
        """Raise ValueError for targets [B, …] that the task cannot learn. A GPU would abort without
        a reason.
        """


@dataclass
class NoOptions:
    """Options of a task that has none."""


class Task(Targets, Generic[C]):
    """A task of a project: what is learned. It extends this class in one file."""

    # Kind of target that the dataset gives: `label`, `labels`, `numbers`, `mask`, or a name of your
    # own. A dataset lists its kinds in `targets`. `none`: the targets of any dataset are ignored.
    target: ClassVar[str] = "label"
    # What the names of the outputs stand for, in words.
    names_are: ClassVar[str] = "classes"
    # By name. The first loss also evaluates a loss class of your own.
    losses: ClassVar[Mapping[str, Loss]]
    metrics: ClassVar[Mapping[str, Metric]]
    # Those of OPTIONS that make sense for this task.
    applies: ClassVar[tuple[str, ...]] = ()
    # transformers' name of the task, if it needs one, in the files of export.py format=hub.
    problem_type: ClassVar[str | None] = None
    # Images per sample that a step computes, for example two augmented views.
    views: ClassVar[int] = 1
    # A dataclass: the keys of train.task_kwargs, each with a default.
    Options: ClassVar[type[Any]] = NoOptions

    def __init__(self, config: C, names: Sequence[str]) -> None:
        """`names`: what the outputs mean, from the dataset: classes, or columns of numbers."""
        self.config, self.names = config, list(names)
        self.options: Any = self.Options(**config.train.task_kwargs)
        self.loss = self.find_loss(config.train.loss)

    @staticmethod
    def find(name: str) -> type[Task[Any]]:
        """Return the class of a value of `train.task`. Raises ValueError for another class."""
        return import_class("train.task", name, Task, current().tasks)

    @classmethod
    def find_loss(cls, name: str) -> Loss:
        """Return the loss of this name, or one for a class of the project."""
        return cls.losses[name] if name in cls.losses else cls.own_loss(import_name(name))

    @classmethod
    def own_loss(cls, loss_class: Any) -> Loss:
        """Return the loss for a class of the project."""
        of_samples = next(iter(cls.losses.values())).of_samples
        return Loss(
            lambda config, **given: loss_class(**given),
            of_samples,
            getattr(loss_class, "reads", ()),
        )

    @classmethod
    def options_of_loss(cls, name: str) -> tuple[str, ...]:
        """Return those of OPTIONS that a loss of the task, or your own class, reads."""
        if name in cls.losses:
            return cls.losses[name].reads
        return tuple(class_attributes(name).get("reads", ()))

    # Data.

    def train_transform(self, size: tuple[int, int], resize: bool, mean: tuple[float, ...]) -> Any:
        """Build the augmentation of a training sample: (uint8 image, target) -> (image, target).
        None: nothing to do.

        Its random numbers come from the generators of torch, random and numpy, which are seeded for
        each sample. `size`: height and width in pixels. `resize`: True if images may have another
        size. `mean`: of images in 0..1, per channel.
        """
        raise NotImplementedError

    def preprocessing(self, given: Any) -> Any:
        """Return the preprocessing of evaluation images, which checkpoints and exports keep: as
        given by the config, the dataset and the model, or changed.
        """
        return given

    def evaluation_transform(self, preprocessing: Any) -> Any:
        """Build the preparation of a sample for evaluation: (uint8 image, target) -> (image,
        target).
        """
        raise NotImplementedError

    def batch_augmentation(self, rows: Any, size: tuple[int, int]) -> Any:
        """Return a step on whole batches in place of `train_transform`, None if there is none.
        `rows`: the training split, if it is in memory.
        """
        return None

    # Model and step.

    @property
    def num_outputs(self) -> int:
        """Outputs that the model needs."""
        return len(self.names)

    def check_outputs(self, outputs: Any) -> None:
        """Raise ValueError for a model's outputs on images [B, C, H, W], if it does not fit the
        task. Called before `build_criterion`.
        """
        shape = tuple(getattr(outputs, "shape", ()))
        if len(shape) != 2 or shape[1] < self.num_outputs:
            raise ValueError(
                f"model.name: expected {self.num_outputs} or more outputs per image, [1, "
                f"{self.num_outputs}], got {list(shape) or type(outputs).__name__}"
            )

    def build_criterion(self, targets: Tensor | None) -> Criterion:
        """Build the training loss. `targets`: of all training samples, None if the dataset does not
        list them.
        """
        train, weights = self.config.train, self.class_weights(targets)
        given = {**dict.fromkeys(weights, "of train.class_weights"), **train.loss_kwargs}
        with refuse_wrong_arguments("train.loss_kwargs", given, train.loss):
            return self.loss.build(self.config, **weights, **train.loss_kwargs)

    def class_weights(self, targets: Tensor | None) -> dict[str, Tensor]:
        """Return the arguments of the loss that weight it, for a task that applies class_weights.

        `targets`: as for `build_criterion`.
        """
        return {}

    def step(
        self, model: nn.Module, criterion: Criterion, images: Tensor, targets: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute the mean loss of the samples, and metrics for the log: detached scalars, means
        over the samples.

        Under DataParallel the model's outputs may be on another device than the targets.
        """
        outputs = model(images)
        targets = targets.to(outputs.device, non_blocking=True)
        loss = criterion(outputs, targets)
        return loss, self.train_metrics(outputs.detach()[:, : self.num_outputs], targets)

    def train_metrics(self, scores: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Compute the metrics of a training batch, by name."""
        return {}

    # Evaluation.

    def blank(self, count: int, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Return scores and targets of `count` samples with images of `size`, all zeros: a rank
        without a sample, and a plan, need their shapes.
        """
        raise NotImplementedError

    def predict(self, model: nn.Module, images: Tensor) -> Tensor:
        """Compute the scores of images: [B, …]. Further outputs of the model are left out."""
        scores: Tensor = model(images)
        return scores.float()[:, : self.num_outputs]

    @property
    def evaluates_one_by_one(self) -> bool:
        """True if the images of an evaluation keep their sizes, and cannot form a batch."""
        return False

    def rows(self, scores: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return what `Evaluation.rows` keeps of the scores and targets of a batch: [B, …] each, of
        the same shape in all batches.
        """
        return scores, targets

    @property
    def checked_metrics(self) -> dict[str, Metric]:
        """Metrics of evaluate.py, which may be more than those of a run."""
        return dict(self.metrics)

    def check_metric(self, name: str) -> None:
        """Raise ValueError for a metric that has no value for so few outputs."""
        if self.num_outputs < self.metrics[name].min_outputs:
            others = ", ".join(
                f"val/{other}"
                for other, metric in self.metrics.items()
                if metric.min_outputs <= self.num_outputs
            )
            raise ValueError(
                f"checkpoint.metric=val/{name}: not defined for {self.num_outputs} outputs; use "
                f"one of {others}"
            )

    def details(self, evaluation: Evaluation) -> dict[str, Any]:
        """Return more entries of result.json."""
        return {"samples": evaluation.samples}

    def draw(self, evaluation: Evaluation) -> dict[str, Any]:
        """Draw pictures of an evaluation for the trackers: uint8 arrays [H, W, 3] by name."""
        return {}

    # Predictions.

    def table(self, evaluation: Evaluation) -> dict[str, list[Any]]:
        """Return the columns of evaluate.py's predictions, besides the path, from
        `evaluation.rows`.
        """
        raise ValueError(
            f"predictions: train.task={self.config.train.task} writes no table; leave it out"
        )

    def predictions(self, scores: Tensor, topk: int) -> list[dict[str, Any]]:
        """Return the prediction of each image from its scores [B, …], as plain values by name."""
        return [dict(zip(self.names, row, strict=True)) for row in scores.tolist()]

    @property
    def unreadable(self) -> dict[str, Any]:
        """The prediction of an image that cannot be read, in JSON."""
        return dict.fromkeys(self.names)

    def columns(self, prediction: Mapping[str, Any]) -> dict[str, str]:
        """Return the columns of a prediction in a CSV file."""
        return {name: str(value) for name, value in prediction.items()}

    def text(self, prediction: Mapping[str, Any]) -> str:
        """Describe a prediction in a line on the console."""
        return ", ".join(f"{name} {value:.4f}" for name, value in prediction.items())

    def write(self, scores: Tensor, image: Path, folder: Path, name: str) -> None:
        """Write the prediction of an image as files in `folder`, from its scores. `name`: of these
        files without a suffix, with the folders of the image below the folder of all images.
        """
        raise ValueError(f"folder={folder}: train.task={self.config.train.task} writes no files")

"""Base classes of tasks: with the transforms of timm, and with a loss that train.loss names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from src.data.transforms import (
    OnImage,
    Preprocessing,
    batch_step,
    evaluation_transform,
    train_transform,
)
from src.schema import ResolvedConfig
from timm_parallel import (
    Batch,
    Evaluation,
    InMemory,
    Metric,
    Task,
    import_name,
    refuse_wrong_arguments,
    to_double,
)

# A training loss: maps outputs [B, …] and targets [B, …] to the loss of each sample [B], or to
# their mean.
Criterion = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Loss:
    """One value of `train.loss`: the training loss, and the loss of each sample in evaluation."""

    # Function that builds the training loss. Arguments: config, and train.loss_kwargs as keywords.
    build: Callable[..., Criterion]
    # Function that maps scores [B, …] and targets [B, …] to the loss of each sample [B], for
    # evaluation.
    of_samples: Callable[[Tensor, Tensor], Tensor]
    # Training options (entries of `ImageTask.applies`) that this loss reads.
    reads: tuple[str, ...] = ()


class ImageTask(Task[ResolvedConfig]):
    """Base class of tasks. It adds to Task what the code of src/ asks a task for: transforms of
    images, as in timm, and tables and files of predictions.
    """

    # Training options that this task supports, of mixup, erasing, auto_augment, smoothing,
    # class_weights and balance. A config that uses another one is rejected.
    applies: ClassVar[tuple[str, ...]] = ()
    # Endings that `write` appends to its `name`, one per file, for example `.png`. predict.py
    # refuses to overwrite these files.
    endings: ClassVar[tuple[str, ...]] = ()
    # Name of the task in transformers (problem_type), which export.py format=hub writes into its
    # files. None if transformers needs none.
    problem_type: ClassVar[str | None] = None

    def train_transform(self, size: tuple[int, int], resize: bool, mean: tuple[float, ...]) -> Any:
        """Build the augmentation of training samples, a function (uint8 image, target) -> (image,
        target). Return None if samples are not augmented. Here it leaves targets as they are.

        `size`: height and width in pixels. `resize`: True if images may have another size. `mean`:
        mean of each image channel, from 0 to 1. The function must draw random numbers from the
        global generators of torch, random and numpy, which are seeded for each sample. If it has a
        method `start_epoch(epoch)`, this is called before the samples of an epoch.
        """
        data = self.config.data
        return OnImage.of(train_transform(data.augment, size, resize, mean, data.crop_mode))

    def preprocessing(self, given: Preprocessing) -> Preprocessing:
        """Return the preprocessing of evaluation images, which checkpoints and exports store.
        `given`: the preprocessing that the config, the dataset and the model define. A task may
        return a changed copy.
        """
        return given

    def evaluation_transform(self, preprocessing: Preprocessing) -> Any:
        """Build the preprocessing of evaluation samples, a function (uint8 image, target) ->
        (image, target). Return None if images keep their own sizes; they are then evaluated one by
        one.
        """
        return OnImage(evaluation_transform(preprocessing))

    def batch_augmentation(self, rows: InMemory | None, size: tuple[int, int]) -> Any:
        """Build an augmentation of whole batches, which replaces `train_transform`. Return None if
        there is none. `rows`: the training split, if it is in memory.
        """
        # A task with its own transform of single images must not lose it.
        if type(self).train_transform is not ImageTask.train_transform:
            return None
        return batch_step(self.config.data.augment, rows, size)

    def table(self, evaluation: Evaluation) -> dict[str, list[Any]]:
        """Build the columns of the prediction table that evaluate.py writes, from
        `evaluation.rows`. Return a dictionary from column name to one value per image. Raises
        ValueError if the task has no table.
        """
        raise ValueError(
            f"predictions: train.task={self.config.train.task} has no table of predictions; remove "
            "this option"
        )

    def losses_and_pictures(self, outputs: Any, batch: Batch) -> tuple[Tensor, ...]:
        """Return the loss of each sample [B], and tensors [B, …] that `picture` needs to show the
        outputs. Raises ValueError if the task has no loss of a sample.
        """
        raise ValueError(
            f"worst: train.task={self.config.train.task} has no loss of a single image; remove "
            "this option"
        )

    def picture(self, image: Image.Image, target: Any, outputs: tuple[Tensor, ...]) -> Image.Image:
        """Draw a sample with its target and the outputs of the model. By default, return the image
        itself. `outputs`: the tensors of `losses_and_pictures` for this sample, without the loss.
        """
        return image

    def predictions(self, outputs: Any, topk: int) -> dict[str, list[Any]]:
        """Build the columns of the table that predict.py writes, from the outputs of a batch.
        Return a dictionary from column name to one plain value per image. `topk`: number of classes
        to include, for tasks with classes. By default, there is a column per name of the dataset,
        or else one per tensor of the outputs.
        """
        leaves = tree_leaves(outputs)
        if len(leaves) == 1 and leaves[0].shape[1:] == (len(self.names),):
            return dict(zip(self.names, leaves[0].T.tolist(), strict=True))
        names = [f"output_{number}" for number in range(1, len(leaves) + 1)]
        return dict(zip(names, (leaf.tolist() for leaf in leaves), strict=True))

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


class LossTask(ImageTask):
    """Base class of tasks with a model, a loss that train.loss names, and one target."""

    # Name in train.loss -> loss. If train.loss is a class of the project, the first of these losses
    # computes the evaluation loss.
    known_losses: ClassVar[Mapping[str, Loss]]

    def __init__(self, config: ResolvedConfig, names: Sequence[str]) -> None:
        super().__init__(config, names)
        self.loss = self.find_loss(config.train.loss)
        # Keyword arguments that pass train.class_weights to the loss, as plain numbers.
        self.weights: dict[str, list[float]] = {}
        # The training loss, if it is no module. A module is the network `loss`.
        self.criterion: Criterion | None = None

    @classmethod
    def find_loss(cls, name: str) -> Loss:
        """Return the loss with this name. A dotted name is imported as a loss class of the
        project.
        """
        return (
            cls.known_losses[name] if name in cls.known_losses else cls.own_loss(import_name(name))
        )

    @classmethod
    def own_loss(cls, loss_class: Any) -> Any:
        """Build a loss from a loss class of the project. Everything but the training loss, such as
        the evaluation loss, is that of the first loss of the task.
        """
        reads = getattr(loss_class, "reads", ())

        def build(config: ResolvedConfig, **given: Any) -> Any:
            if "smoothing" in reads:
                # Use no label smoothing with mixup or cutmix, because these already smooth the
                # targets.
                mixes = config.data.augment.mixes
                given.setdefault("smoothing", 0.0 if mixes else config.train.smoothing)
            return loss_class(**given)

        return replace(next(iter(cls.known_losses.values())), build=build, reads=reads)

    def prepare(self, labels: Tensor | None) -> None:
        self.weights = {name: of.tolist() for name, of in self.class_weights(labels).items()}

    def class_weights(self, labels: Tensor | None) -> dict[str, Tensor]:
        """Compute the keyword arguments that pass train.class_weights to the loss. The base class
        returns none.

        `labels`: targets of all training samples; None if the dataset does not list them.
        """
        return {}

    def networks(self, model: nn.Module) -> dict[str, nn.Module]:
        criterion = self.build_criterion()
        if isinstance(criterion, nn.Module):
            self.phases = {"train": ("model", "loss")}
            return {"model": model, "loss": criterion}
        self.criterion = criterion
        return {"model": model}

    def build_criterion(self) -> Criterion:
        """Build the training loss from the config."""
        train = self.config.train
        weights = {name: torch.tensor(values) for name, values in self.weights.items()}
        given = {**dict.fromkeys(weights, "of train.class_weights"), **train.loss_kwargs}
        with refuse_wrong_arguments("train.loss_kwargs", given, train.loss):
            return self.loss.build(self.config, **weights, **train.loss_kwargs)

    def losses(self, networks: Any, batch: Batch, phase: str) -> tuple[Tensor, dict[str, Tensor]]:
        outputs = networks.model(batch.image)
        # Under DataParallel, the outputs may be on another device than the batch.
        targets = batch.target.to(outputs.device, non_blocking=True)
        criterion = self.criterion or networks.loss
        numbers = self.train_numbers(outputs.detach()[:, : self.num_outputs], targets)
        return criterion(outputs, targets), numbers

    def train_numbers(self, scores: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Compute numbers of a training batch for the log, each [B] or a mean. The base class has
        none.
        """
        return {}

    def losses_and_pictures(self, outputs: Any, batch: Batch) -> tuple[Tensor, ...]:
        return (self.loss.of_samples(outputs, batch.target),)

    def check_outputs(self, outputs: Any, batch: Batch) -> None:
        shape = tuple(getattr(outputs, "shape", ()))
        if len(shape) != 2 or shape[1] < self.num_outputs:
            raise ValueError(
                f"model.name: expected {self.num_outputs} or more outputs per image, shape "
                f"[1, {self.num_outputs}], got {list(shape) or type(outputs).__name__}"
            )


def total_loss(task: LossTask, scores: Tensor, batch: Batch) -> Tensor:
    """Return the sum of the losses of all images."""
    return to_double(task.loss.of_samples(scores, batch.target)).sum()


def per_image(total: Tensor, samples: int) -> float:
    """Divide a sum over images by the number of images."""
    return float(total.item()) / samples


LOSS = Metric(total_loss, per_image, lower_is_better=True)

"""Base classes of tasks: with the transforms of timm, and with a loss that train.loss names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

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
    # Training options (entries of timm_parallel.OPTIONS) that this loss reads.
    reads: tuple[str, ...] = ()


class ImageTask(Task[ResolvedConfig]):
    """Base class of tasks that augment and prepare images as timm does. Transforms leave the
    targets as they are.
    """

    def train_transform(self, size: tuple[int, int], resize: bool, mean: tuple[float, ...]) -> Any:
        data = self.config.data
        return OnImage.of(train_transform(data.augment, size, resize, mean, data.crop_mode))

    def evaluation_transform(self, preprocessing: Preprocessing) -> Any:
        return OnImage(evaluation_transform(preprocessing))

    def batch_augmentation(self, rows: InMemory | None, size: tuple[int, int]) -> Any:
        # A task with its own transform of single images must not lose it.
        if type(self).train_transform is not ImageTask.train_transform:
            return None
        return batch_step(self.config.data.augment, rows, size)


class LossTask(ImageTask):
    """Base class of tasks with a model, a loss that train.loss names, and one target."""

    # Name in train.loss -> loss. If train.loss is a class of the project, the first of these losses
    # computes the evaluation loss.
    known_losses: ClassVar[Mapping[str, Loss]]
    # Name of the task in transformers (problem_type), which export.py format=hub writes into its
    # files. None if transformers needs none.
    problem_type: ClassVar[str | None] = None

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

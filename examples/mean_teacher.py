"""Mean teacher (Tarvainen and Valpola 2017, arXiv:1703.01780): few images have a label. On all
images, a student agrees with a teacher, its moving average, about another view of the image.

    cp examples/mean_teacher.py src/tasks/ && cp examples/mean_teacher.yaml conf/experiment/
    python train.py experiment=mean_teacher

The dataset hides all but 50 labels of the digits. The teacher reaches a val/acc of 0.81 in 35
seconds of CPU time. So short a training gains nothing from the other images: with
train.task_kwargs.agreement=0, it is 0.82.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torchvision.transforms import v2

from src.data.datasets import Digits
from src.schema import DataConfig
from src.tasks.images import ImageTask
from timm_parallel import Batch, InMemory, Metric, key


class FewLabels(Digits):
    """Digits with the field `is_labeled`: 1 for some training images, and 0 for the others. An
    epoch has the labeled images several times, so that each batch has some of them.
    """

    def __init__(self, config: DataConfig, labeled: int = 50, repeats: int = 10) -> None:
        super().__init__(config)
        self.train = self._with_labels(self.train, labeled, repeats)
        self.val = self._with_labels(self.val)
        self.test = self._with_labels(self.test)

    def _with_labels(self, split: Any, labeled: int | None = None, repeats: int = 0) -> InMemory:
        count = len(split) if labeled is None else labeled
        order = torch.cat([torch.arange(count).repeat(repeats), torch.arange(len(split))])
        fields = {"target": split.labels[order], "is_labeled": (order < count).float()}
        return InMemory(split.images[order], fields)


class TwoViews:
    """Returns a view of an image, and the field `other`, another view."""

    def __init__(self, augment: Callable[[Tensor], Tensor]) -> None:
        self.augment = augment

    def __call__(self, image: Tensor, fields: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        return self.augment(image), {**fields, "other": self.augment(image)}


def correct(task: Any, scores: Tensor, batch: Batch) -> Tensor:
    return (scores.argmax(1) == batch.target).sum()


@dataclass
class MeanTeacherOptions:
    """Keys of train.task_kwargs."""

    agreement: float = key(1.0, ge=0, help="Weight of the agreement with the teacher.")


class MeanTeacher(ImageTask):
    """Classification with few labels. The teacher makes the predictions."""

    averages = {"teacher": ("model", 0.98)}
    metrics = {
        "acc": Metric(correct, lambda total, samples: float(total) / samples, is_proportion=True)
    }
    headline = "acc"
    images = ("image", "other")
    Options: ClassVar[type[Any]] = MeanTeacherOptions

    def train_transform(self, size: tuple[int, int], resize: bool, mean: tuple[float, ...]) -> Any:
        return TwoViews(v2.RandomResizedCrop(size, (0.7, 1.0), (0.9, 1.1)))

    def losses(self, networks: Any, batch: Batch, phase: str) -> tuple[Tensor, dict[str, Tensor]]:
        scores = networks.model(batch.image)
        with torch.no_grad():
            taught = networks.teacher(batch.other).softmax(1)
        of_labels = batch.is_labeled * cross_entropy(scores, batch.target, reduction="none")
        # At first, the teacher knows little, so the agreement starts in the middle of training.
        growth = max(0.0, 2 * batch.share - 1)
        disagreement = (scores.softmax(1) - taught).square().sum(1)
        losses = of_labels + self.options.agreement * growth * disagreement
        return losses, {"disagreement": disagreement.detach()}

    def predict(self, networks: Any, batch: Batch) -> Tensor:
        scores: Tensor = networks.teacher(batch.image)
        return scores.float()

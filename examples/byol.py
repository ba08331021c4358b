"""BYOL (Grill et al. 2020, arXiv:2006.07733): a student predicts what a teacher, its moving
average, sees in another view of the image. The log has the distance of the views.

    cp examples/byol.py src/tasks/ && cp examples/byol.yaml conf/experiment/
    python train.py experiment=byol

The backbone is `model`, so export.py and model.weights take it without the other networks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity
from torchvision.transforms import v2

from src.tasks.images import ImageTask
from timm_parallel import Batch, Metric, to_double


class TwoViews:
    """Returns two augmented views of an image, [2, C, H, W]."""

    def __init__(self, augment: Callable[[Tensor], Tensor]) -> None:
        self.augment = augment

    def __call__(self, image: Tensor, target: Any) -> tuple[Tensor, Any]:
        return torch.stack([self.augment(image), self.augment(image)]), target


def perceptron(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(inputs, 128), nn.LayerNorm(128), nn.ReLU(), nn.Linear(128, outputs)
    )


def distance(task: Any, distances: Tensor, batch: Batch) -> Tensor:
    return to_double(distances).sum()


class Byol(ImageTask):
    """Images of any labels; the model has as many outputs as the data has classes."""

    target = "none"
    phases = {"train": ("student", "predictor")}
    averages = {"teacher": ("student", 0.99)}
    metrics = {
        "distance": Metric(
            distance, lambda total, samples: float(total) / samples, lower_is_better=True
        )
    }
    headline = "distance"

    def networks(self, model: nn.Module) -> dict[str, nn.Module]:
        student = nn.Sequential(model, perceptron(self.num_outputs, 32))
        return {"model": model, "student": student, "predictor": perceptron(32, 32)}

    def train_transform(self, size: tuple[int, int], resize: bool, mean: tuple[float, ...]) -> Any:
        return TwoViews(
            v2.Compose([v2.RandomResizedCrop(size, (0.4, 1.0)), v2.RandomAffine(15, (0.1, 0.1))])
        )

    def evaluation_transform(self, preprocessing: Any) -> Any:
        return self.train_transform(preprocessing.input_size[1:], True, preprocessing.mean)

    def losses(self, networks: Any, batch: Batch, phase: str) -> tuple[Tensor, dict[str, Tensor]]:
        views = batch.image.flatten(0, 1)
        ours = networks.predictor(networks.student(views)).unflatten(0, (-1, 2))
        with torch.no_grad():
            theirs = networks.teacher(views).unflatten(0, (-1, 2)).flip(1)
        return (2 - 2 * cosine_similarity(ours, theirs, dim=-1)).mean(1), {}

    def predict(self, networks: Any, batch: Batch) -> Tensor:
        # predict.py gives one view of each image: return the features.
        if batch.image.dim() == 4:
            features: Tensor = networks.model(batch.image)
            return features
        return self.losses(networks, batch, "train")[0]

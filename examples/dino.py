"""DINO (Caron et al. 2021, arXiv:2104.14294): a student sees large and small crops of an image, and
predicts what a teacher, its moving average, sees in the large ones.

    cp examples/dino.py src/tasks/ && cp examples/dino.yaml conf/experiment/
    python train.py experiment=dino

The small crops have a size of their own, so they are a field of the batch. val/knn, the accuracy of
the nearest neighbors, rises from 0.41 after an epoch to 0.56, in 40 seconds of CPU time (one seed).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize
from torchvision.transforms import v2

from src.tasks.images import ImageTask
from timm_parallel import Batch, Metric

FEATURES, PROTOTYPES = 64, 64
# Number of crops of an image, and temperatures of student and teacher.
LARGE, SMALL = 2, 2
STUDENT_TEMPERATURE, TEACHER_TEMPERATURE = 0.1, 0.07


class Crops:
    """Returns LARGE crops of an image [LARGE, C, H, W], and the field `small`, SMALL crops of half
    that size.
    """

    def __init__(self, size: tuple[int, int]) -> None:
        self.large = v2.RandomResizedCrop(size, (0.5, 1.0))
        self.small = v2.RandomResizedCrop((size[0] // 2, size[1] // 2), (0.2, 0.5))

    def __call__(self, image: Tensor, target: Any) -> tuple[Tensor, dict[str, Any]]:
        small = torch.stack([self.small(image) for _ in range(SMALL)])
        large = torch.stack([self.large(image) for _ in range(LARGE)])
        return large, {"small": small, "target": target}


class Head(nn.Module):
    """Maps features to their cosine to each prototype."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(FEATURES, 128), nn.GELU(), nn.Linear(128, 32))
        self.prototypes = nn.Parameter(torch.randn(PROTOTYPES, 32))

    def forward(self, features: Tensor) -> Tensor:
        return normalize(self.layers(features), dim=1) @ normalize(self.prototypes, dim=1).T


class Center(nn.Module):
    """Subtracts the moving mean of the teacher's scores, so that no prototype takes all images."""

    mean: Tensor
    total: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(PROTOTYPES))
        # Sum and number of the scores of this rank since the last optimizer step.
        self.register_buffer("total", torch.zeros(PROTOTYPES))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, scores: Tensor) -> Tensor:
        self.total += scores.sum(0)
        self.count += len(scores)
        return scores - self.mean

    def update(self, ranks: Any) -> None:
        """Move the mean towards that of all scores of the step over all ranks."""
        self.mean.lerp_(ranks.sum(self.total) / ranks.sum(self.count), 0.1)
        self.total.zero_()
        self.count.zero_()


def knn_accuracy(features: Tensor, labels: Tensor) -> float:
    """Return the share of images whose five nearest neighbors in the split have their label."""
    rows = normalize(features, dim=1)
    nearest = (rows @ rows.T).fill_diagonal_(-2).topk(5).indices
    return float((labels[nearest].mode(1).values == labels).float().mean())


class Dino(ImageTask):
    """Learns features [B, FEATURES] without labels, which serve the metric only."""

    phases = {"train": ("model", "head")}
    averages = {"teacher": ("model", 0.9), "teacher_head": ("head", 0.9)}
    metrics = {"knn": Metric(from_rows=knn_accuracy, is_proportion=True)}
    headline = "knn"
    images = ("image", "small")
    num_outputs = FEATURES

    def networks(self, model: nn.Module) -> dict[str, nn.Module]:
        return {"model": model, "head": Head(), "center": Center()}

    def train_transform(self, size: tuple[int, int], resize: bool, mean: tuple[float, ...]) -> Any:
        return Crops(size)

    def losses(self, networks: Any, batch: Batch, phase: str) -> tuple[Tensor, dict[str, Tensor]]:
        large, small = batch.image.flatten(0, 1), batch.small.flatten(0, 1)
        with torch.no_grad():
            taught = networks.center(networks.teacher_head(networks.teacher(large)))
            targets = (taught / TEACHER_TEMPERATURE).softmax(1).unflatten(0, (-1, LARGE))
        features = [networks.model(large), networks.model(small)]
        of_large, of_small = networks.head(torch.cat(features)).split([len(large), len(small)])
        crops = [of_large.unflatten(0, (-1, LARGE)), of_small.unflatten(0, (-1, SMALL))]
        scores = (torch.cat(crops, 1) / STUDENT_TEMPERATURE).log_softmax(2)
        # Cross entropy of each large crop [B, LARGE] with all crops but itself.
        pairs = -(targets @ scores.transpose(1, 2))
        of_pairs = pairs.sum((1, 2)) - pairs.diagonal(dim1=1, dim2=2).sum(1)
        return of_pairs / (LARGE * (LARGE + SMALL - 1)), {}

    def after_step(self, networks: Any, ranks: Any) -> None:
        networks.center.update(ranks)

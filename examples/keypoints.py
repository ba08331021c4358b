"""Keypoints: points in an image, which move with it when it is cropped or flipped.

    cp examples/keypoints.py src/tasks/ && cp examples/keypoints.yaml conf/experiment/
    python train.py experiment=keypoints

The dataset draws a red and a blue dot on noise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torchvision import tv_tensors
from torchvision.transforms import v2

from src.data.transforms import evaluation_transform, train_transform
from src.schema import DataConfig
from src.tasks.images import ImageTask
from timm_parallel import Batch, Evaluation, ImageDataset, Metric, to_double

SIDE, MARGIN = 40, 8
# Largest distance of a point that counts as near, as a share of the image.
NEAR = 0.05


class _Dots:
    """Images uint8 [3, SIDE, SIDE] with column and row of each dot in pixels, [2, 2]."""

    def __init__(self, count: int, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.points = torch.randint(MARGIN, SIDE - MARGIN, (count, 2, 2), generator=draw)
        self.images = torch.randint(0, 60, (count, 3, SIDE, SIDE), generator=draw).byte()

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image, points = self.images[index].clone(), self.points[index]
        for channel, (x, y) in zip((0, 2), points.tolist(), strict=True):
            image[channel, y - 2 : y + 3, x - 2 : x + 3] = 255
        return image, points.float()


class Dots(ImageDataset):
    """Made-up images with two points."""

    targets = ("keypoints",)
    target_names = ["red", "blue"]

    def __init__(self, config: DataConfig, num_samples: int = 1024) -> None:
        self.train, self.val = _Dots(num_samples, 0), _Dots(256, 1)


class WithPoints:
    """Applies a transform of torchvision to an image and its points [K, 2] together. The points
    become shares of width and height.
    """

    def __init__(self, transform: Callable[..., Any]) -> None:
        self.transform = transform

    def __call__(self, image: Tensor, points: Tensor) -> tuple[Tensor, Tensor]:
        keypoints = tv_tensors.KeyPoints(points, canvas_size=image.shape[1:])
        moved, keypoints = self.transform(tv_tensors.Image(image), keypoints)
        sides = torch.tensor([moved.shape[2], moved.shape[1]])
        return moved.as_subclass(Tensor), keypoints.as_subclass(Tensor) / sides


def distances(outputs: Tensor, points: Tensor) -> Tensor:
    """Compute the mean distance of the points of each image, as a share of the image: [B]."""
    return (outputs.view_as(points) - points).norm(dim=2).mean(1)


def distance(task: Any, outputs: Tensor, batch: Batch) -> Tensor:
    return to_double(distances(outputs, batch.target)).sum()


def near(task: Any, outputs: Tensor, batch: Batch) -> Tensor:
    return (distances(outputs, batch.target) < NEAR).sum()


def per_image(total: Tensor, samples: int) -> float:
    return float(total) / samples


class Keypoints(ImageTask):
    """Targets are float [B, K, 2]; the model has 2 K outputs."""

    target = "keypoints"
    names_are = "points"
    metrics = {
        "distance": Metric(distance, per_image, lower_is_better=True),
        "near": Metric(near, per_image, is_proportion=True),
    }
    headline = "distance"

    @property
    def num_outputs(self) -> int:
        return 2 * len(self.names)

    def train_transform(self, size: tuple[int, int], resize: bool, mean: tuple[float, ...]) -> Any:
        steps = train_transform(self.config.data.augment, size, resize, mean)
        return WithPoints(steps or v2.Identity())

    def evaluation_transform(self, preprocessing: Any) -> Any:
        return WithPoints(evaluation_transform(preprocessing))

    def losses(self, networks: Any, batch: Batch, phase: str) -> tuple[Tensor, dict[str, Tensor]]:
        return distances(networks.model(batch.image), batch.target), {}

    def table(self, evaluation: Evaluation) -> dict[str, list[Any]]:
        assert evaluation.rows is not None
        return {"distance": distances(*evaluation.rows[1:]).tolist()}

    def predictions(self, scores: Tensor, topk: int) -> list[dict[str, Any]]:
        """Return column and row of each point, as shares of width and height."""
        points = scores.unflatten(1, (-1, 2)).tolist()
        return [dict(zip(self.names, row, strict=True)) for row in points]

    def text(self, prediction: Mapping[str, Any]) -> str:
        return ", ".join(f"{name} {x:.3f} {y:.3f}" for name, (x, y) in prediction.items())

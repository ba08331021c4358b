"""Keypoints: points in an image, which move with it when it is cropped or flipped.

    cp examples/keypoints.py src/tasks/ && cp examples/keypoints.yaml conf/experiment/
    python train.py experiment=keypoints

The dataset draws a red and a blue dot on noise. In 15 seconds of CPU time, val/distance falls to
0.002, which is less than a tenth of a pixel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torchvision import tv_tensors
from torchvision.transforms import v2

from src.data.transforms import evaluation_transform, train_transform
from src.schema import DataConfig
from src.tasks.images import ImageTask
from timm_parallel import Batch, ImageDataset, Metric, to_double

SIDE, MARGIN = 40, 8


class _Dots:
    """Images, and distance of each dot from the left and the top in pixels, [2, 2]."""

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
        return image, points + 0.5


class Dots(ImageDataset):
    """Made-up images with two points."""

    targets = ("keypoints",)
    target_names = ["red x", "red y", "blue x", "blue y"]

    def __init__(self, config: DataConfig, num_samples: int = 1024) -> None:
        self.train, self.val = _Dots(num_samples, 0), _Dots(256, 1)


class PointNet(nn.Module):
    """Maps images to the mean place of each heatmap, [B, 2 K], in shares of the image."""

    def __init__(self, num_classes: int, in_chans: int, width: int = 32) -> None:
        super().__init__()
        self.heatmaps = nn.Sequential(
            nn.Conv2d(in_chans, width, 5, padding=2),
            nn.GELU(),
            nn.Conv2d(width, num_classes // 2, 5, padding=2),
        )

    def forward(self, images: Tensor) -> Tensor:
        heatmaps = self.heatmaps(images)
        height, width = heatmaps.shape[2:]
        shares = heatmaps.flatten(2).softmax(2).unflatten(2, (height, width))
        columns = (torch.arange(width, device=images.device) + 0.5) / width
        rows = (torch.arange(height, device=images.device) + 0.5) / height
        points = [shares.sum(2) @ columns, shares.sum(3) @ rows]
        return torch.stack(points, 2).flatten(1)


class WithPoints:
    """Applies a transform of torchvision to an image and its points [K, 2] together. The points
    become shares of width and height.
    """

    def __init__(self, transform: Callable[..., Any]) -> None:
        self.transform = transform

    def __call__(self, image: Tensor, points: Tensor) -> tuple[Tensor, Tensor]:
        # torchvision mirrors KeyPoints as indices of pixels, but resizes them as distances from the
        # edge. It takes the sides of a box as distances in both, so use boxes without area.
        boxes = tv_tensors.BoundingBoxes(
            points.repeat(1, 2),
            format="XYXY",
            canvas_size=image.shape[1:],
            clamping_mode=None,
        )
        moved, boxes = self.transform(tv_tensors.Image(image), boxes)
        sides = torch.tensor([moved.shape[2], moved.shape[1]])
        return moved.as_subclass(Tensor), boxes.as_subclass(Tensor)[:, :2] / sides


def distances(outputs: Tensor, points: Tensor) -> Tensor:
    """Compute the mean distance of the points of each image, as a share of the image: [B]."""
    return (outputs.view_as(points) - points).norm(dim=2).mean(1)


def distance(task: Any, outputs: Tensor, batch: Batch) -> Tensor:
    return to_double(distances(outputs, batch.target)).sum()


class Keypoints(ImageTask):
    """Targets are float [B, K, 2], and outputs [B, 2 K]."""

    target = "keypoints"
    metrics = {
        "distance": Metric(
            distance, lambda total, samples: float(total) / samples, lower_is_better=True
        )
    }
    headline = "distance"

    def train_transform(self, size: tuple[int, int], resize: bool, mean: tuple[float, ...]) -> Any:
        data = self.config.data
        steps = train_transform(data.augment, size, resize, mean, data.crop_mode)
        return WithPoints(steps or v2.Identity())

    def evaluation_transform(self, preprocessing: Any) -> Any:
        return WithPoints(evaluation_transform(preprocessing))

    def losses(self, networks: Any, batch: Batch, phase: str) -> tuple[Tensor, dict[str, Tensor]]:
        return distances(networks.model(batch.image), batch.target), {}

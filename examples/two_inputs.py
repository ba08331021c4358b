"""A model with two inputs: an image, and numbers that belong to it.

    cp examples/two_inputs.py src/tasks/ && cp examples/two_inputs.yaml conf/experiment/
    python train.py experiment=two_inputs

The question is if a digit is larger than a number. With the digit alone, no model exceeds a val/acc
of about 0.78; with both inputs, it is 0.91 after 12 seconds of CPU time. predict.py reads images
only, so use evaluate.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from src.data.datasets import Digits
from src.schema import DataConfig
from src.tasks.classification import Classification
from timm_parallel import Batch, ImageDataset, InMemory


class Comparisons(ImageDataset):
    """Digits with the field `numbers` [B, 1], from -1 (for 0) to 1 (for 8)."""

    target_names = ["not larger", "larger"]
    in_chans = 1
    mean, std = Digits.mean, Digits.std

    def __init__(self, config: DataConfig) -> None:
        digits = Digits(config)
        self.image_size = digits.image_size
        draw = torch.Generator().manual_seed(0)
        self.train = self._with_numbers(digits.train, draw)
        self.val = self._with_numbers(digits.val, draw)
        self.test = self._with_numbers(digits.test, draw)

    def _with_numbers(self, split: Any, draw: torch.Generator) -> InMemory:
        numbers = torch.randint(0, 9, (len(split),), generator=draw)
        is_larger = (split.labels > numbers).long()
        fields = {"numbers": numbers[:, None] / 4 - 1, "target": is_larger}
        return InMemory(split.images, fields)


class ImageAndNumbers(nn.Module):
    """Maps images [B, C, H, W] and numbers [B, N] to scores."""

    def __init__(self, num_classes: int, in_chans: int, numbers: int = 1, width: int = 32) -> None:
        super().__init__()
        self.of_image = nn.Sequential(
            nn.Conv2d(in_chans, width, 4, 4),
            nn.GroupNorm(4, width),
            nn.GELU(),
            nn.Conv2d(width, 2 * width, 3, 2, 1),
            nn.GroupNorm(4, 2 * width),
            nn.GELU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
        )
        self.head = nn.Sequential(
            nn.Linear(8 * width + numbers, 64), nn.GELU(), nn.Linear(64, num_classes)
        )

    def forward(self, images: Tensor, numbers: Tensor) -> Tensor:
        scores: Tensor = self.head(torch.cat([self.of_image(images), numbers], 1))
        return scores


class TwoInputs(Classification):
    """Classification of images with numbers."""

    def check_targets(self, targets: Any) -> None:
        super().check_targets(targets["target"])

    def losses(self, networks: Any, batch: Batch, phase: str) -> tuple[Tensor, dict[str, Tensor]]:
        outputs = networks.model(batch.image, batch.numbers)
        criterion = self.criterion or networks.loss
        numbers = self.train_numbers(outputs.detach(), batch.target)
        return criterion(outputs, batch.target), numbers

    def predict(self, networks: Any, batch: Batch) -> Tensor:
        scores: Tensor = networks.model(batch.image, batch.numbers)
        return scores.float()

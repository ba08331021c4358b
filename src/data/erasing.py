"""Random erasing of normalized images, on their device."""

from __future__ import annotations

import random

import torch
from timm.data.random_erasing import RandomErasing
from torch import Tensor

from src.schema import AugmentConfig


class Erasing:
    """timm's random erasing, with random draws for each image that depend only on its seed."""

    def __init__(self, augment: AugmentConfig, device: torch.device) -> None:
        # Other devices than GPUs take noise from the CPU, whose generator can be seeded for each image everywhere.
        self.device = device if device.type == "cuda" else torch.device("cpu")
        self.generator = torch.default_generator
        if device.type == "cuda":
            torch.cuda.init()  # creates the generators
            self.generator = torch.cuda.default_generators[device.index]
        self.erasing = RandomErasing(augment.reprob, mode=augment.remode, max_count=augment.recount, device=self.device)

    def __call__(self, images: Tensor, seeds: list[int]) -> Tensor:
        """Erase random boxes of images [B, C, H, W] in place. `seeds`: one per image."""
        before = random.getstate()
        # The draws of a step, dropout's, must not depend on those of augmentation.
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            for image, seed in zip(images, seeds, strict=True):
                random.seed(seed)
                self.generator.manual_seed(seed)
                self.erasing(image)
        random.setstate(before)
        return images

"""Random erasing of normalized images, on their device."""

from __future__ import annotations

import math
import random

import numpy as np
import torch
from timm.data.random_erasing import RandomErasing
from torch import Tensor

Box = tuple[int, int, int, int]  # top, left, height, width


class Erasing:
    """timm's random erasing as a batch step: the same boxes and noise for the seed of an image,
    written at once.

    All numbers are drawn on the host, by generators of its own. So an image is erased alike on each
    device, rank and worker.
    """

    def __init__(self, probability: float, mode: str = "const", max_count: int = 1) -> None:
        """Take timm's arguments: `probability` of an image, `mode` const, rand or pixel, and the
        largest number of boxes in an image.
        """
        # Holds timm's ranges of area and aspect.
        self.timm = RandomErasing(probability, mode=mode, max_count=max_count, device="cpu")

    def draw(self, seeds: list[int], shape: torch.Size) -> list[Tensor]:
        """Draw the pixels to erase, int32 [P], as numbers among all pixels of the batch, and noise
        for them, [P, C].

        No noise is drawn in the mode const.
        """
        # Not attributes: a torch.Generator does not reach loader workers that are spawned.
        draws, noise_draws = random.Random(), torch.Generator()
        channels, height, width = shape[1:]
        grid = np.arange(height * width, dtype=np.int32).reshape(height, width)
        pixels, noise = [np.empty(0, np.int32)], [torch.empty(0, channels)]
        for number, seed in enumerate(seeds):
            draws.seed(seed)
            if draws.random() > self.timm.probability:
                continue
            noise_draws.manual_seed(seed)
            for top, left, rows, columns in self._boxes(draws, height, width):
                pixels.append(
                    grid[top : top + rows, left : left + columns].ravel() + number * grid.size
                )
                if self.timm.mode != "const":
                    of_box = (rows, columns) if self.timm.per_pixel else (1, 1)
                    drawn = torch.empty(channels, *of_box).normal_(generator=noise_draws)
                    noise.append(drawn.expand(channels, rows, columns).flatten(1).T)
        erased, values = np.concatenate(pixels), torch.cat(noise)
        if self.timm.max_count > 1:
            # A later box covers an earlier one, but the order of writes to one pixel is not
            # defined.
            erased, last = np.unique(erased[::-1], return_index=True)
            values = values.flip(0)[torch.from_numpy(last)] if len(values) else values
        return (
            [torch.from_numpy(erased)]
            if self.timm.mode == "const"
            else [torch.from_numpy(erased), values]
        )

    def __call__(self, images: Tensor, *draws: Tensor) -> Tensor:
        """Erase the drawn pixels of images [B, C, H, W] in place."""
        pixels, *noise = draws
        values = noise[0] if noise else images.new_zeros(())
        area = images.shape[2] * images.shape[3]
        numbers = pixels.long() // area
        images.view(*images.shape[:2], area).transpose(1, 2).index_put_(
            (numbers, pixels - numbers * area), values
        )
        return images

    def _boxes(self, draw: random.Random, height: int, width: int) -> list[Box]:
        """Draw the boxes of an image as timm's RandomErasing does."""
        timm = self.timm
        # timm draws no number if there is only one.
        count = (
            timm.min_count
            if timm.min_count == timm.max_count
            else draw.randint(timm.min_count, timm.max_count)
        )
        boxes: list[Box] = []
        for _ in range(count):
            for _attempt in range(10):
                area = draw.uniform(timm.min_area, timm.max_area) * (height * width) / count
                aspect = math.exp(draw.uniform(*timm.log_aspect_ratio))
                rows, columns = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
                if rows < height and columns < width:
                    boxes.append(
                        (
                            draw.randint(0, height - rows),
                            draw.randint(0, width - columns),
                            rows,
                            columns,
                        )
                    )
                    break
        return boxes

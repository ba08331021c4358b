"""Random erasing of boxes in normalized images, on the device that holds the images."""

from __future__ import annotations

import math
import random

import numpy as np
import torch
from timm.data.random_erasing import RandomErasing
from torch import Tensor

# Box of pixels to erase: top, left, height and width.
Box = tuple[int, int, int, int]


class Erasing:
    """timm's random erasing as one operation on a whole batch.

    Boxes and noise of an image depend only on its seed, and are drawn on the CPU with separate
    generators. So every device, rank and loader worker erases an image in the same way.
    """

    def __init__(self, probability: float, mode: str = "const", max_count: int = 1) -> None:
        """Set the options of timm's random erasing.

        `probability`: probability that an image is erased. `mode`: const (zeros), rand (one random
        color per box) or pixel (random noise). `max_count`: largest number of boxes per image.
        """
        # This object is never called. It only holds timm's default ranges of box area and aspect
        # ratio.
        self.timm = RandomErasing(probability, mode=mode, max_count=max_count, device="cpu")

    def draw(self, seeds: list[int], shape: torch.Size) -> list[Tensor]:
        """Draw which pixels of a batch are erased, and the noise that replaces them.

        The first tensor in the returned list has the indices of these pixels, int32 [P], counted
        over all pixels of all images. The second tensor has the noise, float32 [P, C]. In the mode
        const, which erases to zeros, the list has no second tensor.
        """
        # Create the generators here and not as attributes, because a torch.Generator cannot be
        # pickled for loader workers that are spawned.
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
            # Where two boxes of an image overlap, keep the values of the later box. Without this,
            # two writes to one pixel would happen in an undefined order.
            erased, last = np.unique(erased[::-1], return_index=True)
            values = values.flip(0)[torch.from_numpy(last)] if len(values) else values
        return (
            [torch.from_numpy(erased)]
            if self.timm.mode == "const"
            else [torch.from_numpy(erased), values]
        )

    def __call__(self, images: Tensor, *draws: Tensor) -> Tensor:
        """Erase the drawn pixels of images [B, C, H, W] in place, and return these images."""
        pixels, *noise = draws
        values = noise[0] if noise else images.new_zeros(())
        area = images.shape[2] * images.shape[3]
        numbers = pixels.long() // area
        images.view(*images.shape[:2], area).transpose(1, 2).index_put_(
            (numbers, pixels - numbers * area), values
        )
        return images

    def _boxes(self, draw: random.Random, height: int, width: int) -> list[Box]:
        """Draw the boxes to erase in one image of `height` x `width` pixels, as timm's
        RandomErasing does.
        """
        timm = self.timm
        # If only one number of boxes is possible, timm draws no random number for it. Do the same,
        # so that the boxes are those of timm.
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

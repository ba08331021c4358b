"""Dataset of the small project. The images are made in memory."""

from __future__ import annotations

from small.config import DataConfig
from timm_parallel import ImageDataset, InMemory

SIDE = 8
# Mean and standard deviation of each channel, for pixel values from 0 to 1.
MEAN, STD = (0.1, 0.1, 0.1), (0.2, 0.2, 0.2)
# Numbers of images that no number of ranks above 1 divides.
TRAIN, VAL = 61, 23


class Spots(ImageDataset):
    """Noise with a bright pixel. The target is its position from 0 to 1, [row, column]."""

    targets = ("numbers",)
    target_names = ["row", "column"]

    def __init__(self, config: DataConfig) -> None:
        import torch

        draw = torch.Generator().manual_seed(0)
        count = TRAIN + VAL
        images = torch.rand(count, 3, SIDE, SIDE, generator=draw) * config.noise
        row, column = torch.randint(SIDE, (2, count), generator=draw)
        images[torch.arange(count), :, row, column] = 1
        images = (images * 255).to(torch.uint8)
        labels = torch.stack([row, column], 1) / (SIDE - 1)
        self.train = InMemory(images[:TRAIN], labels[:TRAIN])
        self.val = InMemory(images[TRAIN:], labels[TRAIN:])

    @classmethod
    def size(cls, config: DataConfig, enough: int | None = None) -> int:
        return TRAIN


class Scattered(Spots):
    """Noise with zero to three bright pixels. The field `points` has their positions, [K, 2]."""

    targets = ("points",)

    def __init__(self, config: DataConfig) -> None:
        import torch

        draw = torch.Generator().manual_seed(1)
        samples = []
        for count in torch.randint(4, (TRAIN + VAL,), generator=draw).tolist():
            row, column = torch.randint(SIDE, (2, count), generator=draw)
            image = torch.rand(3, SIDE, SIDE, generator=draw) * config.noise
            image[:, row, column] = 1
            points = torch.stack([row, column], 1) / (SIDE - 1)
            samples.append(((image * 255).to(torch.uint8), {"points": points}))
        self.train, self.val = samples[:TRAIN], samples[TRAIN:]

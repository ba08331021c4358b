"""A dataset without an index: samples come in the order of a stream, for example from a queue or a
simulation.

    cp examples/stream.py src/data/ && cp examples/stream.yaml conf/experiment/
    python train.py experiment=stream

Every process reads the whole stream and keeps its part, so reading should be cheap. `__len__` says
how many samples an epoch has. The same epoch must yield the same samples again, for other ranks and
after a resume.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from src.schema import DataConfig
from timm_parallel import ImageDataset, InMemory

SIDE = 32


def draw_sample(draw: torch.Generator) -> tuple[Tensor, int]:
    """Draw a disc (0) or a square (1) of any size and place on noise, uint8 [1, SIDE, SIDE]."""
    image = torch.randint(0, 120, (1, SIDE, SIDE), generator=draw, dtype=torch.uint8)
    label, half, top, left = torch.randint(0, 2**16, (4,), generator=draw).tolist()
    label, half, top, left = label % 2, 4 + half % 5, 8 + top % 16, 8 + left % 16
    rows, columns = torch.arange(SIDE)[:, None] - top, torch.arange(SIDE) - left
    is_disc = rows**2 + columns**2 <= half**2
    is_square = (rows.abs() <= half) & (columns.abs() <= half)
    image[:, is_square if label else is_disc] += 100
    return image, label


class _Stream:
    """A training split whose samples are new in each epoch."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def stream(self, epoch: int) -> Iterator[tuple[Tensor, Any]]:
        draw = torch.Generator().manual_seed(epoch)
        for _ in range(self.num_samples):
            yield draw_sample(draw)


class Stream(ImageDataset):
    """Discs and squares without end. Evaluation needs an index, so val is in memory."""

    target_names = ["disc", "square"]
    in_chans, image_size = 1, SIDE
    train: Any

    def __init__(self, config: DataConfig, num_samples: int = 2048) -> None:
        self.train = _Stream(num_samples)
        # Seeds of val must not be numbers of epochs.
        draw = torch.Generator().manual_seed(2**32)
        images, labels = zip(*(draw_sample(draw) for _ in range(256)), strict=True)
        self.val = InMemory(torch.stack(images), torch.tensor(labels))

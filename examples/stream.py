"""A dataset without an index: samples come in the order of a stream, for example from a queue or a
simulation.

    cp examples/stream.py src/data/ && cp examples/stream.yaml conf/experiment/
    python train.py experiment=stream

It reaches a val/acc of 0.99 in 18 seconds of CPU time.

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
    """Draw horizontal (0) or vertical (1) stripes of any width on noise, uint8 [1, SIDE, SIDE]."""
    image = torch.randint(0, 120, (1, SIDE, SIDE), generator=draw, dtype=torch.uint8)
    label, width, start = torch.randint(0, 2**16, (3,), generator=draw).tolist()
    label, width = label % 2, 3 + width % 6
    is_light = (torch.arange(start, start + SIDE) // width) % 2 == 0
    stripes = is_light[None, :] if label else is_light[:, None]
    return image + 60 * stripes.byte(), label


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
    """Stripes without end. Evaluation needs an index, so val is in memory."""

    target_names = ["horizontal", "vertical"]
    in_chans, image_size = 1, SIDE
    train: Any

    def __init__(self, config: DataConfig, num_samples: int = 2048) -> None:
        self.train = _Stream(num_samples)
        # Seeds of val must not be numbers of epochs.
        draw = torch.Generator().manual_seed(2**32)
        images, labels = zip(*(draw_sample(draw) for _ in range(256)), strict=True)
        self.val = InMemory(torch.stack(images), torch.tensor(labels))

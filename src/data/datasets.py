"""Built-in datasets. Your own is a class `src.<module>.<Class>` that extends ImageDataset and is
built from a DataConfig.

Imports torch only where a dataset is built, because train.py checks the data first.
"""

from __future__ import annotations

import gzip
from importlib.util import find_spec
from pathlib import Path

from src.schema import DataConfig
from timm_parallel import ImageDataset, InMemory, as_size


class MadeInMemory(ImageDataset):
    """A dataset that reads no folder."""

    @classmethod
    def check(cls, config: DataConfig, evaluated: str | None = None, target: str = "label") -> None:
        """Raise ValueError for a folder."""
        if config.root is not None:
            raise ValueError(
                f"data.root={config.root}: data.name={config.name} reads no folder; give "
                "data=folder too, or data.root=null"
            )


class Digits(MadeInMemory):
    """The 1,797 handwritten digits inside scikit-learn (UCI, Alpaydin and Kaynak 1998): 8x8 gray
    values 0..16.
    """

    target_names = [str(digit) for digit in range(10)]
    in_chans = 1
    # Of the training split.
    mean = (0.3053,)
    std = (0.3513,)

    def __init__(self, config: DataConfig) -> None:
        import numpy as np
        import torch

        self.image_size = as_size(config.image_size or 32)
        # Read from the file directly, because importing sklearn.datasets takes 0.8 s.
        spec = find_spec("sklearn")
        assert spec is not None and spec.origin is not None
        with gzip.open(
            Path(spec.origin).parent / "datasets" / "data" / "digits.csv.gz", "rt"
        ) as file:
            table = torch.from_numpy(np.loadtxt(file, delimiter=",", dtype=np.float32))
        gray = table[:, :-1].view(-1, 1, 8, 8) / 16
        images = torch.nn.functional.interpolate(
            gray, self.image_size, mode="bilinear", align_corners=False
        )
        images = (images * 255).round().to(torch.uint8)
        labels = table[:, -1].long()
        # A fixed seed, so that the splits never change.
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
        splits = [InMemory(images[part], labels[part]) for part in order.split([1257, 270, 270])]
        self.train, self.val, self.test = splits

    @classmethod
    def size(cls, config: DataConfig, enough: int | None = None) -> int:
        """Return the size of the training split."""
        return 1257


class Synthetic(MadeInMemory):
    """Random images and labels in memory, which cost almost nothing to load."""

    def __init__(
        self, config: DataConfig, num_samples: int = 2048, num_classes: int = 10, in_chans: int = 3
    ) -> None:
        import numpy as np
        import torch

        self.target_names = [f"class_{index}" for index in range(num_classes)]
        self.in_chans = in_chans
        self.image_size = as_size(config.image_size or 32)
        # NumPy draws bytes four times as fast as torch.randint.
        draw = np.random.default_rng(0)
        splits = []
        for count in (num_samples, max(1, num_samples // 8)):
            shape = (count, in_chans, *self.image_size)
            images = torch.from_numpy(draw.integers(0, 256, shape, dtype=np.uint8))
            labels = torch.from_numpy(draw.integers(0, num_classes, count))
            splits.append(InMemory(images, labels))
        self.train, self.val = splits

    @classmethod
    def size(cls, config: DataConfig, enough: int | None = None) -> int:
        """Return the size of the training split."""
        return int(config.kwargs.get("num_samples", 2048))


class Shapes(MadeInMemory):
    """Discs and squares on noise, with masks: uint8 [N, H, W], 0 for the background."""

    targets = ("mask",)
    target_names = ["background", "disc", "square"]

    def __init__(self, config: DataConfig, num_samples: int = 512) -> None:
        import torch

        self.image_size = as_size(config.image_size or 64)
        height, width = self.image_size
        rows, columns = torch.arange(height)[:, None], torch.arange(width)
        splits = []
        for seed, count in enumerate((num_samples, num_samples // 4)):
            draw = torch.Generator().manual_seed(seed)
            size = (count, 3, height, width)
            images = torch.randint(0, 120, size, generator=draw, dtype=torch.uint8)
            masks = torch.zeros(count, height, width, dtype=torch.uint8)
            shares = torch.rand(count, 2, 3, generator=draw)
            for image, mask, pair in zip(images, masks, shares, strict=True):
                for number, (top, left, share) in enumerate(pair.tolist(), start=1):
                    side = min(height, width) * (0.1 + 0.1 * share)
                    down, right = (rows - top * height).abs(), (columns - left * width).abs()
                    is_disc = down**2 + right**2 <= side**2
                    inside = is_disc if number == 1 else (down <= side) & (right <= side)
                    mask[inside] = number
                    image[:, inside] += 90
            splits.append(InMemory(images, masks))
        self.train, self.val = splits

    @classmethod
    def size(cls, config: DataConfig, enough: int | None = None) -> int:
        """Return the size of the training split."""
        return int(config.kwargs.get("num_samples", 512))

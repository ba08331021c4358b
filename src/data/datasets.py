"""Built-in datasets that are made in memory. A dataset of your own is a class
`src.<module>.<Class>` that extends ImageDataset and takes a DataConfig.
"""

from __future__ import annotations

import gzip
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from src.schema import DataConfig
from timm_parallel import ImageDataset, InMemory, as_size


class Digits(ImageDataset):
    """Handwritten digits of scikit-learn (UCI, Alpaydin and Kaynak 1998): 1,797 images of 8x8 gray
    values 0..16, which are resized.
    """

    target_names = [str(digit) for digit in range(10)]
    in_chans = 1
    # Mean and standard deviation of the training images, in 0..1.
    mean = (0.3053,)
    std = (0.3513,)

    def __init__(self, config: DataConfig) -> None:
        self.image_size = as_size(config.image_size or 32)
        # Read scikit-learn's file directly, because importing sklearn.datasets takes 0.8 s.
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
        # Divide the images with a fixed seed, so that the splits are the same in every run.
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
        splits = [InMemory(images[part], labels[part]) for part in order.split([1257, 270, 270])]
        self.train, self.val, self.test = splits

    @classmethod
    def size(cls, config: DataConfig, enough: int | None = None) -> int:
        """Return the number of training images of the dataset."""
        return 1257


class Synthetic(ImageDataset):
    """Random images and labels in memory. Loading them costs almost no time, which helps to measure
    the speed of training alone.
    """

    def __init__(
        self, config: DataConfig, num_samples: int = 2048, num_classes: int = 10, in_chans: int = 3
    ) -> None:
        self.target_names = [f"class_{index}" for index in range(num_classes)]
        self.in_chans = in_chans
        self.image_size = as_size(config.image_size or 32)
        # Draw with NumPy, which is four times as fast as torch.randint for bytes.
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
        """Return the number of training images of the dataset."""
        return int(config.kwargs.get("num_samples", 2048))


class Shapes(ImageDataset):
    """Discs and squares on noise, for segmentation. The masks are uint8 [N, H, W]; class 0 is the
    background.
    """

    targets = ("mask",)
    target_names = ["background", "disc", "square"]

    def __init__(self, config: DataConfig, num_samples: int = 512) -> None:
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
        """Return the number of training images of the dataset."""
        return int(config.kwargs.get("num_samples", 512))

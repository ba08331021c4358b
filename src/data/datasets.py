"""What is read: each dataset has a train, a val and perhaps a test split, and says what its images are.

A dataset of your own is a class `src.<module>.<Class>` that extends `Images`; its constructor takes the DataConfig. A split
is anything with `__len__` and `__getitem__(index) -> (uint8 tensor [C, H, W], label)`.
"""

from __future__ import annotations

import gzip
import importlib
import importlib.util
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor

from src.data.folders import class_names, image_files
from src.data.images import decode_file
from src.schema import DataConfig, is_timm_dataset

Sample = tuple[Tensor, int]


class Split(Protocol):
    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sample: ...


class Images(Protocol):
    """A dataset. `mean` and `std` are per channel of images in 0..1; None takes those of the model."""

    class_names: list[str]
    in_chans: int = 3
    image_size: int | None = None  # pixels; None: any, the loader resizes
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    train: Split
    val: Split
    test: Split | None = None


class InMemory:
    """A split that fits in memory: a batch is one indexing operation, and worker processes would only slow it down."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        """images: uint8 [N, C, H, W]; labels: int64 [N]."""
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Sample:
        return self.images[index], int(self.labels[index])


class Files:
    """A split of image files, decoded when asked for."""

    def __init__(self, files: list[tuple[Path, int]], mode: str = "RGB") -> None:
        """files: each with its label. mode: RGB, or L for images of one channel."""
        self.files, self.mode = files, mode

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Sample:
        path, label = self.files[index]
        return decode_file(path, self.mode), label


class Digits(Images):
    """The 1,797 handwritten digits inside scikit-learn (UCI, Alpaydin and Kaynak 1998): 8x8 grey values 0..16."""

    class_names = [str(digit) for digit in range(10)]
    in_chans = 1
    mean = (0.3053,)  # of the training split
    std = (0.3513,)

    def __init__(self, config: DataConfig) -> None:
        self.image_size = config.image_size or 32
        spec = importlib.util.find_spec("sklearn")  # the file alone: importing sklearn.datasets takes 0.8 s
        assert spec is not None and spec.origin is not None
        with gzip.open(Path(spec.origin).parent / "datasets" / "data" / "digits.csv.gz", "rt") as file:
            table = torch.from_numpy(np.loadtxt(file, delimiter=",", dtype=np.float32))
        grey = table[:, :-1].view(-1, 1, 8, 8) / 16
        size = (self.image_size, self.image_size)
        images = torch.nn.functional.interpolate(grey, size, mode="bilinear", align_corners=False)
        images = (images * 255).round().to(torch.uint8)
        labels = table[:, -1].long()
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))  # the split never changes
        self.train, self.val, self.test = (
            InMemory(images[part], labels[part]) for part in order.split([1257, 270, 270])
        )


class Synthetic(Images):
    """Random images and labels, made once: the cost of loading is next to nothing."""

    def __init__(self, config: DataConfig, num_samples: int = 2048, num_classes: int = 10, in_chans: int = 3) -> None:
        self.class_names = [f"class_{index}" for index in range(num_classes)]
        self.in_chans = in_chans
        self.image_size = config.image_size or 32
        shape = (in_chans, self.image_size, self.image_size)
        draw = np.random.default_rng(0)  # of bytes, four times as fast as torch.randint
        self.train, self.val = (self._split(count, shape, draw) for count in (num_samples, max(1, num_samples // 8)))

    def _split(self, count: int, shape: tuple[int, int, int], draw: np.random.Generator) -> InMemory:
        images = draw.integers(0, 256, (count, *shape), dtype=np.uint8)
        labels = draw.integers(0, len(self.class_names), count)
        return InMemory(torch.from_numpy(images), torch.from_numpy(labels))


class Folder(Images):
    """Images in `<root>/{train,val,test}/<class>/`; labels are the sorted class names of train/."""

    def __init__(self, config: DataConfig) -> None:
        assert config.root is not None
        root = Path(config.root)
        self.class_names = class_names(root / "train")
        self.train, self.val = self._split(root / "train"), self._split(root / "val")
        self.test = self._split(root / "test") if (root / "test").is_dir() else None

    def _split(self, folder: Path) -> Files:
        numbered = enumerate(self.class_names)
        return Files([(path, label) for label, name in numbered for path in image_files(folder / name)])


DATASETS = {
    "digits": "src.data.datasets.Digits",
    "synthetic": "src.data.datasets.Synthetic",
    "folder": "src.data.datasets.Folder",
    "timm": "src.data.timm_datasets.TimmImages",
}


def build_images(config: DataConfig) -> Images:
    """The dataset of `data.name`."""
    name = "timm" if is_timm_dataset(config.name) else config.name
    module, _, class_name = DATASETS.get(name, name).rpartition(".")
    kind: Any = getattr(importlib.import_module(module), class_name)
    if not (isinstance(kind, type) and kind.__module__.startswith("src.")):
        raise ValueError(f"data.name={config.name}: not a class of this project")
    try:
        return cast(Images, kind(config, **config.kwargs))
    except TypeError as error:
        if "argument" not in str(error):  # a fault inside it, which its traceback shows
            raise
        raise ValueError(f"data.kwargs={config.kwargs}: {config.name} does not take them ({error})") from None

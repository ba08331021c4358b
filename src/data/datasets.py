"""Built-in datasets. Your own is a class `src.<module>.<Class>` that extends ImageDataset and is
built from a DataConfig.
"""

from __future__ import annotations

import gzip
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from src.schema import DATASETS, DataConfig
from timm_parallel.config.timm_names import is_timm_dataset
from timm_parallel.data.csv_listing import list_csv
from timm_parallel.data.dataset import ImageDataset, InMemory
from timm_parallel.data.decode import files_of
from timm_parallel.data.folder import list_folder
from timm_parallel.errors import refuse_wrong_arguments
from timm_parallel.machine.process import import_class


class Digits(ImageDataset):
    """The 1,797 handwritten digits inside scikit-learn (UCI, Alpaydin and Kaynak 1998): 8x8 gray
    values 0..16.
    """

    class_names = [str(digit) for digit in range(10)]
    in_chans = 1
    # Of the training split.
    mean = (0.3053,)
    std = (0.3513,)

    def __init__(self, config: DataConfig) -> None:
        self.image_size = config.image_size or 32
        # Read from the file directly, because importing sklearn.datasets takes 0.8 s.
        spec = find_spec("sklearn")
        assert spec is not None and spec.origin is not None
        with gzip.open(
            Path(spec.origin).parent / "datasets" / "data" / "digits.csv.gz", "rt"
        ) as file:
            table = torch.from_numpy(np.loadtxt(file, delimiter=",", dtype=np.float32))
        gray = table[:, :-1].view(-1, 1, 8, 8) / 16
        size = (self.image_size, self.image_size)
        images = torch.nn.functional.interpolate(gray, size, mode="bilinear", align_corners=False)
        images = (images * 255).round().to(torch.uint8)
        labels = table[:, -1].long()
        # A fixed seed, so that the splits never change.
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
        splits = [InMemory(images[part], labels[part]) for part in order.split([1257, 270, 270])]
        self.train, self.val, self.test = splits


class Synthetic(ImageDataset):
    """Random images and labels in memory, which cost almost nothing to load."""

    def __init__(
        self, config: DataConfig, num_samples: int = 2048, num_classes: int = 10, in_chans: int = 3
    ) -> None:
        self.class_names = [f"class_{index}" for index in range(num_classes)]
        self.in_chans = in_chans
        self.image_size = config.image_size or 32
        shape = (in_chans, self.image_size, self.image_size)
        # NumPy draws bytes four times as fast as torch.randint.
        draw = np.random.default_rng(0)
        self.train = self._split(num_samples, shape, draw)
        self.val = self._split(max(1, num_samples // 8), shape, draw)

    def _split(
        self, count: int, shape: tuple[int, int, int], draw: np.random.Generator
    ) -> InMemory:
        images = draw.integers(0, 256, (count, *shape), dtype=np.uint8)
        labels = draw.integers(0, len(self.class_names), count)
        return InMemory(torch.from_numpy(images), torch.from_numpy(labels))


class Folder(ImageDataset):
    """Images in `<root>/{train,val,test}/<class>/`,
    or in `<root>/<class>/` with data.val_fraction.
    """

    def __init__(self, config: DataConfig, trained_classes: list[str] | None = None) -> None:
        """`trained_classes`: in an evaluation, the class names of the evaluated run; then train/
        may be missing.
        """
        self.class_names, listing = list_folder(config, trained_classes)
        self.train, self.val, self.test = files_of(listing)


class Csv(ImageDataset):
    """Images and labels listed in a CSV file."""

    def __init__(
        self, config: DataConfig, trained_classes: list[str] | None = None, multilabel: bool = False
    ) -> None:
        """`trained_classes`: in an evaluation, the class names of the evaluated run. `multilabel`:
        see train.task.
        """
        self.class_names, listing = list_csv(config, trained_classes, multilabel)
        self.train, self.val, self.test = files_of(listing)


def build_dataset(
    config: DataConfig, trained_classes: list[str] | None = None, multilabel: bool = False
) -> ImageDataset:
    """Build the dataset `data.name`. `trained_classes`: the class names of a run that will be
    evaluated on it.
    """
    name = "timm" if is_timm_dataset(config.name) else config.name
    dataset_class = import_class(DATASETS.get(name, name))
    if not (isinstance(dataset_class, type) and dataset_class.__module__.startswith("src.")):
        raise ValueError(
            f"data.name={config.name}: not a class of this project; give src.<module>.<Class>"
        )
    more: dict[str, Any] = (
        {"trained_classes": trained_classes} if config.name in ("folder", "csv") else {}
    )
    if config.name == "csv":
        more["multilabel"] = multilabel
    with refuse_wrong_arguments("data.kwargs", config.kwargs, config.name):
        return cast(ImageDataset, dataset_class(config, **more, **config.kwargs))

"""Datasets by the names that timm's factory knows: `torch/cifar10`, `hfds/…`, and tars (`tar`, `wds`), read by src/data/tars.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from timm.data import create_dataset

from src.data.datasets import Images, Sample
from src.data.images import decode, from_pil
from src.data.tars import read_splits
from src.schema import DataConfig


class TimmImages(Images):
    """`data=timm data.name=<name> data.root=<folder>`; what else there is to say is `data.kwargs`."""

    def __init__(
        self,
        config: DataConfig,
        train_split: str = "train",
        val_split: str = "validation",
        test_split: str | None = None,
        download: bool = False,
        input_key: str = "image",
        target_key: str = "label",
    ) -> None:
        """timm's names. The keys name the columns of a Hugging Face dataset."""
        names = [name for name in (train_split, val_split, test_split) if name is not None]
        kind = config.name.partition("/")[0]
        splits: list[Any]
        if kind in ("tar", "wds"):
            splits, self.class_names = read_splits(Path(str(config.root)), names, webdataset=kind == "wds")
        elif kind == "hfds":
            readers = [_create(config, name, input_key=input_key, target_key=target_key).reader for name in names]
            splits = [HubSplit(reader) for reader in readers]
            numbers = readers[0].class_to_idx or {str(n): n for n in range(max(readers[0].dataset[target_key]) + 1)}
            self.class_names = sorted(numbers, key=numbers.__getitem__)
        else:
            found = [_create(config, name, download=download) for name in names]
            first, _ = found[0][0]
            self.in_chans = 1 if first.mode in ("L", "1") else 3
            splits = [TorchvisionSplit(dataset, "L" if self.in_chans == 1 else "RGB") for dataset in found]
            self.class_names = [str(name) for name in found[0].classes]
        self.train, self.val = splits[0], splits[1]
        self.test = splits[2] if test_split is not None else None


class TorchvisionSplit:
    """PIL images and labels, as torchvision's datasets give them."""

    def __init__(self, dataset: Any, mode: str) -> None:
        self.dataset, self.mode = dataset, mode

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Sample:
        image, label = self.dataset[index]
        return from_pil(image, self.mode), int(label)


class HubSplit:
    """A Hugging Face dataset through timm's reader, decoded here: timm's own wrapper would silently replace damaged images."""

    def __init__(self, reader: Any) -> None:
        self.reader = reader

    def __len__(self) -> int:
        return len(self.reader)

    def __getitem__(self, index: int) -> Sample:
        file, label, *_ = self.reader[index]
        with file:
            return decode(file.read(), f"image {index} of {self.reader.split}"), int(label)


def _create(config: DataConfig, split: str, **options: Any) -> Any:
    """One split by timm's factory."""
    try:
        return create_dataset(config.name, root=config.root, split=split, is_training=split == "train", **options)
    except ImportError as error:
        raise ValueError(f"data.name={config.name}: needs a package: pip install {error.name}") from None
    except (OSError, RuntimeError, AssertionError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        remedy = "is there a network, or a filled cache (data.root)?"
        if "download" in options:
            remedy = "data.kwargs.download=true fetches it (+ before it on the command line)"
        raise ValueError(
            f"data.name={config.name}: the split {split} is not in {config.root} ({reason}); {remedy}"
        ) from None

"""Datasets by the names that timm's factory knows: `torch/cifar10`, `hfds/…`, and tars (`tar`, `wds`), read by src/data/tars.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from src.data import tars
from src.data.images import decode, from_pil
from src.schema import DataConfig


class TimmImages:
    """`data=timm data.name=<name> data.root=<folder>`; what else there is to say is `data.kwargs`."""

    image_size: int | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None

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
        kind, _, _ = config.name.partition("/")
        splits = {"train": train_split, "val": val_split, "test": test_split}
        present = {name: split for name, split in splits.items() if split is not None}
        self.in_chans = 3
        if kind in ("tar", "wds"):
            found = self._from_tars(config, present, webdataset=kind == "wds")
        elif kind == "hfds":
            found = self._from_hub(config, present, input_key, target_key)
        else:
            found = self._from_torchvision(config, present, download)
        self.train, self.val, self.test = found["train"], found["val"], found.get("test")

    def _from_tars(self, config: DataConfig, splits: dict[str, str], webdataset: bool) -> dict[str, Any]:
        paths = {name: tars.find_tars(Path(str(config.root)), split) for name, split in splits.items()}
        members = {name: tars.read_index(paths[name], webdataset) for name in splits}
        self.class_names = tars.class_names(members["train"], webdataset)
        return {name: tars.TarSplit(paths[name], members[name], self.class_names) for name in splits}

    def _from_hub(self, config: DataConfig, splits: dict[str, str], input_key: str, target_key: str) -> dict[str, Any]:
        found = {
            name: HubSplit(_create(config, split, input_key=input_key, target_key=target_key).reader)
            for name, split in splits.items()
        }
        reader = found["train"].reader
        numbers = reader.class_to_idx or {str(n): n for n in range(max(reader.dataset[target_key]) + 1)}
        self.class_names = sorted(numbers, key=numbers.__getitem__)
        return found

    def _from_torchvision(self, config: DataConfig, splits: dict[str, str], download: bool) -> dict[str, Any]:
        found = {name: _create(config, split, download=download) for name, split in splits.items()}
        first, _ = found["train"][0]
        if first.mode in ("L", "1"):
            self.in_chans = 1
        self.class_names = [str(name) for name in found["train"].classes]
        return {
            name: TorchvisionSplit(dataset, "L" if self.in_chans == 1 else "RGB") for name, dataset in found.items()
        }


class TorchvisionSplit:
    """PIL images and labels, as torchvision's datasets give them."""

    def __init__(self, dataset: Any, mode: str) -> None:
        self.dataset, self.mode = dataset, mode

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image, label = self.dataset[index]
        return from_pil(image, self.mode), int(label)


class HubSplit:
    """A Hugging Face dataset through timm's reader, decoded here: timm's own wrapper would silently replace damaged images."""

    def __init__(self, reader: Any) -> None:
        self.reader = reader

    def __len__(self) -> int:
        return len(self.reader)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        file, label, *_ = self.reader[index]
        with file:
            return decode(file.read(), f"image {index} of {self.reader.split}"), int(label)


def _create(config: DataConfig, split: str, **options: Any) -> Any:
    """One split by timm's factory."""
    from timm.data import create_dataset

    try:
        return create_dataset(config.name, root=config.root, split=split, is_training=split == "train", **options)
    except ImportError as error:
        raise ValueError(f"data.name={config.name}: needs a package: pip install {error.name}") from None
    except (OSError, RuntimeError, AssertionError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        remedy = (
            "data.kwargs.download=true fetches it (+ before it on the command line)"
            if "download" in options
            else ("is there a network, or a filled cache (data.root)?")
        )
        raise ValueError(
            f"data.name={config.name}: the split {split} is not in {config.root} ({reason}); {remedy}"
        ) from None

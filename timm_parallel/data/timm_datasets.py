"""Datasets that timm can load by name, such as `torch/cifar10` and `hfds/…`."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from timm.data import create_dataset
from torch import Tensor

from timm_parallel.data.dataset import ImageDataset, InMemory
from timm_parallel.data.decode import ImageFiles, decode, from_pil
from timm_parallel.keys import DataConfig


class TimmImages(ImageDataset):
    """Dataset that timm loads by name: `data=timm data.name=<name> data.root=<folder>`.

    data.kwargs may hold further options.
    """

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
        """Load the splits with timm. The arguments have the names that timm uses.

        `input_key`, `target_key`: columns of a Hugging Face dataset with the images and with the
        labels.
        """
        names = [name for name in (train_split, val_split, test_split) if name is not None]
        splits: list[Any]
        if config.name.partition("/")[0] == "hfds":
            readers = [
                _create(config, name, input_key=input_key, target_key=target_key).reader
                for name in names
            ]
            splits = [HubSplit(reader, config.max_value) for reader in readers]
            numbers = readers[0].class_to_idx or {
                str(n): n for n in range(max(readers[0].dataset[target_key]) + 1)
            }
            self.target_names = sorted(numbers, key=numbers.__getitem__)
        else:
            datasets = [_create(config, name, download=download) for name in names]
            for dataset in datasets:
                # Replace the loader of torchvision, which would open files of every format that
                # Pillow knows.
                if hasattr(dataset, "loader"):
                    dataset.loader = partial(decode, max_value=config.max_value)
            first, _ = datasets[0][0]
            self.in_chans = 1 if not isinstance(first, Tensor) and first.mode in ("L", "1") else 3
            splits = [
                TorchvisionSplit(dataset, "L" if self.in_chans == 1 else "RGB", config.max_value)
                for dataset in datasets
            ]
            self.target_names = [str(name) for name in datasets[0].classes]
        self.train, self.val = splits[0], splits[1]
        self.test = splits[2] if test_split is not None else None


class TorchvisionSplit:
    """A split of a torchvision dataset.

    An item of this dataset is a label with either a PIL image or a decoded uint8 tensor.
    """

    def __init__(self, dataset: Any, mode: str, max_value: float | None = None) -> None:
        self.dataset, self.mode, self.max_value = dataset, mode, max_value
        # Use the array of a dataset that holds all images in memory, such as CIFAR or MNIST. The
        # array is uint8 [N, H, W, 3] or [N, H, W].
        self.rows: InMemory | None = None
        if hasattr(dataset, "data") and hasattr(dataset, "targets"):
            images, labels = torch.as_tensor(dataset.data), torch.as_tensor(dataset.targets)
            if images.dtype == torch.uint8 and labels.ndim == 1:
                images = images[:, None] if images.ndim == 3 else images.permute(0, 3, 1, 2)
                self.rows = InMemory(images.contiguous(), labels.long())

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image, label = self.dataset[index]
        if not isinstance(image, Tensor):
            image = from_pil(image, self.mode, self.max_value)
        return image, int(label)


class HubSplit(ImageFiles):
    """A split of a Hugging Face dataset, whose files are read by timm and decoded here.

    timm does not decode them, because it would replace a damaged image by another image without a
    warning.
    """

    def __init__(self, reader: Any, max_value: float | None = None) -> None:
        self.reader, self._max_value = reader, max_value

    def __len__(self) -> int:
        return len(self.reader)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        file, label, *_ = self.reader[index]
        name = f"image {index} of {self.reader.split}"
        with file:
            return decode(file.read(), name, max_value=self._max_value), int(label)

    def encoded(self, index: int) -> bytes:
        with self.reader[index][0] as file:
            return bytes(file.read())


def _create(config: DataConfig, split: str, **options: Any) -> Any:
    """Load one split with timm's create_dataset, and raise ValueError with a fix if this fails."""
    try:
        return create_dataset(
            config.name, root=config.root, split=split, is_training=split == "train", **options
        )
    except ImportError as error:
        raise ValueError(
            f"data.name={config.name}: needs a package that is not installed: pip install "
            f"{error.name}"
        ) from None
    except (OSError, RuntimeError, AssertionError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        remedy = "check the network, or give a filled cache as data.root"
        if "download" in options:
            remedy = "download it with +data.kwargs.download=true"
        raise ValueError(
            f"data.name={config.name}: the split {split} is not in {config.root} ({reason}); "
            f"{remedy}"
        ) from None

"""Lists of image files and their labels, and their division into train, val and test. Loader
workers read a list without copying it. This module does not import torch.
"""

from __future__ import annotations

import hashlib
import os
import unicodedata
from array import array
from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from timm_parallel.keys import DataConfig
from timm_parallel.machine.text import plural


class FileList(Sequence[tuple[Path, Any]]):
    """List of pairs of path and label of image files, stored in a few large blocks of memory.

    Forked loader workers share these blocks. They would copy a list of tuples page by page, because
    reading a Python object changes its reference count: 300 MB per worker for a million files.
    """

    def __init__(self, files: Sequence[tuple[Path, Any]]) -> None:
        self._paths = Blocks([os.fsencode(path) for path, _ in files])
        self._labels = _stored([label for _, label in files])

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[position] for position in range(len(self))[index]]
        path, label = self.read(index)
        return Path(path), label

    def read(self, index: int) -> tuple[str, Any]:
        """Return the path of an image as text, and its label. Workers use this method, because each
        new Path writes to Python's table of interned strings, which would be copied.
        """
        label = self._labels[index]
        if isinstance(self._labels, Blocks):
            label = os.fsdecode(label)
        return os.fsdecode(self._paths[index]), label

    def columns(self) -> tuple[list[str], list[Any]]:
        """Return all paths and all labels. This is faster than reading pair by pair, because it
        builds no Path objects.
        """
        labels = [*self._labels]
        if isinstance(self._labels, Blocks):
            labels = [os.fsdecode(label) for label in labels]
        return [os.fsdecode(path) for path in self._paths], labels


def _stored(labels: list[Any]) -> Sequence[Any]:
    """Store labels in large blocks of memory if they are class numbers, texts, or tuples of as many
    numbers each. Other labels stay in a list.
    """
    kinds = {*map(type, labels)}
    if kinds == {int}:
        return array("q", labels)
    if kinds == {str}:
        return Blocks([os.fsencode(label) for label in labels])
    if kinds == {tuple} and len({*map(len, labels)}) == 1:
        numbers = [number for label in labels for number in label]
        if (of_numbers := {*map(type, numbers)}) in ({int}, {float}):
            return Rows(array("q" if of_numbers == {int} else "d", numbers), len(labels[0]))
    return labels


class Rows(Sequence[tuple[Any, ...]]):
    """List of tuples of `width` numbers, stored as one array."""

    def __init__(self, numbers: array[Any], width: int) -> None:
        self._numbers, self._width = numbers, width

    def __len__(self) -> int:
        return len(self._numbers) // self._width

    def __getitem__(self, index: Any) -> Any:
        start = range(len(self))[index] * self._width
        return tuple(self._numbers[start : start + self._width])


class Blocks(Sequence[bytes]):
    """List of byte strings, stored as one byte string and the positions at which they end."""

    def __init__(self, items: list[bytes]) -> None:
        self._bytes = b"".join(items)
        self._ends = array("Q", accumulate(map(len, items), initial=0))

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, index: Any) -> Any:
        position = range(len(self))[index]
        return self._bytes[self._ends[position] : self._ends[position + 1]]

    def __iter__(self) -> Any:
        return (self._bytes[start:end] for start, end in pairwise(self._ends))


# The image files of each split, by the name of the split. A file has a label, which is a class
# number, or one number per class if an image may have several labels.
Listing = dict[str, list[tuple[Path, Any]]]
# Position of an image in a list of tar files: index of the tar file, offset and size of the image
# in bytes, label.
Member = tuple[int, int, int, str]


def split_of(key: str, data: DataConfig) -> str:
    """Select train, val or test for an image from a hash of `key`, which is the relative path or
    the group of the image.

    An image keeps its split when other images are added. Each class is divided in about the
    configured fractions. File names from macOS use another Unicode form (NFD) than those of other
    systems (NFC). Both forms give the same split.
    """
    text = unicodedata.normalize("NFC", key).encode("utf-8", "surrogateescape")
    digest = hashlib.blake2b(text, digest_size=8).digest()
    position = int.from_bytes(digest, "big") / 2**64
    val, test = data.val_fraction or 0.0, data.test_fraction or 0.0
    return "val" if position < val else "test" if position < val + test else "train"


def check_splits(listing: Listing, data: DataConfig) -> None:
    """Raise ValueError if data.val_fraction or data.test_fraction leaves a split without images."""
    for split, files in listing.items():
        if not files:
            key = "test_fraction" if split == "test" else "val_fraction"
            images = plural(sum(map(len, listing.values())), "image")
            raise ValueError(
                f"data.{key}={getattr(data, key)}: the {split} split would get none of {images}; "
                "choose another value"
            )


def batches_per_epoch(images: int, batch_size: int, accumulate: int) -> int:
    """Compute the number of global batches per epoch. Images that do not fill a whole optimizer
    step are not counted.

    `batch_size`: the global batch size. `accumulate`: batches per optimizer step. Raises ValueError
    if the images do not fill one optimizer step.
    """
    if images < batch_size:
        raise ValueError(
            f"data.batch_size={batch_size}: exceeds the training split "
            f"({plural(images, 'image')}); use {images} or less"
        )
    batches = images // batch_size
    if batches < accumulate:
        raise ValueError(
            f"train.accumulate={accumulate}: an epoch has {plural(batches, 'batch', 'es')}; use "
            f"{batches} or less"
        )
    return batches // accumulate * accumulate

"""Lists of image files and their labels, and their division into train, val and test. Loader
workers read a list without copying it. This module does not import torch.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import unicodedata
from array import array
from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from timm_parallel.keys import DataConfig
from timm_parallel.machine.text import plural


class FileList(Sequence[tuple[Path, Any]]):
    """List of pairs of path and label of image files, stored in one large block of memory.

    Forked loader workers share this block. They would copy a list of tuples page by page, because
    reading a Python object changes its reference count: 300 MB per worker for a million files.
    """

    def __init__(self, files: Sequence[tuple[Path, Any]]) -> None:
        pairs = [pickle.dumps((os.fspath(path), label)) for path, label in files]
        self._pairs = b"".join(pairs)
        self._ends = array("Q", accumulate(map(len, pairs), initial=0))

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[position] for position in range(len(self))[index]]
        path, label = self.read(index)
        return Path(path), label

    def read(self, index: int) -> tuple[str, Any]:
        """Return the path of an image as text, and its label. Workers use this method, because each
        new Path writes to Python's table of interned strings, which would be copied.
        """
        position = range(len(self))[index]
        pair = self._pairs[self._ends[position] : self._ends[position + 1]]
        return pickle.loads(pair)  # type: ignore[no-any-return]

    def columns(self) -> tuple[list[str], list[Any]]:
        """Return all paths and all labels. This is faster than reading pair by pair, because it
        builds no Path objects.
        """
        pairs = [pickle.loads(self._pairs[start:end]) for start, end in pairwise(self._ends)]
        return [path for path, _ in pairs], [label for _, label in pairs]


# The image files of each split, by the name of the split. A file has a label, which is a class
# number, or one number per class if an image may have several labels.
Listing = dict[str, list[tuple[Path, Any]]]


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

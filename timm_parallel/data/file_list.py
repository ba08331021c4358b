"""Lists of image files and their labels, and their division into train, val and test. Loader
workers read a list without copying it. This module does not import torch.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import re
import unicodedata
from array import array
from collections.abc import Container, Iterable, Sequence
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


SPLITS = ("train", "val", "test")
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


def split_folders(data: DataConfig) -> dict[str, Path]:
    """Return the folder of each split that exists. With data.val_fraction, one folder has the
    images of all splits, and its key is an empty text.
    """
    root = Path(str(data.root))
    if data.val_fraction is not None:
        return {"": root}
    return {split: root / split for split in SPLITS if (root / split).is_dir()}


def needed_splits(evaluated: str | None, present: Container[str]) -> list[str]:
    """Return the splits that must have images. `evaluated`: the split on which a trained run will
    be evaluated, or `all`; None for training. `present`: the splits that the data have.
    """
    if evaluated is None:
        return [split for split in SPLITS if split != "test" or split in present]
    if evaluated == "all":
        return [split for split in ("val", "test") if split in present] or ["val"]
    return [evaluated]


def by_split(files: Iterable[tuple[str, Path, Any]]) -> Listing:
    """Build a listing from the split, path and label of each image. It has the splits with images
    only.
    """
    listing: Listing = {split: [] for split in SPLITS}
    for split, path, label in files:
        listing[split].append((path, label))
    return {split: of_split for split, of_split in listing.items() if of_split}


def split_of_file(path: Path, root: Path, data: DataConfig) -> str:
    """Return the split that data.val_fraction and data.group_pattern assign to an image file."""
    return split_of(_group_of(path.relative_to(root).as_posix(), data), data)


def _group_of(path: str, data: DataConfig) -> str:
    """Return the part of a path that matches data.group_pattern, or the whole path without a
    pattern.

    Images for which this text is equal are put into the same split.
    """
    if data.group_pattern is None:
        return path
    match = re.search(data.group_pattern, path)
    if match is None:
        raise ValueError(
            f"data.group_pattern={data.group_pattern}: does not match {path}; choose a pattern "
            "that matches the path of every image"
        )
    return match.group(1) if match.groups() else match.group()


def check_splits(listing: Listing, data: DataConfig) -> None:
    """Raise ValueError if data.val_fraction or data.test_fraction leaves a split without images."""
    for split, key in zip(SPLITS, ("val_fraction", "val_fraction", "test_fraction"), strict=True):
        if getattr(data, key) and split not in listing:
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

"""Division of images into train, val and test by data.val_fraction and data.test_fraction, and of
an epoch into batches.
"""

from __future__ import annotations

import hashlib
import unicodedata
from pathlib import Path
from typing import Any

from timm_parallel.keys import DataConfig
from timm_parallel.machine.text import plural

# Split -> image files, each with its label: a class number, or a number per class
# (several labels per image).
Listing = dict[str, list[tuple[Path, Any]]]
# An image in a tar file: number of the tar, bytes before the image, its bytes, its label.
Member = tuple[int, int, int, str]


def split_of(key: str, data: DataConfig) -> str:
    """Choose train, val or test from a hash of `key`, which is the relative path or the group of an
    image.

    So an image keeps its split when images are added. Each class is divided by the fractions in
    expectation. Unicode writes é in two ways (NFC, and NFD in names from macOS); both give the same
    split.
    """
    text = unicodedata.normalize("NFC", key).encode("utf-8", "surrogateescape")
    digest = hashlib.blake2b(text, digest_size=8).digest()
    position = int.from_bytes(digest, "big") / 2**64
    val, test = data.val_fraction or 0.0, data.test_fraction or 0.0
    return "val" if position < val else "test" if position < val + test else "train"


def check_splits(listing: Listing, data: DataConfig) -> None:
    """Raise ValueError if data.val_fraction or data.test_fraction leaves a split empty."""
    for split, files in listing.items():
        if not files:
            key = "test_fraction" if split == "test" else "val_fraction"
            images = plural(sum(map(len, listing.values())), "image")
            raise ValueError(
                f"data.{key}={getattr(data, key)}: none of {images} is left for {split}; choose "
                "another value"
            )


def batches_per_epoch(images: int, batch_size: int, accumulate: int) -> int:
    """Return the number of full batches in full optimizer steps of `accumulate` batches.

    Raises ValueError for too few training images. `batch_size` is the global one.
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

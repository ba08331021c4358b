"""Divide images into train, val and test by data.val_fraction and data.test_fraction, and count the
batches of an epoch.
"""

from __future__ import annotations

import hashlib
import unicodedata
from pathlib import Path
from typing import Any

from timm_parallel.keys import DataConfig
from timm_parallel.machine.text import plural

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

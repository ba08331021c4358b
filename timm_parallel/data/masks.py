"""Dataset of images with segmentation masks: `<root>/{train,val,test}/{images,masks}`.

With data.val_fraction, the layout is `<root>/{images,masks}`. An image and its mask have the same
name, apart from the suffix. This module does not import torch, because train.py checks the data
before it imports torch.
"""

from __future__ import annotations

import math
import unicodedata
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

from timm_parallel.data.dataset import ImageDataset, absent_note, image_files
from timm_parallel.data.file_list import (
    Listing,
    by_split,
    check_splits,
    needed_splits,
    split_folders,
    split_of_file,
)
from timm_parallel.errors import UnreadableImageError
from timm_parallel.keys import DataConfig
from timm_parallel.machine.text import first, plural

IGNORED = ImageDataset.ignored
# Largest number of training masks that `MaskDataset.notes` reads.
SAMPLED = 64


class MaskDataset(ImageDataset):
    """Dataset of images with PNG masks. A mask pixel holds a class number or an index of
    a palette.
    """

    targets = ("mask",)

    def __init__(
        self,
        config: DataConfig,
        classes: list[str] | None = None,
        ignore_index: int = IGNORED,
    ) -> None:
        """List the images and masks of each split.

        `classes`: names of the class numbers 0, 1, … in the masks. `ignore_index`: value of mask
        pixels that belong to no class.
        """
        from timm_parallel.data.decode import MaskFiles

        self.target_names, self.left_out = _class_names(config), Counter()
        root, listing = Path(str(config.root)), _list_masks(config, self.left_out)
        check_splits(listing, config)
        splits = {
            name: MaskFiles(root, files, len(self.target_names), ignore_index, config.max_value)
            for name, files in listing.items()
        }
        self.train: Any = splits.get("train")
        self.val: Any = splits.get("val")
        self.test = splits.get("test")

    @classmethod
    def check(cls, config: DataConfig, evaluated: str | None = None, target: str = "mask") -> None:
        """Raise ValueError if a folder of images or masks is missing, or an image has no mask."""
        if config.root is None:
            raise ValueError("data.root=null: set it to a folder with images/ and masks/")
        _class_names(config)
        listing = _list_masks(config, Counter())
        check_splits(listing, config)
        for split in needed_splits(evaluated, listing):
            if split not in listing:
                raise ValueError(
                    f"data.root={config.root}: no image for {split}; expected "
                    f"{split}/images/ and {split}/masks/, or images/ and masks/ with "
                    "data.val_fraction=0.2"
                )

    @classmethod
    def size(cls, config: DataConfig, enough: int | None = None) -> int:
        """Count the training images by listing the files of all splits."""
        return len(_list_masks(config, Counter()).get("train", ()))

    def notes(self, target: str) -> list[str]:
        """Describe files that were left out, the range of pixels, and classes without a pixel in a
        sample of the training masks.
        """
        count, names = len(self.train), self.target_names
        sampled = range(0, count, math.ceil(count / SAMPLED) or 1)
        present: set[int] = set()
        for index in sampled:
            # Reading the images of a batch reports unreadable files later.
            with suppress(UnreadableImageError):
                present |= {*self.train.mask(index).unique().tolist()}
            if present >= {*range(len(names))}:
                break
        absent = [name for number, name in enumerate(names) if number not in present]
        ignored = f", and pixels of {IGNORED} have no class" if IGNORED in present else ""
        read = f" ({len(sampled)} of {count} masks read{ignored})"
        return super().notes(target) + [note + read for note in absent_note(absent, names, "pixel")]


def _class_names(config: DataConfig) -> list[str]:
    names: Any = config.kwargs.get("classes")
    # YAML reads words such as no, on, null, 1e-3 and 12:30 as another type.
    is_text = isinstance(names, list) and all(isinstance(name, str) for name in names)
    if not is_text or len({unicodedata.normalize("NFC", n) for n in names}) < max(2, len(names)):
        raise ValueError(
            f"data.kwargs.classes={names}: expected a list with a different name for each class "
            "number, e.g. +data.kwargs.classes=[background,road]; in YAML, put quotes around names "
            "that are no text, e.g. classes: ['no', 'yes']"
        )
    return list(names)


def _list_masks(config: DataConfig, left_out: Counter[str]) -> Listing:
    """List the images of each split, each with the path of its mask relative to data.root."""
    root = Path(str(config.root))
    return by_split(
        (split or split_of_file(path, folder, config), path, mask)
        for split, folder in split_folders(config).items()
        for path, mask in _pairs(root, folder, left_out)
    )


def _pairs(root: Path, folder: Path, left_out: Counter[str]) -> list[tuple[Path, str]]:
    """Pair each file in `folder`/images with the file in `folder`/masks that has the same name.

    The suffix and the Unicode form of the names may differ. Raises ValueError if a file has no
    partner.
    """
    images, masks = folder / "images", folder / "masks"
    for needed in (images, masks):
        if not needed.is_dir():
            raise ValueError(
                f"data.root={root}: no folder {needed}; expected the folders images and masks"
            )
    image_of, mask_of = _by_stem(images, left_out), _by_stem(masks, left_out)
    if alone := image_of.keys() ^ mask_of.keys():
        files = sorted(str((image_of | mask_of)[stem]) for stem in alone)
        raise ValueError(
            f"data.root={root}: for {plural(len(files), 'file')} ({first(files)}), {images} or "
            f"{masks} has no file of the same name; add the missing files"
        )
    return [(path, str(mask_of[stem].relative_to(root))) for stem, path in image_of.items()]


def _by_stem(folder: Path, left_out: Counter[str]) -> dict[str, Path]:
    files: dict[str, Path] = {}
    for path in image_files(folder, left_out):
        stem = path.relative_to(folder).with_suffix("").as_posix()
        other = files.setdefault(unicodedata.normalize("NFC", stem), path)
        if other is not path:
            raise ValueError(
                f"{other} and {path}: two images have the same name apart from the suffix; rename "
                "one of them"
            )
    return files

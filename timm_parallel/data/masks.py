"""Dataset of images with segmentation masks: `<root>/{train,val,test}/{images,masks}`.

With data.val_fraction, the layout is `<root>/{images,masks}`. An image and its mask have the same
name, apart from the suffix. This module does not import torch, because train.py checks the data
before it imports torch.
"""

from __future__ import annotations

import math
import unicodedata
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from timm_parallel.data.dataset import ImageDataset, Sample, absent_note, image_files
from timm_parallel.data.file_list import (
    FileList,
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

if TYPE_CHECKING:
    from torch import Tensor

IGNORED = ImageDataset.ignored
# Formats, in Pillow's names, that keep numbers exactly. TIFF files may be compressed with losses.
LOSSLESS = ("PNG", "BMP", "GIF", "TIFF", "PPM")
LOSSY_TIFF = ("jpeg", "tiff_jpeg", "webp")
# Tag of a TIFF that says if 0 is black or white.
PHOTOMETRIC = 262
# Largest stored number, by the raw mode of an image. Pillow stretches the numbers to 0..255.
STRETCHED = {"L;2": 3, "L;4": 15}
# Number of masks whose palettes are compared with that of each mask.
COMPARED = 8
# Largest number of training masks that `MaskDataset.notes` reads.
SAMPLED = 64
# Red, green and blue of the numbers that occur in a mask with a palette.
Colors = dict[int, tuple[int, ...]]


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


class MaskFiles:
    """A split of image files with masks. The image and its mask are decoded when their index is
    read.
    """

    def __init__(
        self,
        root: Path,
        files: Sequence[tuple[Path, str]],
        classes: int,
        ignore_index: int = IGNORED,
        max_value: float | None = None,
    ) -> None:
        self.root, self.files, self.max_value = root, FileList(files), max_value
        self.classes, self.ignore_index = classes, ignore_index

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Sample:
        from timm_parallel.data.decode import decode, stored_turn

        path, name = self.files.read(index)
        encoded, mask = self.encoded(index), self.mask(index)
        image = decode(encoded, path, max_value=self.max_value)
        rotated = ""
        if (turn := stored_turn(encoded)) is not None:
            mask, rotated = _turned(mask, turn, image, path), " after its EXIF rotation"
        if image.shape[1:] != mask.shape:
            raise UnreadableImageError(
                f"{path}: the image has {image.shape[2]}x{image.shape[1]} pixels{rotated}, but its "
                f"mask {name} has {mask.shape[1]}x{mask.shape[0]}; make them equal"
            )
        return image, mask

    def mask(self, index: int) -> Tensor:
        """Read the mask of an image to a uint8 tensor [H, W] of class numbers, as it is stored."""
        path = self.root / self.files.read(index)[1]
        mask, colors = read_mask(path, self.classes, self.ignore_index)
        for number, color in colors.items():
            if self._first_colors.get(number, color) != color:
                raise UnreadableImageError(
                    f"{path}: the number {number} has the color {color} in the palette, but "
                    f"{self._first_colors[number]} in that of another mask; save all masks with "
                    "one palette, or as gray PNG files of class numbers"
                )
        largest = int(mask.masked_fill(mask == IGNORED, 0).max())
        if largest >= self.classes:
            raise UnreadableImageError(
                f"{path}: has a pixel of class {largest}, but data.kwargs.classes only names the "
                f"classes 0 to {self.classes - 1}; add a name, or set "
                f"data.kwargs.ignore_index={largest}"
            )
        return mask

    def encoded(self, index: int) -> bytes:
        from timm_parallel.data.decode import read_image

        return read_image(self.files.read(index)[0])

    @cached_property
    def _first_colors(self) -> Colors:
        """Colors in the palettes of the first masks, with which all masks are compared. So each
        process refuses the same masks.
        """
        first_colors: Colors = {}
        for _, name in self.files[:COMPARED]:
            with suppress(UnreadableImageError):
                _, colors = read_mask(self.root / name, self.classes, self.ignore_index)
                first_colors = {**colors, **first_colors}
        return first_colors


def _turned(mask: Tensor, turn: Any, image: Tensor, path: str) -> Tensor:
    """Turn a mask as the EXIF data turn its image, if the mask has the size of the image before
    this turn. A mask that has the size of the turned image is left as it is.

    Raises UnreadableImageError if both sizes are equal, because the mask may be turned or not.
    """
    import numpy as np
    import torch
    from PIL import Image

    turned = torch.from_numpy(np.array(Image.fromarray(mask.numpy()).transpose(turn)))
    if mask.shape == turned.shape == image.shape[1:]:
        raise UnreadableImageError(
            f"{path}: its EXIF data rotate or flip the image, and the sizes do not tell if its "
            "mask is rotated, too; save the image upright, without EXIF orientation"
        )
    return turned if turned.shape == image.shape[1:] else mask


def read_mask(path: Path, classes: int, ignore_index: int) -> tuple[Tensor, Colors]:
    """Read a mask file to a uint8 tensor [H, W] of class numbers, and the colors of its palette.

    The mask is a gray image or has a palette. Pixels with the value `ignore_index` get the value
    255, which stands for no class. The colors are empty if the grays of an image are its numbers.
    """
    import numpy as np
    import torch

    from timm_parallel.data.decode import open_image, read_image, unreadable

    encoded = read_image(path)
    try:
        with open_image(encoded) as image:
            _check_format(image)
            largest, numbers = _largest_number(image), np.array(image, np.uint8)
            colors = _colors(image, classes, ignore_index) if image.mode == "P" else {}
    except MemoryError:
        raise
    # Catch every exception, because Pillow raises many types of them for a damaged file.
    except Exception as error:
        raise unreadable(str(path), error, "mask") from None
    if largest != IGNORED:
        numbers = np.rint(numbers * (largest / 255)).astype(np.uint8)
    mask = torch.from_numpy(numbers)
    return mask.masked_fill(mask == ignore_index, IGNORED), colors


def _check_format(mask: Any) -> None:
    """Raise ValueError if the format of a PIL image does not keep class numbers."""
    expected = "expected a PNG of class numbers with 8 bits per pixel, gray or with a palette"
    if mask.format not in LOSSLESS or mask.info.get("compression") in LOSSY_TIFF:
        raise ValueError(
            f"{mask.format} files may change numbers; {expected}, never saved with losses"
        )
    if mask.mode not in ("L", "P", "1"):
        raise ValueError(f"its mode is {mask.mode}; {expected}")
    # Pillow inverts these numbers. In an image of 1 bit, white is the class 1 in any format.
    if mask.mode == "L" and mask.format == "TIFF" and mask.tag_v2.get(PHOTOMETRIC) == 0:
        raise ValueError(f"it is a TIFF in which 0 is white; {expected}")


def _largest_number(mask: Any) -> int:
    """Return the largest number that the file of a gray PIL image can store.

    Pillow stretches numbers of fewer than 8 bits to 0..255. Only an image that is not loaded yet
    has this information.
    """
    arguments = mask.tile[0][3]
    raw_mode, *more = (arguments,) if isinstance(arguments, str) else arguments
    if mask.format == "PPM" and more:
        return int(more[0])
    return STRETCHED.get(str(raw_mode)[:3], 255)


def _colors(mask: Any, classes: int, ignore_index: int) -> Colors:
    """Return the colors of the numbers that occur in a mask with a palette.

    The numbers of the file are the classes. But a program that stores a gray mask with a palette
    may number the grays in any order. Raises ValueError if the grays may be the classes.
    """
    values, is_used = mask.getpalette(), mask.histogram()
    palette = [tuple(values[start : start + 3]) for start in range(0, len(values), 3)]
    colors = {number: color for number, color in enumerate(palette) if is_used[number]}
    grays = [color[0] for color in colors.values()]
    are_gray = all(len({*color}) == 1 for color in palette)
    are_classes = all(gray < classes or gray == ignore_index for gray in grays)
    # Black and white are the numbers 0 and 1, as in an image of 1 bit per pixel.
    is_doubtful = grays != sorted(grays) or (are_classes and not {*grays} <= {0, 255})
    if are_gray and grays != [*colors] and is_doubtful:
        raise ValueError(
            f"the numbers {[*colors]} have the grays {grays} in the palette, which may be the "
            "classes too; expected a gray PNG of class numbers"
        )
    return colors


def _class_names(config: DataConfig) -> list[str]:
    names = config.kwargs.get("classes")
    # YAML reads words such as no, on, null, 1e-3 and 12:30 as another type.
    is_text = isinstance(names, list) and all(isinstance(name, str) for name in names)
    if not is_text or len({unicodedata.normalize("NFC", n) for n in names}) < max(2, len(names)):
        raise ValueError(
            f"data.kwargs.classes={names}: expected a list with a different name for each class "
            "number, e.g. +data.kwargs.classes=[background,road]; in YAML, put quotes around names "
            "that are no text, e.g. classes: ['no', 'yes']"
        )
    return names


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

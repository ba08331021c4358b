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
from timm_parallel.data.file_list import FileList
from timm_parallel.data.folder import divided
from timm_parallel.errors import UnreadableImageError
from timm_parallel.keys import DataConfig
from timm_parallel.machine.text import first, plural

if TYPE_CHECKING:
    from torch import Tensor

SPLITS = ("train", "val", "test")
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
# The files of each split, by the name of the split: the path of each image, and the path of its
# mask relative to data.root.
MaskListing = dict[str, list[tuple[Path, str]]]
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
        listing = _list_masks(config)
        needed = {None: ["train", "val"], "all": ["val"]}.get(evaluated, [str(evaluated)])
        for split in needed:
            # With evaluated=all, a dataset with test images alone is enough.
            if not listing.get(split) and not (evaluated == "all" and listing.get("test")):
                raise ValueError(
                    f"data.root={config.root}: no image for {split}; expected "
                    f"{split}/images/ and {split}/masks/, or images/ and masks/ with "
                    "data.val_fraction=0.2"
                )

    @classmethod
    def size(cls, config: DataConfig, enough: int | None = None) -> int:
        """Count the training images by listing the files of all splits."""
        return len(_list_masks(config)["train"])

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

    def pixel_notes(self) -> list[str]:
        """Describe the range of pixels of more than 8 bits in a sample of the images."""
        from timm_parallel.data.decode import pixel_notes

        return pixel_notes(self)

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
    colors: Colors = {}
    try:
        with open_image(encoded) as image:
            _check_format(image)
            largest, numbers = _largest_number(image), np.array(image, np.uint8)
            if image.mode == "P":
                table, colors = _palette(image, classes, ignore_index)
                numbers = table[numbers]
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


def _palette(mask: Any, classes: int, ignore_index: int) -> tuple[Any, Colors]:
    """Return the class numbers [256] of the numbers in a mask with a palette, and their colors.

    The numbers of the file are the classes. But a program that stores a gray mask with a palette
    may number the grays in any order. Then the grays are the classes. Raises ValueError if neither
    is certain.
    """
    import numpy as np

    table = np.arange(256, dtype=np.uint8)
    values = mask.getpalette()
    palette = [tuple(values[start : start + 3]) for start in range(0, len(values), 3)]
    is_used = mask.histogram()
    colors = {number: color for number, color in enumerate(palette) if is_used[number]}
    if any(len({*color}) > 1 for color in palette):
        return table, colors
    grays = [color[0] for color in colors.values()]
    are_classes = all(gray < classes or gray == ignore_index for gray in grays)
    # Black and white are the numbers 0 and 1, as in an image of 1 bit per pixel.
    if grays == [*colors] or (are_classes and not {*grays} <= {0, 255}):
        table[[*colors]] = grays
        return table, {}
    if grays != sorted(grays):
        raise ValueError(
            f"the numbers {[*colors]} have the grays {grays} in the palette, in another order; "
            "expected a gray PNG of class numbers"
        )
    return table, colors


def _class_names(config: DataConfig) -> list[str]:
    names = config.kwargs.get("classes")
    if not isinstance(names, list) or len(names) < 2:
        raise ValueError(
            f"data.kwargs.classes={names}: expected a list with one name per class number, e.g. "
            "+data.kwargs.classes=[background,road]"
        )
    for name in names:
        # YAML reads words such as no, on, null, 1e-3 and 12:30 as another type.
        if not isinstance(name, str):
            raise ValueError(
                f"data.kwargs.classes={names}: the name {name} is not text, but "
                f"{type(name).__name__}; put quotes around the name, e.g. classes: ['no', 'yes']"
            )
    counts = Counter(unicodedata.normalize("NFC", name) for name in names)
    if repeated := [name for name, count in counts.items() if count > 1]:
        raise ValueError(
            f"data.kwargs.classes={names}: has {first(repeated)} twice; give each class number its "
            "own name"
        )
    return names


def _list_masks(config: DataConfig, left_out: Counter[str] | None = None) -> MaskListing:
    root = Path(str(config.root))
    if config.val_fraction is not None:
        return divided(_pairs(root, root, left_out), root, config)
    folders = {split: root / split for split in SPLITS if (root / split).is_dir()}
    return {split: _pairs(root, folder, left_out) for split, folder in folders.items()}


def _pairs(root: Path, folder: Path, left_out: Counter[str] | None) -> list[tuple[Path, str]]:
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
    for of_one, of_other, other in ((image_of, mask_of, masks), (mask_of, image_of, images)):
        if missing := [str(path) for stem, path in of_one.items() if stem not in of_other]:
            raise ValueError(
                f"data.root={root}: for {plural(len(missing), 'file')} ({first(missing)}), the "
                f"folder {other} has no file of the same name; add the missing files"
            )
    return [(path, str(mask_of[stem].relative_to(root))) for stem, path in image_of.items()]


def _by_stem(folder: Path, left_out: Counter[str] | None) -> dict[str, Path]:
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

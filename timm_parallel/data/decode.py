"""Decode image files and masks to tensors, and define splits that read them."""

from __future__ import annotations

import io
import logging
import math
import os
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import ExifTags, Image, UnidentifiedImageError
from torch import Tensor
from torchvision.transforms.functional import pil_to_tensor

from timm_parallel.data.dataset import (
    IMAGE_FORMATS,
    ImageDataset,
    Sample,
    Split,
    image_files,
    left_out_notes,
)
from timm_parallel.data.file_list import FileList, Listing
from timm_parallel.errors import UnreadableImageError
from timm_parallel.machine.text import plural

log = logging.getLogger(__name__)
JPEG, PNG = b"\xff\xd8\xff", b"\x89PNG"
# Operation of Pillow that turns an image upright, by the orientation in its EXIF data.
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
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
# Red, green and blue of the numbers that occur in a mask with a palette.
Colors = dict[int, tuple[int, ...]]
# Largest number of training images that `pixel_notes` reads.
SAMPLED = 16


def decode(
    file: bytes | str | Path, name: str = "", mode: str = "RGB", max_value: float | None = None
) -> Tensor:
    """Decode an image file, given as a path or as bytes, to a uint8 tensor [3, H, W].

    In mode L the result is a gray image [1, H, W]. The image is rotated as its EXIF data say.
    Transparency is ignored, as in torchvision's ImageFolder. Raises UnreadableImageError for a file
    that is not a complete image. `name`: name of the image in error messages, if the image is given
    as bytes. `max_value`: white in images of more than 8 bits; see `data.max_value`.
    """
    if not isinstance(file, bytes):
        return decode(read_image(file), str(file), mode, max_value)
    if file.startswith(JPEG) and (decode_jpeg := find_jpeg_decoder()) is not None:
        # Decode JPEG files with torchcodec, which is faster than PIL and also rotates as EXIF says.
        # If torchcodec fails on a damaged or unusual file, PIL decodes the file below.
        with suppress(RuntimeError):
            data = torch.frombuffer(bytearray(file), dtype=torch.uint8)
            return decode_jpeg(data, mode="GRAY" if mode == "L" else mode)
    try:
        with open_image(file) as image:
            return from_pil(image, mode, max_value)
    except MemoryError:
        raise
    # Catch every exception, because Pillow raises many types of them for a damaged file.
    except Exception as error:
        raise unreadable(name, error) from None


def unreadable(name: str, error: Exception, kind: str = "image") -> UnreadableImageError:
    """Build the error for a file that Pillow cannot read. `kind`: image or mask."""
    reason, fix = " ".join(str(error).split())[:200] or type(error).__name__, "remove or replace it"
    if isinstance(error, UnidentifiedImageError):
        reason = f"its content is none of {', '.join(IMAGE_FORMATS)}"
    elif isinstance(error, Image.DecompressionBombError):
        fix = "Pillow reads no larger images; reduce the image, or cut it into tiles"
    return UnreadableImageError(f"{name}: not a readable {kind} ({reason}); {fix}")


def open_image(encoded: bytes) -> Any:
    """Open an image with Pillow from the bytes of its file. Only the formats in IMAGE_FORMATS are
    accepted.
    """
    return Image.open(io.BytesIO(encoded), formats=IMAGE_FORMATS)


@cache
def find_jpeg_decoder() -> Callable[..., Tensor] | None:
    """Return the JPEG decoder of torchcodec, which is faster than PIL.

    Returns None if torchcodec is missing or does not fit the installed torch. A warning then says
    that PIL decodes JPEG files.
    """
    # Import torchcodec only when the first file is decoded, because data in memory do not need it.
    try:
        from torchcodec.decoders import decode_jpeg
    except (ImportError, OSError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        log.warning(
            "PIL decodes JPEG files, slowly: no torchcodec for this torch is installed (%s)", reason
        )
        return None
    return decode_jpeg  # type: ignore[return-value]


def decoder_of(split: Split) -> str | None:
    """Describe which libraries decode the image files of a split. Returns None for a split that
    decodes no files.
    """
    # A dataset of torchvision reads files through its attribute `loader`.
    if not (hasattr(split, "encoded") or hasattr(getattr(split, "dataset", None), "loader")):
        return None
    return "PIL" if find_jpeg_decoder() is None else "torchcodec for JPEG files, PIL for others"


def read_image(path: str | Path) -> bytes:
    """Read the bytes of an image file. Raises UnreadableImageError if this fails."""
    try:
        # Reject pipes and devices, because reading them may block forever. Build no Path: loader
        # workers would copy Python's table of interned strings (FileList.read).
        if not os.path.isfile(path) and os.path.exists(path):  # noqa: PTH110, PTH113
            raise UnreadableImageError(
                f"{path}: not a regular file, but a folder, pipe or device; remove it from the "
                "images"
            )
        with open(path, "rb", buffering=0) as file:
            return file.read()
    except OSError as error:
        raise UnreadableImageError(
            f"{path}: cannot be read ({error.strerror}); remove or replace it"
        ) from None


def from_pil(image: Any, mode: str = "RGB", max_value: float | None = None) -> Tensor:
    """Convert a PIL image to a uint8 tensor [3, H, W], or [1, H, W] in mode L, rotated as its EXIF
    data say. `max_value`: white in images of more than 8 bits; see `data.max_value`.
    """
    if max_value is not None and not _is_deep(image) and _is_deep_color(image):
        raise ValueError("its colors have 16 bits, but data.max_value needs gray images")
    # Pillow scales a PGM file by the largest value that this file names.
    if image.format == "PPM" and image.mode != "F":
        max_value = None
    image.load()
    turn = exif_turn(image)
    upright = image if turn is None else image.transpose(turn)
    return pil_to_tensor(_eight_bit(upright, max_value).convert(mode))


def exif_turn(image: Any) -> Image.Transpose | None:
    """Return the operation that turns a PIL image upright, or None if its EXIF data name none.

    Broken EXIF data turn no image, as in the decoder of JPEG files.
    """
    with suppress(Exception):
        return TURNS.get(image.getexif().get(ExifTags.Base.Orientation))
    return None


def stored_turn(encoded: bytes) -> Image.Transpose | None:
    """Return the operation with which `decode` turns an image file, without decoding its pixels."""
    # Pillow decodes a PNG to find EXIF data behind its pixels, so look for such data first.
    if encoded.startswith(PNG) and not any(
        word in encoded for word in (b"eXIf", b"type exif", b"xmp")
    ):
        return None
    with suppress(Exception), open_image(encoded) as image:
        return exif_turn(image)
    return None


def _is_deep(image: Any) -> bool:
    """Return True if the pixels of a gray PIL image have more than 8 bits."""
    return bool(image.mode.startswith("I") or image.mode == "F")


def _is_deep_color(image: Any) -> bool:
    """Return True if the file of a PIL image has 16 bits per color, of which Pillow reads 8.

    Only the tiles of an image that is not loaded yet have this information.
    """
    return ";16" in str(getattr(image, "tile", ""))


def _eight_bit(image: Any, max_value: float | None) -> Any:
    """Scale a gray PIL image of more than 8 bits, or of floats, to 8 bits.

    Without this scaling, PIL would clip most pixels to white. Without `max_value`, floats are taken
    as 0 to 1 if no finite one is larger than 1, else as 0 to 255.
    """
    if not _is_deep(image):
        return image
    values = np.asarray(image)
    if image.mode == "F":
        largest = values[np.isfinite(values)].max(initial=0)
        scale = 255 / (max_value or (1 if largest <= 1 else 255))
    else:
        # Some file formats open 16-bit images in mode I instead of I;16. Without `max_value`, take
        # the upper 8 bits.
        values = values.astype(np.float64)
        scale = 1 / 256 if max_value is None else 255 / max_value
    # Floats that mark missing pixels, such as -3.4e38, overflow here and are clipped below.
    with np.errstate(over="ignore"):
        scaled = np.nan_to_num(values * scale)
    if max_value is not None:
        scaled = scaled.round()
    return Image.fromarray(scaled.clip(0, 255).astype(np.uint8))


class ImageFiles:
    """Base class of splits of image files, which a method `encoded` reads by index."""

    _max_value: float | None

    def pixel_notes(self: Any) -> list[str]:
        """Describe the range of pixel values in images of more than 8 bits, among a sample of the
        files.
        """
        sampled = range(0, len(self), math.ceil(len(self) / SAMPLED) or 1)
        ranges: dict[str, list[float]] = {}
        for index in sampled:
            # Reading the images of a batch reports unreadable files later.
            with suppress(Exception), open_image(self.encoded(index)) as image:
                if _is_deep(image):
                    values = np.asarray(image)
                    finite = values[np.isfinite(values)]
                    # An image of NaN alone has no range, so min() fails and the image is left out.
                    ends = float(finite.min()), float(finite.max())
                    kind = "floats" if image.mode == "F" else "more than 8 bits"
                    ranges.setdefault(kind, []).extend(ends)
                elif _is_deep_color(image):
                    ranges["16 bits per color"] = []
        choice = "set data.max_value if white is another value"
        shown = {
            "floats": f"0 to 1 if no larger value is in an image, else 0 to 255; {choice}",
            "more than 8 bits": f"0 to 65535; {choice}, such as 4095",
        }
        if self._max_value is not None:
            shown = dict.fromkeys(shown, f"0 to {self._max_value:g} (data.max_value)")
        shown["16 bits per color"] = "0 to 65535, of which the upper 8 bits are used"
        return [
            f"training images have pixels of {kind}"
            f"{f' from {min(seen):g} to {max(seen):g}' if seen else ''} "
            f"({plural(len(sampled), 'image')} sampled); black to white is {shown[kind]}"
            for kind, seen in ranges.items()
        ]


class Files(ImageFiles):
    """A split of image files. Each file is decoded when its index is read."""

    def __init__(
        self,
        files: Sequence[tuple[Path, Any]],
        mode: str = "RGB",
        max_value: float | None = None,
    ) -> None:
        """Store `files`, pairs of path and label. `mode`: RGB, or L to decode to one gray
        channel. `max_value`: white in images of more than 8 bits; see `data.max_value`.
        """
        self.files, self._mode, self._max_value = FileList(files), mode, max_value
        # What `below` has left out, one sentence each.
        self.notes: list[str] = []

    @classmethod
    def below(cls, path: Path) -> Files:
        """Build a split from one image file, or from all image files below a folder.

        The label of an image is its position in the list of files.
        """
        left_out: Counter[str] = Counter()
        paths = [path] if path.is_file() else image_files(path, left_out)
        split = cls([(file, number) for number, file in enumerate(paths)])
        split.notes = left_out_notes(left_out)
        return split

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Sample:
        path, label = self.files.read(index)
        return decode(path, mode=self._mode, max_value=self._max_value), label

    def encoded(self, index: int) -> bytes:
        return read_image(self.files.read(index)[0])


def files_of(listing: Listing, max_value: float | None) -> tuple[Any, Any, Any]:
    """Build the splits (train, val, test) from lists of image files. `listing`: dictionary from the
    name of a split to its files. A split that is not in the dictionary is None. `max_value`: the
    value of `data.max_value`.
    """
    splits = {name: Files(files, max_value=max_value) for name, files in listing.items()}
    return splits.get("train"), splits.get("val"), splits.get("test")


class MaskFiles(Files):
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
        """Store `files`, pairs of the path of an image and the path of its mask below `root`.

        `classes`: number of classes. `ignore_index`: value of mask pixels that belong to no class.
        """
        super().__init__(files, max_value=max_value)
        self.root, self.classes, self.ignore_index = root, classes, ignore_index

    def __getitem__(self, index: int) -> Sample:
        path, name = self.files.read(index)
        encoded, mask = self.encoded(index), self.mask(index)
        image = decode(encoded, path, max_value=self._max_value)
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
    """Return the colors of the numbers that occur in a mask with a palette; none if the palette is
    that of a gray image, in which each number is its own gray.

    The numbers of the file are the classes. But a program that stores a gray mask with a palette
    may number the grays in any order. Raises ValueError if the grays may be the classes.
    """
    values, is_used = mask.getpalette(), mask.histogram()
    palette = [tuple(values[start : start + 3]) for start in range(0, len(values), 3)]
    colors = {number: color for number, color in enumerate(palette) if is_used[number]}
    grays = [color[0] for color in colors.values()]
    are_gray = all(len({*color}) == 1 for color in palette)
    if are_gray and grays == [*colors]:
        return {}
    are_classes = all(gray < classes or gray == ignore_index for gray in grays)
    # Black and white are the numbers 0 and 1, as in an image of 1 bit per pixel.
    is_doubtful = grays != sorted(grays) or (are_classes and not {*grays} <= {0, 255})
    if are_gray and is_doubtful:
        raise ValueError(
            f"the numbers {[*colors]} have the grays {grays} in the palette, which may be the "
            "classes too; expected a gray PNG of class numbers"
        )
    return colors

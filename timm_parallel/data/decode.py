"""Decode image files to tensors, and define splits that read image files or tar files."""

from __future__ import annotations

import io
import logging
import math
import os
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import ExifTags, Image, UnidentifiedImageError
from torch import Tensor
from torchvision.transforms.functional import pil_to_tensor

from timm_parallel.data.dataset import (
    IMAGE_FORMATS,
    Sample,
    Split,
    image_files,
    left_out_notes,
)
from timm_parallel.data.file_list import FileList, Listing, Member
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


def pixel_notes(split: Any) -> list[str]:
    """Describe the range of pixel values in images of more than 8 bits, among a sample of the files
    of a split.

    `split`: has a method `encoded`, which reads the bytes of a file by its index, and a `max_value`
    (data.max_value).
    """
    sampled, max_value = range(0, len(split), math.ceil(len(split) / SAMPLED) or 1), split.max_value
    ranges: dict[str, list[float]] = {}
    for index in sampled:
        # Reading the images of a batch reports unreadable files later.
        with suppress(Exception), open_image(split.encoded(index)) as image:
            if _is_deep(image):
                values = np.asarray(image)
                finite = values[np.isfinite(values)]
                # An image of NaN alone has no range, so min() fails and the image is left out.
                ends = float(finite.min()), float(finite.max())
                kind = "floats" if image.mode == "F" else "more than 8 bits"
                ranges.setdefault(kind, []).extend(ends)
            elif _is_deep_color(image):
                ranges["16 bits per color"] = [0, 255]
    given = None if max_value is None else f"0 to {max_value:g} (data.max_value)"
    choice = "set data.max_value if white is another value"
    shown = {
        "floats": given or f"0 to 1 if no larger value is in an image, else 0 to 255; {choice}",
        "more than 8 bits": given or f"0 to 65535; {choice}, such as 4095",
        "16 bits per color": "0 to 65535, of which the upper 8 bits are used",
    }
    notes = []
    for kind, seen in ranges.items():
        present = "" if kind == "16 bits per color" else f" from {min(seen):g} to {max(seen):g}"
        notes.append(
            f"training images have pixels of {kind}{present} ({plural(len(sampled), 'image')} "
            "sampled); "
            f"black to white is {shown[kind]}"
        )
    return notes


class ImageFiles:
    """Base class of splits of image files, which a method `encoded` reads by index."""

    max_value: float | None

    def pixel_notes(self) -> list[str]:
        """Describe the range of pixels of more than 8 bits in a sample of the images."""
        return pixel_notes(self)


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
        self.files, self.mode, self.max_value = FileList(files), mode, max_value
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
        return decode(path, mode=self.mode, max_value=self.max_value), label

    def encoded(self, index: int) -> bytes:
        return read_image(self.files.read(index)[0])


class TarSplit(ImageFiles):
    """A split of images in tar files, read by index without unpacking.

    The position, size and label of each image are kept in memory.
    """

    def __init__(
        self,
        tars: list[Path],
        members: list[Member],
        classes: list[str],
        max_value: float | None = None,
    ) -> None:
        numbers = {name: number for number, name in enumerate(classes)}
        self.tars, self.max_value = tars, max_value
        self.tar, self.offset, self.size = np.array([position for *position, _ in members]).T
        try:
            self.labels = np.array([numbers[label] for *_, label in members])
        except KeyError as error:
            raise ValueError(
                f"data.root={tars[0].parent}: the class {error} has images in val or test, but not "
                "in train; add training images of this class"
            ) from None

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Sample:
        name = f"{self.tars[self.tar[index]]} at byte {self.offset[index]}"
        image = decode(self.encoded(index), name, max_value=self.max_value)
        return image, int(self.labels[index])

    def encoded(self, index: int) -> bytes:
        with open(self.tars[self.tar[index]], "rb", buffering=0) as tar:
            tar.seek(int(self.offset[index]))
            return tar.read(int(self.size[index]))


def files_of(listing: Listing, max_value: float | None) -> tuple[Any, Any, Any]:
    """Build the splits (train, val, test) from lists of image files. `listing`: dictionary from the
    name of a split to its files. A split that is not in the dictionary is None. `max_value`: the
    value of `data.max_value`.
    """
    splits = {name: Files(files, max_value=max_value) for name, files in listing.items()}
    return splits.get("train"), splits.get("val"), splits.get("test")

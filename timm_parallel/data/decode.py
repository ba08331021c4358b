"""Decode image files to tensors, and define splits that read image files or tar files."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor
from torchvision.transforms.functional import pil_to_tensor

from timm_parallel.data.dataset import IMAGE_FORMATS, Sample, image_files
from timm_parallel.data.fractions import Listing, Member
from timm_parallel.errors import UnreadableImageError

log = logging.getLogger(__name__)
JPEG = b"\xff\xd8\xff"


def decode(file: bytes | str | Path, name: str = "", mode: str = "RGB") -> Tensor:
    """Decode an image file, given as a path or as bytes, to a uint8 tensor [3, H, W].

    In mode L the result is a gray image [1, H, W]. The image is rotated as its EXIF data say.
    Transparency is ignored, as in torchvision's ImageFolder. Raises UnreadableImageError for a file
    that is not a complete image. `name`: name of the image in error messages, if the image is given
    as bytes.
    """
    if not isinstance(file, bytes):
        # Do not build a new Path from a Path, because parsing its parts again takes 10 us.
        path = file if isinstance(file, Path) else Path(file)
        return decode(_read(path), str(path), mode)
    if file.startswith(JPEG) and (decode_jpeg := find_jpeg_decoder()) is not None:
        # Decode JPEG files with torchcodec, which is faster than PIL and also rotates as EXIF says.
        # If torchcodec fails on a damaged or unusual file, PIL decodes the file below.
        with suppress(RuntimeError):
            data = torch.frombuffer(bytearray(file), dtype=torch.uint8)
            return decode_jpeg(data, mode="GRAY" if mode == "L" else mode)
    try:
        with open_image(file) as image:
            return from_pil(image, mode)
    except UnidentifiedImageError:
        reason = f"its content is none of {', '.join(IMAGE_FORMATS)}"
        raise UnreadableImageError(
            f"{name}: not a readable image ({reason}); remove or replace it"
        ) from None
    except MemoryError:
        raise
    # Catch every exception, because Pillow raises many types of them for a damaged file.
    except Exception as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise UnreadableImageError(
            f"{name}: not a readable image ({reason}); remove or replace it"
        ) from None


def open_image(encoded: bytes) -> Image.Image:
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


def _read(path: Path) -> bytes:
    try:
        # Reject pipes and devices, because reading them may block forever.
        if not path.is_file() and path.exists():
            raise UnreadableImageError(
                f"{path}: not a regular file, but a folder, pipe or device; remove it from the "
                "images"
            )
        return path.read_bytes()
    except OSError as error:
        raise UnreadableImageError(
            f"{path}: cannot be read ({error.strerror}); remove or replace it"
        ) from None


def from_pil(image: Any, mode: str = "RGB") -> Tensor:
    """Convert a PIL image to a uint8 tensor [3, H, W], or [1, H, W] in mode L, rotated as its EXIF
    data say.
    """
    return pil_to_tensor(_eight_bit(ImageOps.exif_transpose(image)).convert(mode))


def _eight_bit(image: Any) -> Any:
    """Scale a gray PIL image of 16 bits or of floats to 8 bits.

    Without this scaling, PIL would clip most pixels to white. Floats are taken as 0 to 1 if none is
    larger than 1.
    """
    # Some file formats open 16-bit images in mode I instead of I;16.
    if image.mode.startswith("I"):
        return Image.fromarray(
            (np.asarray(image).astype(np.int64).clip(0, 65535) >> 8).astype(np.uint8)
        )
    if image.mode == "F":
        values = np.asarray(image)
        scale = 255 if values.max(initial=0) <= 1 else 1
        return Image.fromarray((values * scale).clip(0, 255).astype(np.uint8))
    return image


class Files:
    """A split of image files. Each file is decoded when its index is read."""

    def __init__(self, files: list[tuple[Path, Any]], mode: str = "RGB") -> None:
        """Store `files`, a list of pairs of path and label. `mode`: RGB, or L to decode to one gray
        channel.
        """
        self.files, self.mode = files, mode

    @classmethod
    def below(cls, path: Path) -> Files:
        """Build a split from one image file, or from all image files below a folder.

        The label of an image is its position in the list of files.
        """
        paths = [path] if path.is_file() else image_files(path)
        return cls([(file, number) for number, file in enumerate(paths)])

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Sample:
        path, label = self.files[index]
        return decode(path, mode=self.mode), label


class TarSplit:
    """A split of images in tar files, read by index without unpacking.

    The position, size and label of each image are kept in memory.
    """

    def __init__(self, tars: list[Path], members: list[Member], classes: list[str]) -> None:
        numbers = {name: number for number, name in enumerate(classes)}
        self.tars = tars
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
        path, offset = self.tars[self.tar[index]], int(self.offset[index])
        with open(path, "rb", buffering=0) as tar:
            tar.seek(offset)
            encoded = tar.read(int(self.size[index]))
        return decode(encoded, f"{path} at byte {offset}"), int(self.labels[index])


def files_of(listing: Listing) -> tuple[Any, Any, Any]:
    """Build the splits (train, val, test) from lists of image files. `listing`: dictionary from the
    name of a split to its files. A split that is not in the dictionary is None.
    """
    splits = {name: Files(files) for name, files in listing.items()}
    return splits.get("train"), splits.get("val"), splits.get("test")

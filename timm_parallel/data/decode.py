"""Decode image files to tensors, and read splits of image files and of tar files."""

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
    """Decode an image file, given as path or bytes, to uint8 [3, H, W], or [1, H, W] for mode L,
    rotated as EXIF says.

    Transparency is ignored, as in torchvision's ImageFolder. Raises UnreadableImageError for
    anything but a complete image, with the `name` of bytes.
    """
    if not isinstance(file, bytes):
        # A new Path would parse and join its parts again, which takes 10 us.
        path = file if isinstance(file, Path) else Path(file)
        return decode(_read(path), str(path), mode)
    if file.startswith(JPEG) and (decode_jpeg := find_jpeg_decoder()) is not None:
        # Faster than PIL, which gets the file if it is damaged or of a kind that only PIL reads.
        # Rotates as EXIF says.
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
    # Pillow's decoders raise many types for a damaged file.
    except Exception as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise UnreadableImageError(
            f"{name}: not a readable image ({reason}); remove or replace it"
        ) from None


def open_image(encoded: bytes) -> Image.Image:
    """Open an image file's bytes with Pillow, if they have one of the formats that this project
    reads.
    """
    return Image.open(io.BytesIO(encoded), formats=IMAGE_FORMATS)


@cache
def find_jpeg_decoder() -> Callable[..., Tensor] | None:
    """Return torchcodec's decoder. None, with a warning, if its libraries do not fit torch's build:
    PIL then decodes.
    """
    # Imported with the first file, because data in memory does not need it.
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
        # Reading from a pipe may never return.
        if not path.is_file() and path.exists():
            raise UnreadableImageError(
                f"{path}: not a regular file; remove it from the image folder"
            )
        return path.read_bytes()
    except OSError as error:
        raise UnreadableImageError(
            f"{path}: cannot be read ({error.strerror}); remove or replace it"
        ) from None


def from_pil(image: Any, mode: str = "RGB") -> Tensor:
    """Convert a PIL image to uint8 [3, H, W], or [1, H, W] for mode L, rotated as EXIF says."""
    return pil_to_tensor(_eight_bit(ImageOps.exif_transpose(image)).convert(mode))


def _eight_bit(image: Any) -> Any:
    """Scale gray images of 16 bits, or of floats in 0..1, to 8 bits. PIL's conversion would clip
    them to white.
    """
    # I;16, which some formats open as I.
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
    """A split of image files, each decoded when it is read."""

    def __init__(self, files: list[tuple[Path, Any]], mode: str = "RGB") -> None:
        """`files`: paths with labels. `mode`: RGB, or L for images of one channel."""
        self.files, self.mode = files, mode

    @classmethod
    def below(cls, path: Path) -> Files:
        """List an image file, or all of a folder, each labeled with its position in the list."""
        paths = [path] if path.is_file() else image_files(path)
        return cls([(file, number) for number, file in enumerate(paths)])

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Sample:
        path, label = self.files[index]
        return decode(path, mode=self.mode), label


class TarSplit:
    """A split read from tar files by image index. Holds the position and label of each image."""

    def __init__(self, tars: list[Path], members: list[Member], classes: list[str]) -> None:
        numbers = {name: number for number, name in enumerate(classes)}
        self.tars = tars
        self.tar, self.offset, self.size = np.array([position for *position, _ in members]).T
        try:
            self.labels = np.array([numbers[label] for *_, label in members])
        except KeyError as error:
            raise ValueError(
                f"data.root={tars[0].parent}: the class {error} is in val or test, but not in "
                "train; add it to train"
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
    """Return the train, val and test splits of a listing as Files; None for a missing split."""
    splits = {name: Files(files) for name, files in listing.items()}
    return splits.get("train"), splits.get("val"), splits.get("test")

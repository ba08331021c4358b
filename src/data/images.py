"""From the bytes of an image file to a tensor."""

from __future__ import annotations

import io
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor
from torchvision.io import decode_jpeg

JPEG = b"\xff\xd8\xff"


class UnreadableImageError(ValueError):
    """A sample that cannot be read. A dataset of your own may raise it too: `data.on_error=skip` leaves only these out."""


def decode(encoded: bytes, name: str, mode: str = "RGB") -> Tensor:
    """The image as uint8 [3, H, W], or [1, H, W] with mode L, upright as its EXIF says.

    Transparency is ignored, as torchvision's ImageFolder does. What is no image, or only a part of one, raises
    UnreadableImageError with its `name`.
    """
    if encoded.startswith(JPEG):
        with suppress(RuntimeError):  # damaged, or a kind that only PIL reads
            data = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
            colours: Any = "GRAY" if mode == "L" else mode
            return decode_jpeg(data, mode=colours, apply_exif_orientation=True)  # about twice as fast as PIL
    try:
        with Image.open(io.BytesIO(encoded)) as image:
            return from_pil(image, mode)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        reason = "no kind of image that PIL knows" if "BytesIO" in str(error) else str(error)
        raise UnreadableImageError(f"{name}: not a readable image ({reason}); remove or replace it") from None


def decode_file(path: Path, mode: str = "RGB") -> Tensor:
    """As `decode`; raises UnreadableImageError for a file that cannot be opened, too."""
    try:
        if not path.is_file() and path.exists():  # to read from a pipe may take for ever
            raise UnreadableImageError(f"{path}: not a file; remove it")
        encoded = path.read_bytes()
    except OSError as error:
        raise UnreadableImageError(f"{path}: cannot be read ({error.strerror}); remove or replace it") from None
    return decode(encoded, str(path), mode)


def from_pil(image: Any, mode: str = "RGB") -> Tensor:
    """A PIL image as uint8 [3, H, W], or [1, H, W] for mode L, upright as its EXIF says."""
    array = np.array(_eight_bit(ImageOps.exif_transpose(image)).convert(mode))
    return torch.from_numpy(array).view(*array.shape[:2], -1).permute(2, 0, 1)


def _eight_bit(image: Any) -> Any:
    """Grey images of 16 bits (or of floats in 0..1) scaled to 8; PIL's own conversion clips them to white."""
    if image.mode.startswith("I"):  # I;16, and I for the same in some formats
        return Image.fromarray((np.asarray(image).astype(np.int64).clip(0, 65535) >> 8).astype(np.uint8))
    if image.mode == "F":
        values = np.asarray(image)
        return Image.fromarray((values * (255 if values.max(initial=0) <= 1 else 1)).clip(0, 255).astype(np.uint8))
    return image

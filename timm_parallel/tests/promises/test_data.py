"""Images in all common formats are decoded correctly, and an error names the file."""

from __future__ import annotations

import io
import os
import struct
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from torchvision.transforms.functional import pil_to_tensor

from timm_parallel.data.dataset import image_files
from timm_parallel.data.decode import Files, decode, find_jpeg_decoder, from_pil
from timm_parallel.errors import UnreadableImageError

RED, GREEN, GREY = (250, 10, 10), (10, 250, 10), (128, 128, 128)


def halves(mode: str = "RGB") -> Image.Image:
    """Build an image of 32 × 16 pixels whose left half is red and whose right half is green."""
    image = Image.new("RGB", (32, 16), RED)
    image.paste(GREEN, (16, 0, 32, 16))
    return image.convert(mode)


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    data = io.BytesIO()
    image.save(data, kind, **options)
    return data.getvalue()


# Dictionary from file name to a function that returns the bytes of an image, and the expected color
# of its left side.
GOOD: dict[str, tuple[Callable[[], bytes], tuple[int, int, int]]] = {
    "rgb.jpg": (lambda: encoded(halves(), "JPEG", quality=95), RED),
    "rgb.png": (lambda: encoded(halves(), "PNG"), RED),
    "palette.png": (lambda: encoded(halves("P"), "PNG"), RED),
    "palette_transparent.png": (lambda: encoded(halves("P"), "PNG", transparency=0), RED),
    "alpha.png": (lambda: encoded(halves("RGBA"), "PNG"), RED),
    "grey_alpha.png": (lambda: encoded(Image.new("LA", (32, 16), (128, 40)), "PNG"), GREY),
    "grey.png": (lambda: encoded(Image.new("L", (32, 16), 128), "PNG"), GREY),
    "bits.png": (lambda: encoded(Image.new("1", (32, 16), 1), "PNG"), (255, 255, 255)),
    "cmyk.jpg": (lambda: encoded(halves("CMYK"), "JPEG", quality=95), RED),
    "ycbcr.tif": (lambda: encoded(halves("YCbCr"), "TIFF"), RED),
    "progressive.jpg": (lambda: encoded(halves(), "JPEG", progressive=True, quality=95), RED),
    "png_inside.jpg": (lambda: encoded(halves(), "PNG"), RED),
    "jpeg_inside.png": (lambda: encoded(halves(), "JPEG", quality=95), RED),
    "UPPER.JPEG": (lambda: encoded(halves(), "JPEG", quality=95), RED),
    "naïve 日本語 🙂.png": (lambda: encoded(halves(), "PNG"), RED),
    "webp.webp": (lambda: encoded(halves(), "WEBP", lossless=True), RED),
    "avif.avif": (lambda: encoded(halves(), "AVIF", quality=95), RED),
}
BAD: dict[str, Callable[[], bytes]] = {
    "empty.jpg": lambda: b"",
    "text.jpg": lambda: b"not an image",
    "html.png": lambda: b"<html>404</html>",
    "cut.jpg": lambda: encoded(halves(), "JPEG")[:-40],
    "cut.png": lambda: encoded(halves().resize((300, 300)), "PNG")[:-200],
    "cut_with_exif.png": lambda: with_exif("PNG", b"not TIFF")[:-30],
    "zeros.png": lambda: bytes(2000),
}


@pytest.mark.parametrize("name", GOOD)
def test_decode_returns_expected_rgb_colors_for_each_image_format(
    tmp_path: Path, name: str
) -> None:
    make, color = GOOD[name]
    (tmp_path / name).write_bytes(make())
    image = decode(tmp_path / name)
    assert image.dtype == torch.uint8 and image.shape == (3, 16, 32)
    assert np.allclose(image[:, 8, 3].numpy(), color, atol=12), image[:, 8, 3]
    assert [path.name for path in image_files(tmp_path)] == [name]


# EXIF data that Pillow cannot read, or that it cannot write again after it has turned an image.
ENTRY = b"II*\0\x08\0\0\0\x02\0\x12\x01\x03\0\x01\0\0\0\x06\0\0\0"
BROKEN_EXIF = {
    "text": b"not TIFF",
    "cut": b"MM\0*\0\0\0\x08\0\x09",
    "zero denominator": ENTRY + b"\x1a\x01\x05\0\x01\0\0\0\x26\0\0\0" + bytes(12),
}


def with_exif(kind: str, exif: bytes) -> bytes:
    if kind != "PNG":
        return encoded(halves(), kind, exif=exif, lossless=True)
    data = encoded(halves(), "PNG")
    chunk = b"eXIf" + exif
    checksum = struct.pack(">I", zlib.crc32(chunk))
    return data[:33] + struct.pack(">I", len(exif)) + chunk + checksum + data[33:]


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
@pytest.mark.parametrize("name", BROKEN_EXIF)
def test_image_with_broken_exif_data_is_decoded(kind: str, name: str) -> None:
    image = decode(with_exif(kind, BROKEN_EXIF[name]), "broken_exif")
    # The orientation before the broken entry can be read, so it counts.
    is_turned = BROKEN_EXIF[name].startswith(ENTRY)
    assert image.shape == ((3, 32, 16) if is_turned else (3, 16, 32))
    assert set(image.flatten(1).T.unique(dim=0).flatten().tolist()) == {10, 250}


def deep(values: list[float], kind: str) -> bytes:
    """Encode a row of pixels as a gray image of 16 bits, of 32 bits or of floats."""
    types = {"16": np.uint16, "32": np.int32, "float": np.float32}
    pixels = np.array([values], types[kind])
    return encoded(Image.fromarray(pixels), "PNG" if kind == "16" else "TIFF")


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("kind", "values", "max_value", "expected"),
    [
        ("16", [0, 255, 256, 4095, 65535], None, [0, 0, 1, 15, 255]),
        ("16", [0, 2048, 4095, 60000], 4095, [0, 128, 255, 255]),
        ("16", [0, 100, 255], 255, [0, 100, 255]),
        ("32", [-9, 500, 1000], 1000, [0, 128, 255]),
        ("float", [0, 0.5, 1], None, [0, 127, 255]),
        ("float", [-1, 0.5, 3, 300], None, [0, 0, 3, 255]),
        ("float", [float("nan"), 0.5, float("inf"), -float("inf")], None, [0, 127, 255, 0]),
        ("float", [0.2, 0.5, 1.5, float("inf")], 2, [26, 64, 191, 255]),
        ("float", [-3.4e38, 0.5, 1], None, [0, 127, 255]),
    ],
)
def test_pixels_of_more_than_8_bits_are_scaled_by_max_value(
    kind: str, values: list[float], max_value: float | None, expected: list[int]
) -> None:
    assert decode(deep(values, kind), "deep", "L", max_value).flatten().tolist() == expected


def color_of_16_bits() -> bytes:
    """Build a PNG with 16 bits per color, of which Pillow reads the upper 8."""
    header = b"IHDR" + struct.pack(">IIBBBBB", 2, 1, 16, 2, 0, 0, 0)
    row = b"IDAT" + zlib.compress(b"\0" + bytes(12))
    chunks = (header, row, b"IEND")
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk))
        for chunk in chunks
    )


def test_max_value_changes_only_gray_images_whose_file_does_not_name_white() -> None:
    pgm = b"P5 3 1 1023\n" + np.array([0, 512, 1023], ">u2").tobytes()
    assert decode(pgm, "a.pgm", "L", 1023).flatten().tolist() == [0, 128, 255]
    assert decode(encoded(halves(), "PNG"), "a.png", max_value=100)[:, 8, 3].tolist() == [*RED]
    assert decode(color_of_16_bits(), "a.png").shape == (3, 1, 2)
    with pytest.raises(UnreadableImageError, match=r"a\.png.*data\.max_value"):
        decode(color_of_16_bits(), "a.png", max_value=4095)


@pytest.mark.parametrize(
    ("data", "shown"),
    [
        (deep([7, 900, 4000], "16"), ["7 to 4000", "0 to 65535", "data.max_value"]),
        (deep([-1, 0.25, float("inf")], "float"), ["-1 to 0.25", "0 to 1", "0 to 255"]),
        (color_of_16_bits(), ["16 bits", "upper 8"]),
        (deep([float("nan"), float("-inf")], "float"), None),
        (encoded(halves(), "PNG"), None),
        (b"damaged", None),
    ],
)
def test_notes_state_the_range_of_pixels_of_more_than_8_bits(
    tmp_path: Path, data: bytes, shown: list[str] | None
) -> None:
    (tmp_path / "a.tif").write_bytes(data)
    notes = Files([(tmp_path / "a.tif", 0)] * 40).pixel_notes()
    assert len(notes) == (shown is not None)
    assert all(text in notes[0] for text in shown or ())


def scanned(kind: str) -> bytes:
    """Build a JPEG with fine detail, like a photograph. `kind` selects a variant that a decoder may
    treat separately: progressive, gray, CMYK, or one of the EXIF rotations.
    """
    draw = np.random.default_rng(0)
    pixels = draw.integers(0, 256, (12, 17, 3), dtype=np.uint8)
    image = Image.fromarray(pixels).resize((101, 67), Image.Resampling.BICUBIC)
    exif = Image.Exif()
    if kind.startswith("exif"):
        exif[0x0112] = int(kind.removeprefix("exif_"))
    options = {"quality": 90, "subsampling": 2, "progressive": kind == "progressive", "exif": exif}
    modes = {"gray": "L", "cmyk": "CMYK"}
    return encoded(image.convert(modes.get(kind, "RGB")), "JPEG", **options)


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize(
    "kind",
    ["baseline", "progressive", "gray", "cmyk", *(f"exif_{number}" for number in range(2, 9))],
)
def test_both_jpeg_decoders_return_the_pixels_that_pil_turns_as_exif_says(
    kind: str, mode: str
) -> None:
    """The metrics of a run must not depend on the decoder. For grayscale output, both decoders
    return the luma channel of the JPEG.
    """
    data = scanned(kind)
    with Image.open(io.BytesIO(data)) as opened:
        opened.draft(mode, opened.size)
        expected = pil_to_tensor(ImageOps.exif_transpose(opened).convert(mode)).int()
        for actual in (decode(data, kind, mode), from_pil(opened, mode)):
            # The decoders round differently when they convert CMYK to RGB.
            assert (actual.int() - expected).abs().max() <= (2 if kind == "cmyk" else 0)


def test_jpeg_is_decoded_by_pil_when_torchcodec_cannot_be_loaded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The torchcodec package needs CUDA libraries, which are missing in an installation of torch
    for CPUs.
    """
    data = scanned("exif_6")
    expected = decode(data, "exif_6")
    monkeypatch.setitem(sys.modules, "torchcodec.decoders", None)
    find_jpeg_decoder.cache_clear()
    try:
        assert torch.equal(decode(data, "exif_6"), expected)
        assert torch.equal(decode(data, "exif_6"), expected)
    finally:
        find_jpeg_decoder.cache_clear()
    assert sum("torchcodec" in line for line in caplog.messages) == 1


@pytest.mark.parametrize("name", BAD)
def test_decode_error_names_a_file_that_is_empty_truncated_or_not_an_image(
    tmp_path: Path, name: str
) -> None:
    (tmp_path / name).write_bytes(BAD[name]())
    with pytest.raises(UnreadableImageError, match=name) as refusal:
        decode(tmp_path / name)
    assert str(tmp_path / name) in str(refusal.value)


@pytest.mark.timeout(20)
def test_decode_refuses_a_named_pipe_with_an_image_suffix(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    with pytest.raises(UnreadableImageError, match=r"pipe\.png"):
        decode(tmp_path / "pipe.png")


@pytest.mark.parametrize("name", ["grey.png", "rgb.png"])
def test_decode_to_one_channel_keeps_exact_gray_values(tmp_path: Path, name: str) -> None:
    """A conversion of gray to RGB and back would change the value 128 to 127."""
    (tmp_path / name).write_bytes(GOOD[name][0]())
    with Image.open(tmp_path / name) as opened:
        expected = 128 if name != "rgb.png" else np.asarray(opened.convert("L"))[8, 3]
    assert decode(tmp_path / name, mode="L")[:, 8, 3].tolist() == [expected]


def test_image_folder_follows_symlinks_and_decode_error_names_a_broken_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "a.png").write_bytes(GOOD["rgb.png"][0]())
    (tmp_path / "class").mkdir()
    (tmp_path / "class" / "link.png").symlink_to(tmp_path / "real" / "a.png")
    (tmp_path / "class" / "folder").symlink_to(tmp_path / "real")
    (tmp_path / "class" / "upwards").symlink_to(tmp_path / "class")
    (tmp_path / "class" / "broken.png").symlink_to(tmp_path / "gone.png")
    assert [path.name for path in image_files(tmp_path / "class")] == [
        "broken.png",
        "link.png",
        "a.png",
    ]
    assert decode(tmp_path / "class" / "link.png").shape == (3, 16, 32)
    with pytest.raises(UnreadableImageError, match=r"broken\.png"):
        decode(tmp_path / "class" / "broken.png")

"""Tests that images in all common formats are decoded correctly, and that a decoding error names
the file.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from timm_parallel.data.dataset import image_files
from timm_parallel.data.decode import decode, find_jpeg_decoder, from_pil
from timm_parallel.data.folder import class_folders
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


def turned() -> bytes:
    """Build an image with an EXIF rotation tag. If a program applies the tag, the image is red
    above green.
    """
    exif = Image.Exif()
    exif[0x0112] = 6
    return encoded(
        halves().transpose(Image.Transpose.FLIP_LEFT_RIGHT).rotate(180),
        "JPEG",
        exif=exif,
        quality=95,
    )


def wide_grey(kind: str) -> bytes:
    return encoded(Image.fromarray(np.full((16, 32), 128 << 8, dtype=np.uint16)), kind)


def floats() -> bytes:
    return encoded(Image.fromarray(np.full((16, 32), 0.5, dtype=np.float32)), "TIFF")


# Dictionary from file name to a function that returns the bytes of an image, and the expected color
# of its left side.
GOOD: dict[str, tuple[Callable[[], bytes], tuple[int, int, int]]] = {
    "rgb.jpg": (lambda: encoded(halves(), "JPEG", quality=95), RED),
    "rgb.png": (lambda: encoded(halves(), "PNG"), RED),
    "palette.png": (lambda: encoded(halves("P"), "PNG"), RED),
    "palette_transparent.png": (lambda: encoded(halves("P"), "PNG", transparency=0), RED),
    "palette.gif": (lambda: encoded(halves(), "GIF"), RED),
    "alpha.png": (lambda: encoded(halves("RGBA"), "PNG"), RED),
    "grey_alpha.png": (lambda: encoded(Image.new("LA", (32, 16), (128, 40)), "PNG"), GREY),
    "grey.png": (lambda: encoded(Image.new("L", (32, 16), 128), "PNG"), GREY),
    "grey.jpg": (lambda: encoded(Image.new("L", (32, 16), 128), "JPEG"), GREY),
    "bits.png": (lambda: encoded(Image.new("1", (32, 16), 1), "PNG"), (255, 255, 255)),
    "sixteen.png": (lambda: wide_grey("PNG"), GREY),
    "sixteen.tiff": (lambda: wide_grey("TIFF"), GREY),
    "floats.tif": (floats, (127, 127, 127)),
    "cmyk.jpg": (lambda: encoded(halves("CMYK"), "JPEG", quality=95), RED),
    "cmyk.tiff": (lambda: encoded(halves("CMYK"), "TIFF"), RED),
    "ycbcr.tiff": (lambda: encoded(halves("YCbCr"), "TIFF"), RED),
    "progressive.jpg": (lambda: encoded(halves(), "JPEG", progressive=True, quality=95), RED),
    "png_inside.jpg": (lambda: encoded(halves(), "PNG"), RED),
    "jpeg_inside.png": (lambda: encoded(halves(), "JPEG", quality=95), RED),
    "UPPER.JPEG": (lambda: encoded(halves(), "JPEG", quality=95), RED),
    "naïve 日本語 🙂.png": (lambda: encoded(halves(), "PNG"), RED),
    "webp.webp": (lambda: encoded(halves(), "WEBP", lossless=True), RED),
}
BAD: dict[str, Callable[[], bytes]] = {
    "empty.jpg": lambda: b"",
    "empty.png": lambda: b"",
    "text.jpg": lambda: b"not an image",
    "html.png": lambda: b"<html>404</html>",
    "cut.jpg": lambda: encoded(halves(), "JPEG")[:-40],
    "cut.png": lambda: encoded(halves().resize((300, 300)), "PNG")[:-200],
    "cut_at_half.jpg": lambda: (lambda data: data[: len(data) // 2])(encoded(halves(), "JPEG")),
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


@pytest.mark.parametrize("name", ["turned.jpg", "turned_named_wrongly.png"])
def test_decode_rotates_an_image_according_to_the_exif_tag(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(turned())
    image = decode(tmp_path / name)
    assert image.shape == (3, 32, 16)
    with Image.open(tmp_path / name) as opened:
        from PIL import ImageOps

        expected = np.asarray(ImageOps.exif_transpose(opened).convert("RGB")).astype(int)
    assert np.abs(image.permute(1, 2, 0).numpy().astype(int) - expected).mean() < 4


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
    "kind", ["baseline", "progressive", "gray", *(f"exif_{number}" for number in range(1, 9))]
)
def test_jpeg_decoder_returns_the_same_pixels_as_pil(kind: str, mode: str) -> None:
    """The metrics of a run must not depend on the decoder. For grayscale output, both decoders
    return the luma channel of the JPEG.
    """
    data = scanned(kind)
    with Image.open(io.BytesIO(data)) as opened:
        opened.draft(mode, opened.size)
        expected = from_pil(opened, mode)
    assert torch.equal(decode(data, kind, mode), expected)


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


def test_pixel_values_of_a_decoded_cmyk_jpeg_differ_from_pil_by_at_most_2() -> None:
    """PIL and the JPEG decoder round pixel values differently when they convert CMYK to RGB."""
    data = scanned("cmyk")
    with Image.open(io.BytesIO(data)) as opened:
        difference = decode(data, "cmyk").int() - from_pil(opened).int()
    assert difference.abs().max() <= 2


def test_jpeg_with_zeroed_bytes_is_decoded_to_full_size_without_an_error() -> None:
    """libjpeg reports zeros in the compressed data only as a warning. PIL also accepts
    such a file.
    """
    data = bytearray(scanned("baseline"))
    middle = len(data) // 2
    data[middle : middle + 50] = bytes(50)
    assert decode(bytes(data), "zeros.jpg").shape == (3, 67, 101)


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


@pytest.mark.parametrize("name", ["grey.png", "grey.jpg", "rgb.png", "sixteen.png"])
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


def test_image_folder_ignores_hidden_folders_and_files_that_are_not_images(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    (tmp_path / "café").mkdir()
    for name in (".DS_Store", "Thumbs.db", "labels.csv", "._a.png", "README", "a.png"):
        (tmp_path / "café" / name).write_bytes(GOOD["rgb.png"][0]())
    assert class_folders(tmp_path) == ["café"]
    assert [path.name for path in image_files(tmp_path / "café")] == ["a.png"]


def test_class_names_of_2000_class_folders_are_sorted(tmp_path: Path) -> None:
    names = [f"class {number}" for number in range(2000)]
    for name in names:
        (tmp_path / name).mkdir()
    assert class_folders(tmp_path) == sorted(names)

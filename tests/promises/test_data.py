"""Images as people have them are read right or refused by name; unreadable ones are skipped and counted the same everywhere."""

from __future__ import annotations

import io
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Train, in_ranks, resolved
from PIL import Image

from src.data.folders import class_names, image_files
from src.data.images import UnreadableImageError
from src.data.images import decode_file as decode
from src.data.loader import Reader
from src.data.sampling import Request
from src.engine.machine.ranks import Ranks
from src.engine.record.result import read_metrics, read_result
from src.run.lifecycle import Training

RED, GREEN, GREY = (250, 10, 10), (10, 250, 10), (128, 128, 128)


def halves(mode: str = "RGB") -> Image.Image:
    """32 wide, 16 high: red on the left, green on the right."""
    image = Image.new("RGB", (32, 16), RED)
    image.paste(GREEN, (16, 0, 32, 16))
    return image.convert(mode)


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    data = io.BytesIO()
    image.save(data, kind, **options)
    return data.getvalue()


def turned() -> bytes:
    """Stored lying on its side, with the EXIF tag that says so: upright it is red above green."""
    exif = Image.Exif()
    exif[0x0112] = 6
    return encoded(halves().transpose(Image.Transpose.FLIP_LEFT_RIGHT).rotate(180), "JPEG", exif=exif, quality=95)


def wide_grey(kind: str) -> bytes:
    return encoded(Image.fromarray(np.full((16, 32), 128 << 8, dtype=np.uint16)), kind)


def floats() -> bytes:
    return encoded(Image.fromarray(np.full((16, 32), 0.5, dtype=np.float32)), "TIFF")


GOOD: dict[str, tuple[Callable[[], bytes], tuple[int, int, int]]] = {  # name -> bytes, colour of its left side
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
def test_it_is_read_as_it_looks(tmp_path: Path, name: str) -> None:
    make, colour = GOOD[name]
    (tmp_path / name).write_bytes(make())
    image = decode(tmp_path / name)
    assert image.dtype == torch.uint8 and image.shape == (3, 16, 32)
    assert np.allclose(image[:, 8, 3].numpy(), colour, atol=12), image[:, 8, 3]
    assert [path.name for path in image_files(tmp_path)] == [name]


@pytest.mark.parametrize("name", ["turned.jpg", "turned_named_wrongly.png"])
def test_it_stands_upright_whoever_decodes_it(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(turned())
    image = decode(tmp_path / name)
    assert image.shape == (3, 32, 16)
    with Image.open(tmp_path / name) as opened:
        from PIL import ImageOps

        expected = np.asarray(ImageOps.exif_transpose(opened).convert("RGB")).astype(int)
    assert np.abs(image.permute(1, 2, 0).numpy().astype(int) - expected).mean() < 4


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_image_is_refused_by_name(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(BAD[name]())
    with pytest.raises(UnreadableImageError, match="not a readable image") as refusal:
        decode(tmp_path / name)
    assert str(tmp_path / name) in str(refusal.value)


@pytest.mark.timeout(20)
def test_a_pipe_named_as_an_image_hangs_nobody(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    with pytest.raises(UnreadableImageError, match=r"pipe\.png: not a file"):
        decode(tmp_path / "pipe.png")


@pytest.mark.parametrize("name", ["grey.png", "grey.jpg", "rgb.png", "sixteen.png"])
def test_grey_stays_what_it_is_for_a_model_of_one_channel(tmp_path: Path, name: str) -> None:
    """Through RGB and back, 128 would be 127."""
    (tmp_path / name).write_bytes(GOOD[name][0]())
    with Image.open(tmp_path / name) as opened:
        expected = 128 if name != "rgb.png" else np.asarray(opened.convert("L"))[8, 3]
    assert decode(tmp_path / name, "L")[:, 8, 3].tolist() == [expected]


def test_links_are_followed_and_broken_ones_named(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "a.png").write_bytes(GOOD["rgb.png"][0]())
    (tmp_path / "class").mkdir()
    (tmp_path / "class" / "link.png").symlink_to(tmp_path / "real" / "a.png")
    (tmp_path / "class" / "folder").symlink_to(tmp_path / "real")
    (tmp_path / "class" / "upwards").symlink_to(tmp_path / "class")
    (tmp_path / "class" / "broken.png").symlink_to(tmp_path / "gone.png")
    assert [path.name for path in image_files(tmp_path / "class")] == ["broken.png", "link.png", "a.png"]
    assert decode(tmp_path / "class" / "link.png").shape == (3, 16, 32)
    with pytest.raises(UnreadableImageError, match=r"broken\.png"):
        decode(tmp_path / "class" / "broken.png")


def test_what_lies_about_in_image_folders_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    (tmp_path / "café").mkdir()
    for name in (".DS_Store", "Thumbs.db", "labels.csv", "._a.png", "README", "a.png"):
        (tmp_path / "café" / name).write_bytes(GOOD["rgb.png"][0]())
    assert class_names(tmp_path) == ["café"]
    assert [path.name for path in image_files(tmp_path / "café")] == ["a.png"]


def test_thousands_of_classes_keep_their_order(tmp_path: Path) -> None:
    names = [f"class {number}" for number in range(2000)]
    for name in names:
        (tmp_path / name).mkdir()
    assert class_names(tmp_path) == sorted(names)


def image_folder(root: Path, damaged: bool) -> tuple[Path, Path]:
    """24 training and 10 validation images of two classes; damaged: four and two of them. Returns (root, a damaged file)."""
    draw = np.random.default_rng(0)
    for split, count in (("train", 12), ("val", 5)):
        for label, name in enumerate(("cat", "dog")):
            (root / split / name).mkdir(parents=True)
            for number in range(count):
                pixels = draw.integers(0, 90, (16, 16, 3), dtype=np.uint8)
                pixels[..., label] += 120
                path = root / split / name / f"{number:02}.{'png' if number % 2 else 'jpg'}"
                Image.fromarray(pixels).save(path)
                if damaged and number in ((3, 4) if split == "train" else (4,)):
                    path.write_bytes(path.read_bytes()[:80])
    return root, root / "train" / "cat" / "03.png"


SETTINGS = (
    "data=folder",
    "model=tiny",
    "print_config=false",
    "data.image_size=16",
    "data.batch_size=8",
    "train.epochs=2",
    "train.log_every=1",
    "optim=sgd",
    "optim.lr=0.01",
    "optim.warmup_epochs=0",
    "parallel.accelerator=cpu",
    "parallel.threads_per_device=1",
    "data.on_error=skip",
)


def train(ranks: Ranks, store: Any, root: str, folder: str, overrides: tuple[str, ...]) -> None:
    torch.set_num_threads(1)
    multiprocessing.set_start_method("fork", force=True)  # as in a rank, for its loader workers
    run = Training(resolved(*SETTINGS, f"data.root={root}", *overrides), Path(folder), ranks, store)
    run.train()
    run.close()


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(120)
def test_skipped_images_are_counted_the_same_under_every_strategy(tmp_path: Path) -> None:
    root, _ = image_folder(tmp_path / "images", damaged=True)
    spreads = {
        "single": ("parallel=single", "data.workers=0"),
        "single_workers": ("parallel=single", "data.workers=2"),
        "dp": ("parallel=dp", "parallel.devices=2", "data.workers=0"),
        "ddp": ("parallel=ddp", "parallel.devices=2", "data.workers=0"),
        "ddp_workers": ("parallel=ddp", "parallel.devices=2", "data.workers=2"),
    }
    seen = {}
    for name, words in spreads.items():
        (tmp_path / name).mkdir()
        in_ranks(train, 2 if name.startswith("ddp") else 1, str(root), str(tmp_path / name), words)
        result = read_result(tmp_path / name)
        losses = [
            line["train/loss"] for line in read_metrics(tmp_path / name / "metrics.jsonl") if "train/loss" in line
        ]
        seen[name] = losses
        assert result.skipped == {"train": 4, "val": 2}, name
        assert result.val["samples"] == 8, name
        assert result.samples_seen == 48
    for name, losses in seen.items():
        assert np.allclose(losses, seen["single"], atol=1e-5), name


def test_a_substitute_is_the_next_readable_one_with_its_own_label(tmp_path: Path) -> None:
    class Split:
        def __len__(self) -> int:
            return 6

        def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
            if index in (1, 4, 5):
                raise UnreadableImageError(f"{index}")
            return torch.full((1, 2, 2), index, dtype=torch.uint8), 10 * index

    training, evaluation = (Reader(Split(), 99, None, 0, "skip", substitutes) for substitutes in (6, 0))
    _, labels, unreadable = training.read(Request(0, np.arange(6)))
    assert labels.tolist() == [0, 20, 20, 30, 0, 0]
    assert sorted(set(unreadable)) == [1, 4, 5]
    images, labels, unreadable = evaluation.read(Request(0, np.arange(6)))
    assert labels.tolist() == [0, 20, 30] and len(images) == 3
    assert unreadable == [1, 4, 5]
    _, labels, unreadable = evaluation.read(Request(0, np.array([4, 5])))
    assert len(labels) == 0 and unreadable == [4, 5]


def test_a_folder_of_nothing_but_damage_is_not_skipped_through() -> None:
    class Split:
        def __len__(self) -> int:
            return 1000

        def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
            raise UnreadableImageError("damaged")

    with pytest.raises(ValueError, match=r"data\.on_error=skip: 100 unreadable images in a row"):
        Reader(Split(), 99, None, 0, "skip", 1000).read(Request(0, np.array([7])))


def test_a_mistake_in_the_code_is_never_skipped() -> None:
    class Split:
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
            raise ValueError("a mistake")

    with pytest.raises(ValueError, match="a mistake"):
        Reader(Split(), 99, None, 0, "skip", 3).read(Request(0, np.array([0])))


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 2])
def test_by_default_the_run_ends_with_the_name_of_the_file(train: Train, workers: int) -> None:
    root, _ = image_folder(train.base / "images", damaged=True)
    words = (
        "parallel=ddp",
        "parallel.devices=2",
        f"data.workers={workers}",
        "data.on_error=raise",
        f"data.root={root}",
    )
    done = train("data=folder", "data.image_size=16", "data.batch_size=8", "data.limit_train=null", *words)
    assert done.returncode == 1, done.output
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 2, done.stderr
    assert lines[0].startswith("Failed: rank") and "not a readable image" in lines[0] and f"{root}{os.sep}" in lines[0]
    assert train.left_after(2) == []

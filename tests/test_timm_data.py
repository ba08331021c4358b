"""`data=timm`: data by timm's names, found here or refused with what to do. Nothing is fetched in these tests."""

from __future__ import annotations

import gzip
import io
import struct
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import resolved
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from src.data import tars
from src.data.datasets import build_images
from src.data.folders import check_data
from src.data.loader import Reader
from src.data.sampling import Request, TrainRequests
from src.schema import Config

CLASSES = ("cat", "dog")


def png(value: int) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (12, 10), (value, 0, 0)).save(stream, "PNG")
    return stream.getvalue()


def write_tar(path: Path, members: dict[str, bytes]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for name, contents in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(contents)
            archive.addfile(entry, io.BytesIO(contents))


def folders(count: int, start: int = 0) -> dict[str, bytes]:
    return {f"{CLASSES[n % 2]}/{n}.png": png(n) for n in range(start, start + count)}


def pairs(count: int, start: int = 0) -> dict[str, bytes]:
    found = {}
    for n in range(start, start + count):
        found |= {f"{n:06d}.png": png(n), f"{n:06d}.cls": str(n % 2).encode(), f"{n:06d}.json": b"{}"}
    return found


def config_of(name: str, root: Path, *words: str) -> Config:
    return resolved("data=timm", f"data.name={name}", f"data.root={root}", "data.batch_size=4", *words)


def values_and_labels(split: Any) -> list[tuple[int, int]]:
    """(red of the image, label) of every sample; in these data the label is the red, modulo 2."""
    return [(int(image[0, 0, 0]), label) for image, label in (split[n] for n in range(len(split)))]


@pytest.mark.parametrize(
    ("train", "val"),
    [
        ({"train.tar": 6}, {"val.tar": 3}),
        ({"train/a.tar": 4, "train/b.tar": 2}, {"validation/a.tar": 3}),
        ({"x-train-00.tar": 2, "x-train-01.tar": 4}, {"x-valid-00.tar": 3}),
    ],
)
@pytest.mark.parametrize("name", ["tar", "wds"])
def test_tars_are_read_in_place_by_number(
    tmp_path: Path, name: str, train: dict[str, int], val: dict[str, int]
) -> None:
    members = folders if name == "tar" else pairs
    for layout in (train, val):
        start = 0
        for file, count in layout.items():
            write_tar(tmp_path / file, members(count, start))
            start += count
    images = build_images(config_of(name, tmp_path).data)
    assert images.class_names == (list(CLASSES) if name == "tar" else ["0", "1"])
    assert values_and_labels(images.train) == [(n, n % 2) for n in range(6)]
    assert values_and_labels(images.val) == [(n, n % 2) for n in range(3)]


def test_a_pattern_names_its_tars(tmp_path: Path) -> None:
    for number in range(9, 12):
        write_tar(tmp_path / f"shard-{number:04d}.tar", pairs(2, 2 * number))
    write_tar(tmp_path / "val.tar", pairs(2))
    config = config_of("wds", tmp_path, "+data.kwargs.train_split='shard-{0009..0011}.tar'")
    assert [value for value, _ in values_and_labels(build_images(config.data).train)] == list(range(18, 24))
    (tmp_path / "shard-0010.tar").unlink()
    with pytest.raises(ValueError, match=r"shard-0010\.tar of .* is not there"):
        build_images(config.data)


@given(first=st.integers(0, 99), more=st.integers(0, 30))
@settings(max_examples=30, deadline=None)
def test_braces_expand_as_in_a_shell(first: int, more: int) -> None:
    found = tars._expand_braces(f"a-{{{first:03d}..{first + more:03d}}}.tar")
    assert found == [f"a-{n:03d}.tar" for n in range(first, first + more + 1)]


@pytest.mark.parametrize(
    ("name", "members", "classes"),
    [
        ("tar", {"002/a.png": png(0), "010/a.png": png(1)}, ["002", "010"]),
        ("tar", {"cat/a.png": png(0), "cat/._a.png": b"", "./dog/a.png": png(1)}, ["cat", "dog"]),
        ("wds", {"./a.png": png(0), "./a.cls": b"0", "./b.png": png(1), "./b.cls": b"01"}, ["0", "1"]),
        ("wds", {"v1.0/a.png": png(0), "v1.0/a.cls": b"0", "v1.0/b.png": png(1), "v1.0/b.cls": b"1"}, ["0", "1"]),
        ("wds", {"a.png": png(0), "a.cls": b"0", "._a.png": b"", "b.x.png": png(1), "b.cls": b"1"}, ["0", "1"]),
    ],
    ids=["numbers as names", "hidden files", "tar of .", "dots in folders", "two dots"],
)
def test_names_in_tars_are_as_people_make_them(
    tmp_path: Path, name: str, members: dict[str, bytes], classes: list[str]
) -> None:
    for split in ("train", "val"):
        write_tar(tmp_path / f"{split}.tar", members)
    images = build_images(config_of(name, tmp_path).data)
    assert images.class_names == classes
    assert values_and_labels(images.train) == [(0, 0), (1, 1)]


def compressed(root: Path) -> None:
    write_tar(root / "plain.tar", folders(2))
    (root / "train.tar").write_bytes(gzip.compress((root / "plain.tar").read_bytes()))


def cut_off(root: Path) -> None:
    write_tar(root / "train.tar", folders(4))
    whole = (root / "train.tar").read_bytes()
    (root / "train.tar").write_bytes(whole[:700])


@pytest.mark.parametrize(
    ("name", "prepare", "said"),
    [
        ("tar", lambda root: None, r"no tar of the split train; expected .*train\.tar"),
        ("tar", compressed, "not readable as an uncompressed tar"),
        ("tar", lambda root: (root / "train.tar").write_bytes(b"x" * 3000), "not readable as an uncompressed tar"),
        ("tar", cut_off, "not readable as an uncompressed tar|no images"),
        ("tar", lambda root: write_tar(root / "train.tar", {"readme.txt": b"hello"}), "no images in it"),
        ("wds", lambda root: write_tar(root / "train.tar", folders(2)), "has no label"),
        ("wds", lambda root: write_tar(root / "train.tar", {"a.png": png(0), "a.cls": b"cat"}), "must hold a number"),
    ],
    ids=["none", "compressed", "rubbish", "cut off", "no images", "no labels", "label no number"],
)
def test_tars_that_cannot_be_used_are_refused(tmp_path: Path, name: str, prepare: Any, said: str) -> None:
    prepare(tmp_path)
    write_tar(tmp_path / "val.tar", folders(2) if name == "tar" else pairs(2))
    with pytest.raises(ValueError, match=said) as refusal:
        build_images(config_of(name, tmp_path).data)
    assert str(tmp_path) in str(refusal.value) and "\n" not in str(refusal.value)


@pytest.mark.parametrize("names", [("carnival-train", "carnival-test"), ("constrained-train", "constrained-val")])
def test_a_tar_is_not_trained_and_evaluated_on_because_a_word_is_in_its_name(
    tmp_path: Path, names: tuple[str, str]
) -> None:
    """`val` is in carnival, and `train` in constrained."""
    for name in names:
        write_tar(tmp_path / f"{name}.tar", folders(2))
    with pytest.raises(
        ValueError, match=r"\.tar is of the splits train and validation; name their tars in data\.kwargs"
    ):
        build_images(config_of("tar", tmp_path).data)
    words = [f"+data.kwargs.{part}_split='{name}'" for part, name in zip(("train", "val"), names, strict=True)]
    images = build_images(config_of("tar", tmp_path, *words).data)
    assert len(images.train) == len(images.val) == 2


def test_a_class_that_training_does_not_know_is_refused(tmp_path: Path) -> None:
    write_tar(tmp_path / "train.tar", {"cat/1.png": png(0), "dog/1.png": png(1)})
    write_tar(tmp_path / "val.tar", {"cow/1.png": png(0)})
    with pytest.raises(ValueError, match="the class 'cow' is in a split, but not in train"):
        build_images(config_of("tar", tmp_path).data)


def write_mnist(root: Path, count: int) -> None:
    """The raw files as torchvision unpacks them, of which it asks only that they are there."""
    raw = root / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for part in ("train", "t10k"):
        pixels = np.arange(count, dtype=np.uint8).repeat(28 * 28)
        (raw / f"{part}-images-idx3-ubyte").write_bytes(struct.pack(">IIII", 2051, count, 28, 28) + pixels.tobytes())
        labels = (np.arange(count) % 10).astype(np.uint8)
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 2049, count) + labels.tobytes())


def test_a_dataset_of_torchvision_that_is_here_is_read(tmp_path: Path) -> None:
    write_mnist(tmp_path, 24)
    images = build_images(config_of("torch/mnist", tmp_path).data)
    assert (images.in_chans, len(images.class_names), len(images.train)) == (1, 10, 24)
    image, label = images.train[7]
    assert (image.shape, image.dtype, int(image[0, 3, 3]), label) == ((1, 28, 28), torch.uint8, 7, 7)


@pytest.mark.parametrize("name", ["torch/cifar10", "torch/mnist", "torch/fashion_mnist"])
def test_one_that_is_not_here_says_how_to_get_it(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=r"is not in .*; data\.kwargs\.download=true fetches it") as refusal:
        build_images(config_of(name, tmp_path).data)
    assert str(refusal.value).startswith(f"data.name={name}: ") and "\n" not in str(refusal.value)


def test_a_package_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"data\.name=hfds/ylecun/mnist: needs a package: pip install datasets"):
        build_images(config_of("hfds/ylecun/mnist", tmp_path).data)


@pytest.mark.parametrize("label", [2, -1])
def test_a_label_outside_the_head_is_refused(label: int) -> None:
    class Split:
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
            return torch.zeros(3, 4, 4, dtype=torch.uint8), label if index == 1 else 0

    with pytest.raises(ValueError, match=rf"labels from .*{label}.*, but 2 classes"):
        Reader(Split(), 2, None, 0).read(Request(0, np.arange(3)))


@given(
    num_images=st.integers(6, 60),
    copies=st.integers(1, 4),
    world_size=st.integers(1, 3),
    batch=st.integers(1, 2),
    seed=st.integers(0, 99),
)
@settings(max_examples=60, deadline=None)
def test_repeated_augmentation_shows_copies_of_an_image_in_one_global_batch(
    num_images: int, copies: int, world_size: int, batch: int, seed: int
) -> None:
    """An epoch has as many samples as ever, of fewer images; each copy is a sample of its own."""
    global_batch = batch * world_size * copies
    if num_images < global_batch:
        return
    shards = [TrainRequests(num_images, global_batch, rank, world_size, seed, copies) for rank in range(world_size)]
    own = [shard.shard().split(global_batch // world_size) for shard in shards]
    assert all(len(batches) == num_images // global_batch for batches in own)
    for step in zip(*own, strict=True):
        indices = torch.cat(step).tolist()
        assert len(set(indices)) == global_batch
        images = [index % num_images for index in indices]
        assert all(images.count(image) == copies for image in images)
    assert sorted(shards[0].global_batches(0, 1)) == sorted(index % num_images for b in own for index in b[0].tolist())


def test_config_check_finds_the_folder_before_torch_is_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such folder"):
        check_data(config_of("tar", tmp_path / "nowhere").data)

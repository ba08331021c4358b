"""Tar files as datasets (`data.name=tar` and `data.name=wds`)."""

from __future__ import annotations

import gzip
import io
import shutil
import tarfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from test_timm_data import CLASSES, config_of, png, values_and_labels

from src.schema import TrainConfig
from tests.template.runs import resolved, task_of
from timm_parallel.data.build import build_dataset
from timm_parallel.data.dataset import train_labels
from timm_parallel.data.samplers import class_balance


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
    members: dict[str, bytes] = {}
    for n in range(start, start + count):
        members |= {
            f"{n:06d}.png": png(n),
            f"{n:06d}.cls": str(n % 2).encode(),
            f"{n:06d}.json": b"{}",
        }
    return members


@pytest.mark.parametrize(
    ("train", "val"),
    [
        ({"train.tar": 6}, {"val.tar": 3}),
        ({"train/a.tar": 4, "train/b.tar": 2}, {"validation/a.tar": 3}),
        ({"x-train-00.tar": 2, "x-train-01.tar": 4}, {"x-valid-00.tar": 3}),
    ],
)
@pytest.mark.parametrize("name", ["tar", "wds"])
def test_tar_and_webdataset_samples_are_read_with_labels_from_several_file_layouts(
    tmp_path: Path, name: str, train: dict[str, int], val: dict[str, int]
) -> None:
    members = folders if name == "tar" else pairs
    for layout in (train, val):
        start = 0
        for file, count in layout.items():
            write_tar(tmp_path / file, members(count, start))
            start += count
    images = build_dataset(config_of(name, tmp_path).data)
    assert images.target_names == (list(CLASSES) if name == "tar" else ["0", "1"])
    assert values_and_labels(images.train) == [(n, n % 2) for n in range(6)]
    assert values_and_labels(images.val) == [(n, n % 2) for n in range(3)]


def test_class_weights_and_data_balance_use_the_labels_in_tar_files(tmp_path: Path) -> None:
    write_tar(tmp_path / "train.tar", folders(5))
    write_tar(tmp_path / "val.tar", folders(2))
    labels = train_labels(build_dataset(config_of("tar", tmp_path).data).train, None)
    assert labels is not None
    weights = task_of(2, TrainConfig(class_weights="auto")).class_weights(labels)["class_weight"]
    assert weights.tolist() == pytest.approx([5 / 6, 5 / 4])
    assert class_balance(labels, 1.0).tolist() == pytest.approx([1 / 3, 1 / 2, 1 / 3, 1 / 2, 1 / 3])


def test_train_split_pattern_selects_tar_files_and_an_error_names_a_missing_file(
    tmp_path: Path,
) -> None:
    for number in range(9, 12):
        write_tar(tmp_path / f"shard-{number:04d}.tar", pairs(2, 2 * number))
    write_tar(tmp_path / "val.tar", pairs(2))
    config = config_of("wds", tmp_path, "+data.kwargs.train_split='shard-{0009..0011}.tar'")
    assert [value for value, _ in values_and_labels(build_dataset(config.data).train)] == list(
        range(18, 24)
    )
    (tmp_path / "shard-0010.tar").unlink()
    with pytest.raises(ValueError, match=r"no tar file shard-0010\.tar"):
        build_dataset(config.data)


@pytest.mark.parametrize(
    ("name", "members", "classes"),
    [
        ("tar", {"002/a.png": png(0), "010/a.png": png(1)}, ["002", "010"]),
        ("tar", {"cat/a.png": png(0), "cat/._a.png": b"", "./dog/a.png": png(1)}, ["cat", "dog"]),
        (
            "wds",
            {"./a.png": png(0), "./a.cls": b"0", "./b.png": png(1), "./b.cls": b"01"},
            ["0", "1"],
        ),
        (
            "wds",
            {"v1.0/a.png": png(0), "v1.0/a.cls": b"0", "v1.0/b.png": png(1), "v1.0/b.cls": b"1"},
            ["0", "1"],
        ),
        (
            "wds",
            {"a.png": png(0), "a.cls": b"0", "._a.png": b"", "b.x.png": png(1), "b.cls": b"1"},
            ["0", "1"],
        ),
        (
            "tar",
            {
                "cat/a.png": png(0),
                "__MACOSX/cat/a.png": png(1),
                "dog/.Trash/cat/b.png": png(1),
                "dog/b.png": png(1),
                "dog/c.heic": b"",
            },
            ["cat", "dog"],
        ),
    ],
    ids=["numbers as names", "hidden files", "tar of .", "dots in folders", "two dots", "system"],
)
def test_tar_dataset_accepts_numeric_and_dotted_member_names_and_ignores_hidden_files(
    tmp_path: Path, name: str, members: dict[str, bytes], classes: list[str]
) -> None:
    for split in ("train", "val"):
        write_tar(tmp_path / f"{split}.tar", members)
    images = build_dataset(config_of(name, tmp_path).data)
    assert images.target_names == classes
    assert values_and_labels(images.train) == [(0, 0), (1, 1)]
    # Both splits have the same files.
    assert images.left_out == Counter({".heic": 2} if "dog/c.heic" in members else {})


def compressed(root: Path) -> None:
    write_tar(root / "plain.tar", folders(2))
    (root / "train.tar").write_bytes(gzip.compress((root / "plain.tar").read_bytes()))


def cut_off(root: Path) -> None:
    write_tar(root / "train.tar", folders(4))
    whole = (root / "train.tar").read_bytes()
    (root / "train.tar").write_bytes(whole[:700])


@pytest.mark.parametrize(
    ("name", "prepare", "reason"),
    [
        ("tar", lambda root: None, r"no tar of the split train; expected .*train\.tar"),
        ("tar", compressed, "not readable as an uncompressed tar"),
        ("tar", cut_off, "not readable as an uncompressed tar|no images"),
        (
            "tar",
            lambda root: write_tar(root / "train.tar", {"readme.txt": b"hello"}),
            "has no images",
        ),
        ("wds", lambda root: write_tar(root / "train.tar", folders(2)), "has no label"),
        (
            "wds",
            lambda root: write_tar(root / "train.tar", {"a.png": png(0), "a.cls": b"cat"}),
            "must hold a number",
        ),
    ],
    ids=[
        "none",
        "compressed",
        "cut off",
        "no images",
        "no labels",
        "label is no number",
    ],
)
def test_tar_dataset_error_names_the_path_and_the_reason_when_a_tar_is_unusable(
    tmp_path: Path, name: str, prepare: Any, reason: str
) -> None:
    prepare(tmp_path)
    write_tar(tmp_path / "val.tar", folders(2) if name == "tar" else pairs(2))
    with pytest.raises(ValueError, match=reason) as refusal:
        build_dataset(config_of(name, tmp_path).data)
    assert str(tmp_path) in str(refusal.value) and "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "names", [("carnival-train", "carnival-test"), ("constrained-train", "constrained-val")]
)
def test_tar_file_is_refused_when_its_name_matches_two_splits(
    tmp_path: Path, names: tuple[str, str]
) -> None:
    """The word `carnival` contains `val`, and `constrained` contains `train`."""
    for name in names:
        write_tar(tmp_path / f"{name}.tar", folders(2))
    with pytest.raises(
        ValueError,
        match=r"\.tar matches the splits train and validation; .*data\.kwargs\.train_split",
    ):
        build_dataset(config_of("tar", tmp_path).data)
    overrides = [
        f"+data.kwargs.{part}_split='{name}'"
        for part, name in zip(("train", "val"), names, strict=True)
    ]
    images = build_dataset(config_of("tar", tmp_path, *overrides).data)
    assert len(images.train) == len(images.val) == 2


def test_tar_dataset_is_refused_when_a_validation_class_has_no_training_images(
    tmp_path: Path,
) -> None:
    write_tar(tmp_path / "train.tar", {"cat/1.png": png(0), "dog/1.png": png(1)})
    write_tar(tmp_path / "val.tar", {"cow/1.png": png(0)})
    with pytest.raises(ValueError, match="'cow'"):
        build_dataset(config_of("tar", tmp_path).data)


@pytest.mark.parametrize(("overrides", "white"), [((), 7), (("data.max_value=2047",), 255)])
def test_notes_have_the_range_of_deep_pixels_that_max_value_scales(
    tmp_path: Path, overrides: tuple[str, ...], white: int
) -> None:
    stream = io.BytesIO()
    Image.fromarray(np.array([[0, 2047]], np.uint16)).save(stream, "PNG")
    members = {f"{name}/{n}.png": stream.getvalue() for name in CLASSES for n in range(4)}
    for split in ("train", "val"):
        write_tar(tmp_path / f"{split}.tar", members)
        shutil.unpack_archive(tmp_path / f"{split}.tar", tmp_path / "images" / split)
    folder = resolved("data=folder", f"data.root={tmp_path}/images", *overrides)
    for config in (config_of("tar", tmp_path, *overrides), folder):
        dataset = build_dataset(config.data)
        assert dataset.train[0][0][0].tolist() == [[0, white]]
        (note,) = dataset.notes("label")
        assert "0 to 2047" in note and "data.max_value" in note

"""scripts/check_data.py finds each kind of problem in a dataset, and then exits with 1."""

from __future__ import annotations

import csv
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from PIL import Image

from scripts import check_data as entry
from timm_parallel.lab.image_check import CheckedImage, summarize

processes = pytest.mark.processes
LEAKS, DUPLICATES, LABELS = (
    "leaks across splits",
    "duplicates in a split",
    "equal images, different labels",
)
GROUPS = "groups in two splits"
ABSENT = "classes without an image"


def draw_images(root: Path, *folders: str, count: int = 5) -> Path:
    """Write random images into each folder, each one pixel wider than high."""
    pixels = np.random.default_rng(0)
    for folder in folders:
        (root / folder).mkdir(parents=True)
        for number in range(count):
            image = pixels.integers(0, 256, (8 + number, 9 + number, 3), dtype=np.uint8)
            Image.fromarray(image).save(root / folder / f"{number}.jpg")
    return root


def checked(folder: Path, *words: str) -> tuple[int, dict[str, Any]]:
    code = entry.main([*words, f"output={folder / 'check.json'}", f"page={folder / 'check.html'}"])
    return code, json.loads((folder / "check.json").read_text(encoding="utf-8"))


def names(groups: list[list[dict[str, Any]]]) -> list[list[str]]:
    return [
        [f"{image['split']}: {'/'.join(Path(image['file']).parts[-2:])}" for image in group]
        for group in groups
    ]


@processes
def test_check_data_reports_problems_counts_and_sizes_and_shows_the_images_on_a_page(
    tmp_path: Path,
) -> None:
    root = draw_images(tmp_path, "train/cat", "train/dog", "train/elk", "val/cat", "val/dog")
    shutil.copy(root / "train/cat/0.jpg", root / "val/cat/leak.jpg")
    shutil.copy(root / "train/cat/1.jpg", root / "train/cat/again <b>.jpg")
    shutil.copy(root / "train/dog/2.jpg", root / "train/elk/mislabeled.jpg")
    (root / "train/dog/torn.jpg").write_bytes((root / "train/dog/3.jpg").read_bytes()[:-200])
    (root / "train/dog/text.png").write_text("not an image")
    Image.new("L", (30, 40)).save(root / "train/dog/grey.png")
    code, report = checked(root, "data=folder", f"data.root={root}")
    assert code == 1
    problems = report["problems"]
    assert names(problems["unreadable"]) == [["train: dog/text.png"], ["train: dog/torn.jpg"]]
    assert names(problems[LEAKS]) == [["train: cat/0.jpg", "val: cat/leak.jpg"]]
    assert names(problems[DUPLICATES]) == [
        ["train: cat/1.jpg", "train: cat/again <b>.jpg"],
        ["train: dog/2.jpg", "train: elk/mislabeled.jpg"],
    ]
    assert names(problems[LABELS]) == [["train: dog/2.jpg", "train: elk/mislabeled.jpg"]]
    assert [image["labels"] for image in problems[LABELS][0]] == [["dog"], ["elk"]]
    measures = report["measures"]
    rarest_first = [
        ("elk", {"train": 6, "val": 0}),
        ("dog", {"train": 8, "val": 5}),
        ("cat", {"train": 6, "val": 6}),
    ]
    assert list(report["classes"].items()) == rarest_first
    assert measures[ABSENT] == {"train": 0, "val": 1}
    assert measures["images"] == {"train": 20, "val": 11}
    assert measures["modes"] == {"train": {"RGB": 17, "L": 1}, "val": {"RGB": 11}}
    assert measures["width: min, median, max"]["train"] == [9, 11, 30]
    assert measures["height: min, median, max"]["train"] == [8, 10, 40]
    assert measures["images per class: min, median, max"] == {"train": [6, 6, 8], "val": [0, 5, 6]}
    page = (root / "check.html").read_text(encoding="utf-8")
    assert all(
        source.startswith("data:image/jpeg;base64,")
        for source in re.findall(r'(?:src|href)="([^"]*)"', page)
    )
    equal = sum(len(group) for kind in (LEAKS, DUPLICATES, LABELS) for group in problems[kind])
    # The page shows at most four thumbnails per class, and no thumbnail of an unreadable image.
    assert equal + 3 * 3 <= page.count("<img ") <= equal + 3 * 4
    assert "again &lt;b&gt;.jpg" in page and "again <b>" not in page
    assert "dog/text.png" in page


@processes
@pytest.mark.parametrize("words", [(), ("data.val_fraction=0.4",)])
def test_check_data_exits_0_when_an_image_folder_has_no_problems(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    folders = ("cat", "dog") if words else ("train/cat", "train/dog", "val/cat", "val/dog")
    root = draw_images(tmp_path / "images", *folders, count=10)
    before = psutil.Process().children(recursive=True)
    code, report = checked(tmp_path, "data=folder", f"data.root={root}", *words)
    assert code == 0
    assert not any(report["problems"].values())
    assert sum(report["measures"]["images"].values()) == (20 if words else 40)
    assert psutil.Process().children(recursive=True) == before


@processes
def test_check_data_finds_problems_in_a_multilabel_csv(tmp_path: Path) -> None:
    draw_images(tmp_path, "images", count=6)
    shutil.copy(tmp_path / "images/0.jpg", tmp_path / "images/copy.jpg")
    rows = [
        (f"images/{number}.jpg", "beach;night" if number % 2 else "night", "train")
        for number in range(5)
    ]
    rows += [
        ("images/5.jpg", "", "val"),
        ("images/copy.jpg", "beach", "val"),
        ("images/gone.jpg", "night;beach", "val"),
    ]
    with open(tmp_path / "labels.csv", "w", newline="") as file:
        csv.writer(file).writerows([("file", "label", "split"), *rows])
    code, report = checked(tmp_path, "train=multilabel", "data=csv", f"data.root={tmp_path}")
    assert code == 1
    assert names(report["problems"]["unreadable"]) == [["val: images/gone.jpg"]]
    for kind in (LEAKS, LABELS):
        assert names(report["problems"][kind]) == [["train: images/0.jpg", "val: images/copy.jpg"]]
    assert report["problems"][DUPLICATES] == []
    assert report["classes"] == {"beach": {"train": 2, "val": 2}, "night": {"train": 5, "val": 1}}


@processes
def test_check_data_reports_groups_in_two_splits_and_repeated_paths_of_a_csv(
    tmp_path: Path,
) -> None:
    draw_images(tmp_path, "images", count=6)
    rows = [
        (f"images/{number}.jpg", "ab"[number % 2], "t" if number < 3 else "u", "")
        for number in range(6)
    ]
    rows[4:] = [("images/4.jpg", "a", "u", "val"), ("images/5.jpg", "b", "", "val")]
    rows.append(("images/../images/0.jpg", "a", "", ""))
    with open(tmp_path / "labels.csv", "w", newline="") as file:
        csv.writer(file).writerows([("file", "label", "group", "split"), *rows])
    code, report = checked(tmp_path, "data=csv", f"data.root={tmp_path}")
    assert code == 1
    assert names(report["problems"][GROUPS]) == [["train: images/3.jpg", "val: images/4.jpg"]]
    assert names(report["problems"][DUPLICATES]) == [["train: images/0.jpg", "train: images/0.jpg"]]
    assert report["problems"][LEAKS] == []


@pytest.mark.slow(seconds=1)
def test_check_data_finds_duplicate_images_in_a_synthetic_dataset(tmp_path: Path) -> None:
    words = ("data.kwargs.num_samples=400", "+data.kwargs.in_chans=1", "data.image_size=1")
    code, report = checked(tmp_path, "data=synthetic", *words)
    assert code == 1
    assert report["measures"]["images"] == {"train": 400, "val": 50}
    assert report["measures"]["modes"]["train"] == {"1 channels": 400}
    # 400 gray images of one pixel have at most 256 different values, so that most values occur more
    # than once.
    values = len({image["digest"] for group in report["problems"][DUPLICATES] for image in group})
    assert 50 < values < 256
    images = [
        (image["split"], image["index"])
        for group in report["problems"][DUPLICATES]
        for image in group
    ]
    assert len(images) == len(set(images))


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (("data=folder", "data.root=/nowhere"), "data.root=/nowhere"),
        (("data=digits", "data.rot=/x"), "data.rot"),
        (("data=digits", "output={folder}"), "output={folder}"),
        (("-m", "data=digits"), "-m"),
    ],
)
def test_check_data_exits_2_with_one_line_when_an_argument_is_invalid(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], key: str
) -> None:
    assert entry.main([word.format(folder=tmp_path) for word in words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert key.format(folder=tmp_path) in err


def checked_image(split: str, number: int, label: str) -> CheckedImage:
    return CheckedImage(split, number, f"{number}", (label,), 8, 8, "RGB", f"{number}")


def test_check_data_counts_the_images_of_classes_but_not_of_regression_targets() -> None:
    images = [checked_image("train", number, f"{number / 7}") for number in range(5)]
    report = summarize(["brightness"], ["train"], images)
    assert not report.has_problems
    assert report.classes == {}
    assert ABSENT not in report.measures
    labels = [("train", "cat"), ("train", "dog"), ("val", "cat")]
    images = [checked_image(split, number, label) for number, (split, label) in enumerate(labels)]
    report = summarize(["cat", "dog"], ["train", "val"], images)
    assert report.has_problems and not any(report.problems.values())
    assert report.measures[ABSENT] == {"train": 0, "val": 1}

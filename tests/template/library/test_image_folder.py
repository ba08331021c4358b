"""Image folders that are read, refused, or checked by scripts/check_data.py."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import unicodedata
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from PIL import Image

import evaluate
from scripts import check_data as entry
from src.schema import Config, DataConfig
from tests.template.runs import run_warm
from timm_parallel.data.build import check_data
from timm_parallel.data.decode import Files
from timm_parallel.data.file_list import split_of
from timm_parallel.data.folder import FolderDataset, class_folders
from timm_parallel.lab.image_check import CheckedImage, show_check, summarize
from timm_parallel.testing.commands import Refuse


def image_folder(root: Path, counts: dict[str, dict[str, int]]) -> Path:
    """Write `counts[split][class]` images, one color per class, JPEG and PNG in turn."""
    draw = np.random.default_rng(0)
    for split, classes in counts.items():
        for label, (name, count) in enumerate(classes.items()):
            (root / split / name).mkdir(parents=True)
            for number in range(count):
                pixels = draw.integers(0, 60, (20 + number % 5, 24, 3), dtype=np.uint8)
                pixels[..., label % 3] += 150
                Image.fromarray(pixels).save(
                    root / split / name / f"{number}.{('jpg', 'png')[number % 2]}"
                )
    return root


GOOD = {"a": 1, "b": 1}


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ({"val": GOOD}, "no folder"),
        ({"train": GOOD}, "no folder"),
        ({"train": {}, "val": {}}, "no class folders"),
        ({"train": {"a": 2}, "val": {"a": 1}}, "only the class a"),
        ({"train": {"a": 1, "b": 0}, "val": GOOD}, "no image in"),
        ({"train": GOOD, "val": {"a": 1, "b": 0}}, "no image in"),
        ({"train": GOOD, "val": {"a": 1, "c": 1}}, "train/ does not have 1 of the 2 classes"),
        ({"train": GOOD, "val": GOOD, "test": {"z": 1}}, "/test: z; it has a, b"),
    ],
)
def test_image_folder_with_missing_splits_or_classes_is_refused(
    refuse: Refuse, tmp_path: Path, counts: dict[str, dict[str, int]], message: str
) -> None:
    for split in counts:
        (tmp_path / "images" / split).mkdir(parents=True)
    root = image_folder(tmp_path / "images", counts)
    line = refuse("data=folder", f"data.root={root}")
    assert line.startswith(f"train.py: data.root={root}") and message in line


@pytest.mark.parametrize(
    ("layout", "fraction", "key"),
    [
        ("Training VALIDATION testing", 0.2, "data.val_fraction=null"),
        ("train val", 0.2, "data.val_fraction=null"),
        ("train test", 0.2, "data.val_fraction=null"),
        ("train valid", None, "valid"),
        ("Train val", None, "Train"),
        ("train test", None, "test"),
        ("train/train train/valid val/train", None, "valid"),
    ],
)
def test_split_folders_among_class_folders_are_refused(
    tmp_path: Path, layout: str, fraction: float | None, key: str
) -> None:
    image_folder(tmp_path, dict.fromkeys(layout.split(), GOOD))
    with pytest.raises(ValueError) as refusal:  # noqa: PT011
        check_data(
            Config(data=DataConfig(name="folder", root=str(tmp_path), val_fraction=fraction))
        )
    message = str(refusal.value)
    assert message.startswith(f"data.root={tmp_path}: ") and key in message
    # The error must not suggest data.root itself as the folder of the classes, because its
    # subfolders are splits.
    assert f"{tmp_path}/<class>/ with" not in message


def test_class_folder_named_train_and_a_root_below_a_hidden_folder_are_accepted(
    tmp_path: Path,
) -> None:
    root = image_folder(tmp_path / ".cache", {"car": {"": 6}, "Train": {"": 6}})
    config = DataConfig(name="folder", root=str(root), val_fraction=0.4)
    check_data(Config(data=config))
    dataset = FolderDataset(config)
    assert len(dataset.train) + len(dataset.val) == 12
    # A dataset of the project may use data.root in its own way.
    check_data(Config(data=DataConfig(name="src.data.mine.Mine", root="/data/shapes")))


def test_refusal_of_a_folder_that_val_fraction_divides_names_data_root_and_its_layout(
    tmp_path: Path,
) -> None:
    root = image_folder(tmp_path, {"images": {"a": 9, "b": 9, "c": 1}}) / "images"
    config = DataConfig(name="folder", root=str(root), val_fraction=0.4)
    with pytest.raises(ValueError, match=r"the run does not have 1 of the 3 classes") as unknown:
        FolderDataset(config, ["a", "b"])
    assert str(unknown.value).startswith(f"data.root={root}: ")
    missing = replace(config, root=str(root / "missing"))
    with pytest.raises(ValueError, match=r"no folder .*missing; expected .*missing/<class>") as no:
        check_data(Config(data=missing))
    assert "train/" not in str(no.value)


@pytest.mark.parametrize(
    ("words", "key"),
    [
        ("data=folder data.root={root} data.batch_size=9", "data.batch_size=9: "),
        ("data=digits data.batch_size=1258", "data.batch_size=1258: "),
        ("data=digits data.batch_size=16 data.limit_train=8", "data.batch_size=16: "),
        (
            "data.batch_size=null data.batch_size_per_device=700 parallel=ddp parallel.devices=2",
            "data.batch_size=1400: ",
        ),
    ],
)
def test_batch_larger_than_the_training_split_is_refused_before_ranks_start(
    refuse: Refuse, tmp_path: Path, words: str, key: str
) -> None:
    image_folder(tmp_path, {"train": {"a": 5, "b": 3}, "val": {"a": 4, "b": 4}})
    line = refuse("model=tiny", "parallel=single", *words.format(root=tmp_path).split())
    assert line.startswith(f"train.py: {key}")


@pytest.mark.parametrize("hidden", [".Trash-501/files", "@eaDir/0.jpg", "__MACOSX"])
def test_image_folder_skips_hidden_and_system_folders_and_counts_them(
    tmp_path: Path, hidden: str
) -> None:
    root = image_folder(tmp_path / "images", {"train": GOOD, "val": GOOD})
    # One copy is below a class, and one next to the classes.
    for parent in (root / "train" / "a", root / "train"):
        (parent / hidden).mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(parent / hidden / "copy.png")
    dataset = FolderDataset(DataConfig(name="folder", root=str(root)))
    assert dataset.target_names == ["a", "b"]
    assert len(dataset.train) == 2
    assert dataset.left_out == {f"folder {hidden.partition('/')[0]}": 2}


def test_image_folder_reads_further_suffixes_and_counts_the_other_files(tmp_path: Path) -> None:
    root = image_folder(tmp_path, {"train": {"cat": 1, "dog": 1}, "val": {"cat": 1, "dog": 1}})
    for name in ("b.JFIF", "c.jpe", "d.avif", "e.apng", "f.pnm"):
        form = {"d.avif": "AVIF", "e.apng": "PNG", "f.pnm": "PPM"}.get(name, "JPEG")
        Image.new("RGB", (8, 8)).save(root / "train" / "cat" / name, form)
    for name in ("g.HEIC", "h.heic", "i.jp2", "without", "Thumbs.db", ".hidden"):
        (root / "train" / "dog" / name).write_bytes(b"data")
    (root / "train" / "dog" / "more").symlink_to(tmp_path / "gone")
    Image.new("RGB", (8, 8)).save(root / "train" / "loose.png")
    dataset = FolderDataset(DataConfig(name="folder", root=str(root)))
    assert len(dataset.train) == 7
    assert all(dataset.train[index][0].shape[0] == 3 for index in range(7))
    assert dataset.left_out == {
        **{".heic": 2, ".jp2": 1, "no suffix": 1, ".db": 1, "broken link": 1},
        "image outside of a class folder": 1,
    }
    (note,) = dataset.notes("label")
    assert ".heic (2)" in note


def test_notes_name_classes_without_a_training_image_and_those_of_similar_names(
    tmp_path: Path,
) -> None:
    """With data.val_fraction, the only image of a rare class may be in the val split."""
    root = image_folder(tmp_path, {"Oak": {"": 9}, "oak ": {"": 9}, "rare": {"": 1}})
    config = DataConfig(name="folder", root=str(root), val_fraction=0.3)
    image, notes_of = root / "rare" / "0.jpg", {}
    for number in range(40):
        image = image.rename(root / "rare" / f"{number}.jpg")
        notes_of[split_of(f"rare/{number}.jpg", config)] = FolderDataset(config).notes("label")
    (alike,) = notes_of["train"]
    assert "'Oak' and 'oak '" in alike
    (absent,) = {*notes_of["val"]} - {alike}
    assert "rare" in absent


@pytest.mark.parametrize("split", ["train", "val"])
def test_class_folder_that_is_a_broken_link_is_refused(tmp_path: Path, split: str) -> None:
    root = image_folder(tmp_path, {"train": GOOD, "val": GOOD})
    (root / split / ".hidden").symlink_to(tmp_path / "gone")
    check_data(Config(data=DataConfig(name="folder", root=str(root))))
    (root / split / "zebra").symlink_to(tmp_path / "not_mounted" / "zebra")
    with pytest.raises(ValueError, match=r"zebra.*not_mounted"):
        check_data(Config(data=DataConfig(name="folder", root=str(root))))


def test_notes_name_a_folder_that_cannot_be_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = image_folder(tmp_path, {"train": GOOD, "val": GOOD})
    (root / "train" / "a" / "closed").mkdir()
    scan = os.scandir

    # The superuser may list every folder, so the test replaces the function that lists it.
    def scandir(path: str) -> object:
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", scandir)
    dataset = FolderDataset(DataConfig(name="folder", root=str(root)))
    assert dataset.left_out == {f"unreadable folder {root / 'train' / 'a' / 'closed'}": 1}


def test_class_names_of_train_and_val_are_equal_in_both_unicode_forms(tmp_path: Path) -> None:
    in_train, in_val = (unicodedata.normalize(form, "Ätna") for form in ("NFC", "NFD"))
    counts = {"train": {in_train: 3, "Vesuv": 2}, "val": {in_val: 3, "Vesuv": 2}}
    root = image_folder(tmp_path, counts)
    config = DataConfig(name="folder", root=str(root))
    check_data(Config(data=config))
    dataset = FolderDataset(config)
    assert isinstance(dataset.val, Files)
    labels = {path.parent.name: label for path, label in dataset.val.files}
    assert len(dataset.val) == 5
    assert labels[in_val] == dataset.target_names.index(in_train)
    # A run that was trained elsewhere may have the other form, too.
    evaluated = FolderDataset(config, [in_val, "Vesuv"])
    assert len(evaluated.val) == 5
    (root / "train" / in_val).mkdir()
    with pytest.raises(ValueError, match="two Unicode forms"):
        class_folders(root / "train")


@pytest.mark.slow(seconds=5)
def test_run_on_names_that_are_not_utf_8_logs_notes_and_writes_the_bytes_of_the_names(
    tmp_path: Path,
) -> None:
    counts = {"train": {"cat": 4, "dog": 4}, "val": {"cat": 1, "dog": 2}}
    root = image_folder(tmp_path / "images", counts)
    class_name, file_name = b"ca\xf1", b"\xe9t\xe9.png"
    for split in counts:
        (root / split / "cat").rename(root / split / os.fsdecode(class_name))
    (root / "val" / "dog" / "0.jpg").rename(root / "val" / "dog" / os.fsdecode(file_name))
    (root / "train" / "dog" / "9.heic").write_bytes(b"data")
    overrides = ("data=folder", f"data.root={root}", "data.image_size=16", "data.batch_size=4")
    run = run_warm(tmp_path / "run", *overrides, "data.limit_train=null", "parallel=single")
    log = (run / "logs" / "rank_0.log").read_text(encoding="utf-8")
    assert "data note" in log and ".heic (1)" in log and "Logging error" not in log
    predictions = tmp_path / "predictions.csv"
    assert evaluate.main([f"run={run}", "split=val", f"predictions={predictions}"]) == 0
    table = predictions.read_bytes()
    assert file_name in table and class_name in table


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
    assert 50 < len(report["problems"][DUPLICATES]) < 256


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (("data=folder", "data.root=/nowhere"), "data.root=/nowhere"),
        (("data=digits", "data.rot=/x"), "data.rot"),
        (("data=digits", "output={folder}"), "{folder}"),
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
    report = summarize(["cat", "dog", "elk"], ["train", "val"], images)
    assert report.has_problems and not any(report.problems.values())
    assert report.measures[ABSENT] == {"train": 1, "val": 2}
    assert list(report.classes) == ["elk", "dog", "cat"], "expected the rarest class first"


def test_check_data_reports_files_and_classes_with_names_that_are_not_utf_8(
    capsys: pytest.CaptureFixture[str],
) -> None:
    # pandas stores texts with pyarrow, if it is installed, which refuses such names.
    name = os.fsdecode(b"\xff")
    images = [checked_image("train", 0, name), replace(checked_image("val", 1, name), file=name)]
    groups = dict.fromkeys(("0", name), name)
    report = summarize([name], ["train", "val"], images, groups)
    assert report.problems["groups in two splits"] == [images]
    show_check(report)
    assert capsys.readouterr().out.count(r"\udcff") == 4

"""Tests of image folders. A folder with another layout is refused before a run starts, and the
error names the folder.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from src.app import app
from src.schema import Config, DataConfig
from timm_parallel.data.build import check_data
from timm_parallel.entry import run_command
from timm_parallel.record.result import read_result
from timm_parallel.testing.ranks import run_warm


def image_folder(root: Path, counts: dict[str, dict[str, int]]) -> Path:
    """Write images into `<root>/<split>/<class>/`, and return the root folder. `counts` maps split
    and class to the number of images. Each class has one color, and JPEG and PNG files alternate.
    """
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


@pytest.mark.slow
@pytest.mark.processes
def test_image_folder_of_jpeg_and_png_files_trains_under_ddp(tmp_path: Path) -> None:
    classes = {"café": 21, "dog": 13, "owl": 17}
    root = image_folder(
        tmp_path / "images",
        {"train": classes, "val": {"café": 3, "dog": 4}, "test": {"café": 2, "dog": 2, "owl": 1}},
    )
    overrides = (
        "data=folder",
        f"data.root={root}",
        "data.image_size=16",
        "data.batch_size=16",
        "data.limit_train=null",
    )
    more = ("parallel=ddp", "parallel.devices=2", "optim.lr=3e-3", "train.epochs=4")
    result = read_result(run_warm(tmp_path / "run", *overrides, *more))
    assert result.val["samples"] == 7
    assert result.test["samples"] == 5
    assert result.samples_seen == 4 * 48
    assert result.dropped_per_epoch == 51 - 48
    assert result.val["acc_best"] == 1.0, (
        "expected high accuracy, because the color determines the class"
    )
    assert result.skipped == {}


GOOD = {"a": 1, "b": 1}
BAD = {
    "no_train": ({"val": GOOD}, "no folder"),
    "no_val": ({"train": GOOD}, "no folder"),
    "no_classes": ({"train": {}, "val": {}}, "no class folders"),
    "one_class": ({"train": {"a": 2}, "val": {"a": 1}}, "only the class a"),
    "an_empty_class": ({"train": {"a": 1, "b": 0}, "val": GOOD}, "no image in"),
    "an_empty_class_in_val": ({"train": GOOD, "val": {"a": 1, "b": 0}}, "no image in"),
    "another_class_in_val": (
        {"train": GOOD, "val": {"a": 1, "c": 1}},
        "train/ does not have 1 of the 2 classes",
    ),
    "another_class_in_test": (
        {"train": GOOD, "val": GOOD, "test": {"z": 1}},
        "/test: z; it has a, b",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_image_folder_with_missing_splits_or_classes_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    counts, message = BAD[name]
    for split in counts:
        (tmp_path / "images" / split).mkdir(parents=True)
    root = image_folder(tmp_path / "images", counts)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(sys, "argv", ["train.py", "data=folder", f"data.root={root}"])
    assert run_command(app) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith(f"train.py: data.root={root}") and message in lines[0]
    assert list((tmp_path / "here").iterdir()) == []


@pytest.mark.parametrize(
    ("layout", "fraction", "fixes"),
    [
        ("train valid", 0.2, ["rename valid/ to val/", "data.val_fraction=null"]),
        (
            "Training VALIDATION testing",
            0.2,
            ["rename VALIDATION/ to val/", "rename Training/ to train/"],
        ),
        ("train val", 0.2, ["data.val_fraction=null"]),
        ("train test", 0.2, ["data.root={root}/train"]),
        ("train", 0.2, ["data.root={root}/train"]),
        ("train valid", None, ["rename valid/ to val/"]),
        ("Train val", None, ["rename Train/ to train/"]),
        ("train test", None, ["data.root={root}/train", "data.val_fraction=0.2"]),
        (
            "train/train train/valid val/train",
            None,
            ["rename valid/ to val/", "data.root={root}/train"],
        ),
    ],
)
def test_error_for_split_folders_among_class_folders_names_the_fix(
    tmp_path: Path, layout: str, fraction: float | None, fixes: list[str]
) -> None:
    image_folder(tmp_path, dict.fromkeys(layout.split(), GOOD))
    with pytest.raises(ValueError) as refusal:  # noqa: PT011
        check_data(
            Config(data=DataConfig(name="folder", root=str(tmp_path), val_fraction=fraction))
        )
    message = str(refusal.value)
    assert message.startswith(f"data.root={tmp_path}: ")
    assert all(fix.format(root=tmp_path) in message for fix in fixes)
    # The error must not suggest data.root itself as the folder of the classes, because its
    # subfolders are splits.
    assert f"{tmp_path}/<class>/ with" not in message


def test_class_folder_named_train_is_accepted_when_the_folder_contains_no_subfolders(
    tmp_path: Path,
) -> None:
    image_folder(tmp_path, {"car": {"": 6}, "Train": {"": 6}})
    check_data(Config(data=DataConfig(name="folder", root=str(tmp_path), val_fraction=0.4)))


def test_error_for_an_empty_class_folder_names_data_root_and_the_class(tmp_path: Path) -> None:
    image_folder(tmp_path, {"cat": {"": 2}})
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"empty") as refusal:
        check_data(Config(data=DataConfig(name="folder", root=str(tmp_path), val_fraction=0.4)))
    assert str(refusal.value).startswith(f"data.root={tmp_path}: ")


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (("data=folder", "data.root={root}/parts", "data.batch_size=9"), "data.batch_size=9: "),
        (("data=folder", "data.root={root}/parts", "data.batch_size=8"), None),
        (
            ("data=folder", "data.root={root}/parts", "data.batch_size=4", "train.accumulate=3"),
            "train.accumulate=3: ",
        ),
        (
            (
                "data=folder",
                "data.root={root}/parts/train",
                "data.val_fraction=0.2",
                "data.batch_size=9",
            ),
            "data.batch_size=9: ",
        ),
        (("data=csv", "data.root={root}", "data.batch_size=3"), "data.batch_size=3: "),
        (("data=csv", "data.root={root}", "data.batch_size=2"), None),
        (("data=digits", "data.batch_size=1258"), "data.batch_size=1258: "),
        (("data=digits", "data.batch_size=16", "data.limit_train=8"), "data.batch_size=16: "),
        (
            (
                "data.batch_size=null",
                "data.batch_size_per_device=700",
                "parallel=ddp",
                "parallel.devices=2",
            ),
            "data.batch_size=1400: ",
        ),
    ],
)
def test_batch_larger_than_the_training_split_is_refused_before_ranks_start(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    key: str | None,
) -> None:
    image_folder(tmp_path / "parts", {"train": {"a": 5, "b": 3}, "val": {"a": 4, "b": 4}})
    rows = [
        f"parts/train/{name}/{number}.jpg,{name},{split}"
        for name in "ab"
        for number, split in ((0, ""), (2, "val"))
    ]
    (tmp_path / "labels.csv").write_text("\n".join(["file,label,split", *rows]))
    started: list[bool] = []
    monkeypatch.setattr("timm_parallel.launch.job.run_job", lambda *_: started.append(True) or 0)
    command = [word.format(root=tmp_path) for word in words]
    monkeypatch.setattr(
        sys,
        "argv",
        [
            "train.py",
            "model=tiny",
            "parallel=single",
            f"hydra.run.dir={tmp_path / 'run'}",
            *command,
        ],
    )
    assert run_command(app) == (2 if key else 0)
    assert bool(started) == (key is None)
    assert (tmp_path / "run").exists() == (key is None)
    if key is not None:
        assert capsys.readouterr().err.startswith(f"train.py: {key}")


@pytest.mark.parametrize("name", ["digits", "synthetic"])
def test_in_memory_dataset_refuses_data_root(name: str) -> None:
    with pytest.raises(
        ValueError, match=rf"data\.root=/data/shapes: data\.name={name} .*data=folder"
    ):
        check_data(Config(data=DataConfig(name=name, root="/data/shapes")))


def test_custom_dataset_may_use_data_root() -> None:
    check_data(Config(data=DataConfig(name="src.data.mine.Mine", root="/data/shapes")))

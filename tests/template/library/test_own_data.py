"""Datasets without prepared splits: class folders with data.val_fraction, and CSV files."""

from __future__ import annotations

import csv
import os
import unicodedata
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from src.data.datasets import Digits
from src.schema import Config, DataConfig, TrainConfig
from src.tasks.images import ImageTask
from tests.template.runs import draw_images
from timm_parallel import check_classes, find_task
from timm_parallel.data.build import build_dataset, check_data, training_size
from timm_parallel.data.csv_listing import CsvDataset, read_rows
from timm_parallel.data.dataset import Split, data_fingerprints
from timm_parallel.data.decode import Files
from timm_parallel.data.file_list import split_of
from timm_parallel.machine.text import similar_names

CLASSES = ("daisy", "rose", "tulip")


def write_csv(path: Path, rows: list[dict[str, Any]]) -> Path:
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def names_of(split: Any) -> set[str]:
    return {f"{path.parent.name}/{path.name}" for path, _ in split.files}


@pytest.fixture(scope="module")
def flowers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draw_images(tmp_path_factory.mktemp("data") / "flowers", *CLASSES, count=12)


@given(st.text("aé漢ñÅ/", min_size=1), st.floats(0.01, 0.6), st.floats(0.01, 0.3))
def test_split_of_an_image_is_that_of_both_unicode_forms_and_val_stays_when_val_fraction_grows(
    name: str, fraction: float, more: float
) -> None:
    forms = [unicodedata.normalize(form, name) for form in ("NFC", "NFD")]
    data = DataConfig(name="folder", val_fraction=fraction)
    [split] = {split_of(form, data) for form in forms}
    larger = DataConfig(name="folder", val_fraction=fraction + more)
    assert split != "val" or split_of(name, larger) == "val"


@settings(max_examples=20, deadline=None)
@given(st.floats(0.05, 0.4), st.floats(0.05, 0.4))
def test_val_fraction_and_test_fraction_give_splits_of_the_requested_size(
    val: float, test: float
) -> None:
    data = DataConfig(name="folder", val_fraction=val, test_fraction=test)
    counts = Counter(split_of(f"class/{number}.jpg", data) for number in range(4000))
    # Allow five standard deviations of a binomial proportion, so that chance practically never
    # fails the test.
    for split, share in (("val", val), ("test", test)):
        assert abs(counts[split] / 4000 - share) < 5 * (share * (1 - share) / 4000) ** 0.5


def test_val_fraction_assigns_every_image_to_exactly_one_split(flowers: Path) -> None:
    config = DataConfig(name="folder", root=str(flowers), val_fraction=0.3, test_fraction=0.2)
    check_data(Config(data=config))
    dataset = build_dataset(config)
    assert dataset.target_names == list(CLASSES)
    parts = [names_of(split) for split in (dataset.train, dataset.val, dataset.test)]
    assert all(parts)
    assert sum(map(len, parts)) == len(set.union(*parts)) == 36
    # New images change no split, because the name of an image alone decides.
    assert parts[1] == {name for name in set.union(*parts) if split_of(name, config) == "val"}
    assert training_size(config) == len(parts[0])
    with pytest.raises(ValueError, match=r"data\.val_fraction=1e-09"):
        build_dataset(DataConfig(name="folder", root=str(flowers), val_fraction=1e-9))


def rows_of(root: Path, **columns: Any) -> list[dict[str, Any]]:
    """Build a CSV row per image. More columns are functions of the row number."""
    files = sorted(root.glob("*/*.png"))
    return [
        {"file": path.relative_to(root).as_posix(), "label": path.parent.name}
        | {name: column(number) for name, column in columns.items()}
        for number, path in enumerate(files)
    ]


def test_images_of_a_group_of_a_pattern_or_of_a_csv_column_are_in_one_split(flowers: Path) -> None:
    rows = rows_of(flowers, group=lambda number: f"patient {number // 4}")
    path = write_csv(flowers / "groups.csv", rows)
    of_column = {row["file"]: row["group"] for row in rows}
    of_pattern = {row["file"]: Path(row["file"]).name[0] for row in rows}
    by_pattern = DataConfig(name="folder", root=str(flowers), group_pattern=r"/(\d)")
    for group, config in (
        (of_pattern, by_pattern),
        (of_column, DataConfig(name="csv", root=str(path))),
    ):
        dataset = build_dataset(replace(config, val_fraction=0.4))
        train, val = (
            {group[name] for name in names_of(split)} for split in (dataset.train, dataset.val)
        )
        assert train and val and not train & val
    with pytest.raises(ValueError, match=r"^data\.group_pattern=\(zz\): "):
        build_dataset(replace(by_pattern, val_fraction=0.4, group_pattern="(zz)"))


def files_of(split: Split) -> list[tuple[Path, Any]]:
    assert isinstance(split, Files)
    return list(split.files)


def test_csv_split_column_puts_each_image_into_the_named_split(flowers: Path) -> None:
    rows = rows_of(flowers, split=lambda number: ("train", "val", "test", "train")[number % 4])
    path = write_csv(flowers / "split.csv", rows)
    dataset = build_dataset(DataConfig(name="csv", root=str(path)))
    assert dataset.target_names == list(CLASSES)
    assert names_of(dataset.val) == {row["file"] for row in rows if row["split"] == "val"}
    assert names_of(dataset.test) == {row["file"] for row in rows if row["split"] == "test"}
    assert all(
        dataset.target_names[label] == file.parent.name for file, label in files_of(dataset.train)
    )


# pandas writes the numbers of a column with empty cells as floats.
@pytest.mark.parametrize("kind", [int, float])
def test_csv_fold_column_puts_every_image_in_the_val_split_of_exactly_one_fold(
    flowers: Path, kind: type[int | float]
) -> None:
    path = write_csv(flowers / "folds.csv", rows_of(flowers, fold=lambda number: kind(number % 11)))
    folds = [build_dataset(DataConfig(name="csv", root=str(path), fold=fold)) for fold in range(11)]
    vals = [names_of(dataset.val) for dataset in folds]
    assert sum(map(len, vals)) == len(set.union(*vals)) == 36
    assert all(
        names_of(dataset.train) == set.union(*vals) - val
        for dataset, val in zip(folds, vals, strict=True)
    )
    missing = DataConfig(name="csv", root=str(path), fold=11)
    for evaluated in (None, "val"):
        with pytest.raises(ValueError, match=r"data\.fold=11: .*choose one of 0, 1, 10, 2"):
            check_data(Config(data=missing), evaluated)


@pytest.mark.parametrize(
    ("lines", "settings", "named"),
    [
        (["name,label", "a.png,x"], {}, "file"),
        (["file,label", "a.png,x", "b.png,x"], {"val_fraction": 0.2}, "1 label "),
        (
            ["file,label", "daisy/0.png,", "rose/0.png,y", "tulip/0.png,z"],
            {"val_fraction": 0.2},
            "line 2",
        ),
        (["file,label,split", "a.png,x,dev", "b.png,y,val"], {}, "split=dev"),
        (["file,label", "a.png,x", "b.png,y"], {}, r"data\.val_fraction"),
        (["file,label", ",x", "b.png,y"], {"val_fraction": 0.2}, "line 2: .*column file"),
        (["file,label,fold", "a.png,x,0", "b.png,y,1"], {"fold": 4}, "0, 1"),
        (["file,label,fold", "a.png,x,0", "b.png,y,"], {"fold": 0}, "line 3"),
        (
            ["file,label,split", "daisy/0.png,x,train", "missing.png,y,train", "c.png,x,val"],
            {},
            r"missing\.png",
        ),
        # The next three CSV files have a label that no training image has.
        *(
            (
                ["file,label,split", "a.png,x,train", "b.png,y,", "c.png,z,val", "d.png,z,test"],
                settings,
                "1 label .*z.*line 4",
            )
            for settings in ({}, {"val_fraction": 1e-9})
        ),
        (
            ["file,label,fold", "a.png,x,0", "b.png,y,0", "c.png,x,1"],
            {"fold": 0},
            "1 label .*y.*line 3",
        ),
        # A cell such as x;y counts as several labels if x or y is also a label by itself, or occurs
        # in another such cell.
        (["file,label,split", "a.png,x;y,train", "b.png,y,val"], {}, r"line 2.*train.task"),
        (["file,label,split", "a.png,x;y,train", "b.png,z; y,val"], {}, r"line 2.*train.task"),
        (
            ["file,label,group,fold", "a.png,x,g,0", "b.png,y,g,1", "c.png,y,h,1"],
            {"fold": 0},
            "1 of 2 groups.*g",
        ),
        ([""], {}, "empty"),
        # Rows with more values than columns.
        (["file,label", "a.png,x", "b,1.png,y"], {}, "line 3: 3 values"),
        # Quotation marks that are not closed, or that one of a later row closes.
        (["file,label", "a.png,x", 'b.png,"y', "c.png,x"], {}, "line 3: "),
        (["file,label", "", 'a.png,"x', 'b.png,y"', "c.png,x"], {}, "line 3: label"),
        (["file,label", "a.png,x", '"b.png,y', 'c.png",x'], {}, "line 3: file"),
        # Headers.
        (["file,label,split,label ", "a.png,x,,y"], {}, "line 1: .*label"),
        (["file;label", "a.png;x"], {}, "line 1: .*'file;label'"),
    ],
)
def test_csv_dataset_error_names_the_invalid_column_line_value_or_file(
    flowers: Path, lines: list[str], settings: dict[str, Any], named: str
) -> None:
    path = flowers / "bad.csv"
    path.write_text("\n".join(lines) + "\n")
    config = DataConfig(name="csv", root=str(path), **settings)

    def read() -> None:
        check_data(Config(data=config))
        build_dataset(config)

    with pytest.raises(ValueError, match=named) as refusal:
        read()
    assert "\n" not in str(refusal.value)


def test_csv_label_with_a_semicolon_is_one_class_unless_a_part_is_in_another_label(
    tmp_path: Path,
) -> None:
    path = tmp_path / "labels.csv"
    path.write_text(
        "file,label,split\na.png,salt; pepper,train\nb.png,sugar,val\nc.png,sugar,train"
    )
    assert build_dataset(DataConfig(name="csv", root=str(path))).target_names == [
        "salt; pepper",
        "sugar",
    ]


def test_csv_rows_keep_their_values_in_common_dialects(tmp_path: Path) -> None:
    path = tmp_path / "labels.csv"
    path.write_bytes(
        b'\xef\xbb\xbf\r\nfile, label,note,note,\r\na.png,"x, y","one\r\ntwo",,\r\n\r\n'
        b'b.png, "say ""z""",,1,,,\r\nc.png, 12" pipe \r\n'
    )
    rows = [(row.line, row.file.name, row.labels) for row in read_rows(path, DataConfig(), "label")]
    assert rows == [(3, "a.png", ["x, y"]), (6, "b.png", ['say "z"']), (7, "c.png", ['12" pipe'])]


@pytest.mark.parametrize(
    ("labels", "is_refused"),
    [
        (["tea|milk", "milk", "tea"], True),
        (["tea, milk", "milk, sugar"], True),
        (["tea\uff1bmilk", "milk"], True),
        (["tea milk", "milk", "tea", "tea sugar", "milk sugar", "sugar"], True),
        (["tea_milk", "milk", "tea"], True),
        (["['tea', 'milk']", "['milk']", "[]"], True),
        (["New York", "New Delhi", ""], False),
        (["salt, pepper", "sugar", ""], False),
        (["tea|milk", "tea;sugar", "tea"], False),
    ],
)
def test_multilabel_csv_is_refused_if_another_character_than_semicolon_separates_labels(
    flowers: Path, labels: list[str], is_refused: bool
) -> None:
    # Each label has an image in train and an image in val.
    rows = rows_of(
        flowers,
        label=lambda number: labels[number // 2 % len(labels)],
        split=lambda number: ("train", "val")[number % 2],
    )
    data = DataConfig(name="csv", root=str(write_csv(flowers / "separators.csv", rows)))
    config = Config(data=data, train=TrainConfig(task="multilabel"))
    if is_refused:
        with pytest.raises(ValueError, match=r"line 2: .*; write ;"):
            check_data(config)
    else:
        check_data(config)
    check_data(config, evaluated="val")


def test_labels_and_headers_in_nfc_and_nfd_are_equal(tmp_path: Path) -> None:
    composed, decomposed = (unicodedata.normalize(form, "thé") for form in ("NFC", "NFD"))
    path = tmp_path / "labels.csv"
    path.write_text(
        f"file,label,{decomposed}\na.png,{decomposed},1\nb.png,{composed},2\nc.png,tea,3\n"
    )
    labels = [row.labels for row in read_rows(path, DataConfig(), "label")]
    assert labels == [[composed], [composed], ["tea"]]
    numbers = [
        row.labels for row in read_rows(path, DataConfig(kwargs={"targets": [composed]}), "numbers")
    ]
    assert numbers == [["1"], ["2"], ["3"]]
    # Runs may have names of classes in NFD, for example those of folders.
    config = DataConfig(name="csv", root=str(path), val_fraction=0.5)
    dataset = build_dataset(config, trained_names=["tea", decomposed])
    assert dataset.target_names == ["tea", decomposed]
    files = [*files_of(dataset.train), *files_of(dataset.val)]
    assert {file.name: label for file, label in files} == {"a.png": 1, "b.png": 1, "c.png": 0}


def test_similar_names_groups_names_that_probably_mean_the_same_class() -> None:
    assert similar_names(["daisy", "rose", "rose bush", "1", "-1", "10"]) == ""
    for pair in (
        ("Rose", "rose"),
        ("rose bush", "rose  bush"),
        ("rose", "rose\u200b"),
        ("\uff21", "A"),
        ("7", "7.0"),
        ("07", "7"),
    ):
        assert " and ".join(map(repr, pair)) in similar_names(["daisy", *pair, "tulip"])


@pytest.mark.parametrize("in_csv", ["NFC", "NFD"])
def test_csv_lists_images_in_another_unicode_form_than_the_disk(
    flowers: Path, tmp_path: Path, in_csv: Literal["NFC", "NFD"]
) -> None:
    """The folder has a name in NFC, and the images have names in NFD."""
    folder = tmp_path / unicodedata.normalize("NFC", "é")
    folder.mkdir()
    rows = []
    for number, image in enumerate(sorted(flowers.glob("*/*.png"))[::3]):
        name = f"ü{number}.png"
        os.link(image, folder / unicodedata.normalize("NFD", name))
        file = unicodedata.normalize(in_csv, f"é/{name}")
        rows.append(
            {"file": file, "label": image.parent.name, "split": ("train", "val")[number % 2]}
        )
    path = write_csv(tmp_path / "labels.csv", rows)
    config = DataConfig(name="csv", root=str(path))
    check_data(Config(data=config))
    dataset = build_dataset(config)
    assert len(dataset.train) + len(dataset.val) == 12
    assert dataset.val[0][0].shape == (3, 16, 16)
    # Both forms of a path are one file.
    other: Literal["NFC", "NFD"] = "NFD" if in_csv == "NFC" else "NFC"
    copy = {**rows[0], "file": unicodedata.normalize(other, rows[0]["file"]), "split": "val"}
    write_csv(path, [*rows, copy])
    with pytest.raises(ValueError, match=r"1 of \d+ files? would be in two splits"):
        check_data(Config(data=config))


def test_csv_lists_an_image_whose_name_is_not_utf8(flowers: Path, tmp_path: Path) -> None:
    names = [os.fsdecode(b"caf\xe9.png"), "tea.png", "milk.png"]
    try:
        for name, image in zip(names, sorted(flowers.glob("*/*.png")), strict=False):
            os.link(image, tmp_path / name)
    except OSError:
        pytest.skip("this file system takes names in UTF-8 only")
    path = tmp_path / "labels.csv"
    path.write_bytes(b"file,label,split\ncaf\xe9.png,x,train\ntea.png,y,train\nmilk.png,y,val\n")
    config = DataConfig(name="csv", root=str(path))
    check_data(Config(data=config))
    files = [file for file, _ in files_of(build_dataset(config).train)]
    assert [os.fsencode(file.name) for file in files] == [b"caf\xe9.png", b"tea.png"]
    (tmp_path / names[0]).unlink()
    with pytest.raises(ValueError, match=r"line 2: .*UTF-8"):
        check_data(Config(data=config))


@pytest.mark.parametrize(
    ("given", "columns"),
    [
        ("age", ["age"]),
        ([1999, "age"], ["1999", "age"]),
        ([False], ["false"]),
        (None, ["label"]),
        ("weight", "line 1: no column weight"),
        ([2000], "2000"),
        (["age", "age"], "age,age"),
    ],
)
def test_targets_of_a_csv_are_read_as_text_and_refused_if_missing_or_repeated(
    flowers: Path, given: Any, columns: list[str] | str
) -> None:
    rows = rows_of(flowers, **{name: lambda number: number for name in ("age", "1999", "false")})
    path = write_csv(flowers / "numbers.csv", [{**row, "label": 1} for row in rows])
    config = DataConfig(name="csv", root=str(path), val_fraction=0.3, kwargs={"targets": given})
    whole = Config(data=config, train=TrainConfig(task="regression", loss="mse"))
    if isinstance(columns, str):
        with pytest.raises(ValueError, match=columns):
            check_data(whole)
        return
    check_data(whole)
    dataset = build_dataset(config, target="numbers")
    assert dataset.target_names == columns
    assert len(dataset.train[0][1]) == len(columns)
    assert training_size(config) == len(dataset.train)


def test_csv_of_numbers_without_targets_is_refused_with_the_key_that_names_them(
    flowers: Path,
) -> None:
    rows = [{"file": "daisy/0.jpg", "age": 3}]
    config = DataConfig(name="csv", root=str(write_csv(flowers / "ages.csv", rows)))
    with pytest.raises(ValueError, match=r"no column label; .*\+data\.kwargs\.targets="):
        check_data(Config(data=config, train=TrainConfig(task="regression", loss="mse")))


@pytest.mark.parametrize("task", ["classification", "multilabel"])
def test_csv_notes_files_that_have_several_lines_with_different_labels(
    flowers: Path, task: str
) -> None:
    rows = rows_of(flowers, split=lambda number: "val" if number % 7 == 0 else "train")
    path, target = write_csv(flowers / "long.csv", rows), find_task(task, ImageTask).target
    config = DataConfig(name="csv", root=str(path))
    assert build_dataset(config, target=target).notes(target) == []
    labels = {row["label"] for row in rows}
    trained = [row for row in rows if row["split"] == "train"]
    same, other = trained[0], trained[1] | {"label": min(labels - {trained[1]["label"]})}
    write_csv(path, [*rows, same, other])
    (note,) = build_dataset(config, target=target).notes(target)
    assert note.startswith("1 file") and str(other["file"]) in note


def test_class_names_of_a_dataset_that_are_not_text_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Digits, "target_names", ["zero", 1, 2.5])
    with pytest.raises(ValueError, match=r"^data\.name=digits: .*1, 2\.5.*str\(\)"):
        build_dataset(DataConfig(name="digits", image_size=8))


def test_class_names_of_a_dataset_in_a_tuple_become_a_list_and_are_compared_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Digits, "target_names", ("0", "1"))
    dataset = build_dataset(DataConfig(name="digits", image_size=8))
    assert dataset.target_names == ["0", "1"]
    check_classes(dataset, ["0", "1"], "the checkpoint")
    with pytest.raises(ValueError, match=r"the checkpoint .*the same names in another order"):
        check_classes(dataset, ["1", "0"], "the checkpoint")


class Scans(CsvDataset):
    """A CSV file that passes all other arguments on."""

    def __init__(self, config: DataConfig, **more: Any) -> None:
        super().__init__(config, **more)


def test_own_dataset_gets_the_target_and_the_trained_names_by_kwargs(tmp_path: Path) -> None:
    path = tmp_path / "labels.csv"
    path.write_text("file,label\na.png,cat;dog\nb.png,dog\n")
    name = f"{__name__}.Scans"
    config = DataConfig(name=name, root=str(path), val_fraction=0.5)
    dataset = build_dataset(config, trained_names=["dog", "cat"], target="labels")
    assert dataset.target_names == ["dog", "cat"]
    files = [*files_of(dataset.train), *files_of(dataset.val)]
    labels = {file.name: label for file, label in files}
    assert labels == {"a.png": (1.0, 1.0), "b.png": (1.0, 0.0)}


def test_one_label_is_enough_for_multilabel_if_some_images_have_none(flowers: Path) -> None:
    rows = rows_of(flowers)
    scratched = [{**row, "label": "scratch" if row["label"] == "rose" else ""} for row in rows]
    config = DataConfig(
        name="csv", root=str(write_csv(flowers / "one.csv", scratched)), val_fraction=0.3
    )
    train = TrainConfig(task="multilabel")
    check_data(Config(data=config, train=train))
    dataset = build_dataset(config, target="labels")
    assert dataset.target_names == ["scratch"]
    assert {label for _, label in files_of(dataset.train)} == {(0.0,), (1.0,)}
    # A test set may consist of images that all have the label.
    write_csv(Path(str(config.root)), [{**row, "label": "scratch"} for row in rows])
    assert build_dataset(config, ["scratch"], "labels").target_names == ["scratch"]
    CsvDataset.check(config, "test")
    with pytest.raises(ValueError, match="1 label in 36 lines"):
        check_data(Config(data=config, train=train))


def test_csv_that_is_not_utf8_is_refused_with_key_file_and_fix(tmp_path: Path) -> None:
    path = tmp_path / "labels.csv"
    path.write_bytes("file,label\na.png,caf\xe9\nb.png,tea\n".encode("latin-1"))
    with pytest.raises(ValueError, match="UTF-8") as refusal:
        check_data(Config(data=DataConfig(name="csv", root=str(path), val_fraction=0.2)))
    assert str(refusal.value).startswith(f"data.root={path}: ")
    assert not isinstance(refusal.value, UnicodeDecodeError)


@pytest.mark.parametrize(
    ("spelling", "named"),
    [
        (None, "18 of 18 groups"),
        ("{}", "3 of 36 files"),
        ("daisy/../{}", "3 of 36 files"),
    ],
)
def test_csv_with_a_group_or_file_in_two_splits_is_refused_for_training_only(
    flowers: Path, spelling: str | None, named: str
) -> None:
    groups = {} if spelling else {"group": lambda number: f"p{number // 2}"}
    rows = rows_of(flowers, split=lambda number: ("train", "val")[number % 2], **groups)
    trained = [row for row in rows if row["split"] == "train"]
    for row in trained[:3] if spelling else ():
        rows.append({**row, "file": str(spelling).format(row["file"]), "split": "val"})
    config = Config(data=DataConfig(name="csv", root=str(write_csv(flowers / "leak.csv", rows))))
    check_data(config, evaluated="val")
    with pytest.raises(ValueError, match=named):
        check_data(config)


def test_csv_files_with_other_spellings_of_the_paths_give_the_same_splits(
    flowers: Path, tmp_path: Path
) -> None:
    splits = []
    for spelling in ("{}", f"{flowers}/{{}}", "daisy/.././/{}", f"../{flowers.name}/{{}}"):
        rows = [{**row, "file": spelling.format(row["file"])} for row in rows_of(flowers)]
        for folder in (flowers, tmp_path) if spelling[0] == "/" else (flowers,):
            path = write_csv(folder / "spelled.csv", rows)
            data = DataConfig(name="csv", root=str(path), val_fraction=0.4)
            check_data(Config(data=data))
            splits.append(names_of(build_dataset(data).val))
    # Outside of the folder of the CSV, the whole path decides.
    del splits[2]
    assert splits[0] and splits == splits[:1] * 4


def test_dataset_fingerprint_ignores_the_split_but_changes_with_the_labels(flowers: Path) -> None:
    path = write_csv(flowers / "fingerprints.csv", rows_of(flowers, fold=lambda number: number % 3))
    folds = [build_dataset(DataConfig(name="csv", root=str(path), fold=fold)) for fold in (0, 1)]
    first, second = (data_fingerprints(dataset) for dataset in folds)
    assert first["all"] == second["all"]
    assert first["train"] != second["train"]
    assert first["val"] != second["val"]
    first_row, *rows = rows_of(flowers)
    other = write_csv(flowers / "other.csv", [{**first_row, "label": "tulip"}, *rows])
    changed = build_dataset(DataConfig(name="csv", root=str(other), val_fraction=0.3))
    assert data_fingerprints(changed)["all"] != first["all"]

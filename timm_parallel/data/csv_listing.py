"""Dataset of images that a CSV file lists: `data=csv`.

This module does not import torch, because train.py checks the CSV file before it starts any
process.
"""

from __future__ import annotations

import csv
import math
import os
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from timm_parallel.data.dataset import ImageDataset
from timm_parallel.data.fractions import Listing, check_splits, split_of
from timm_parallel.keys import DataConfig
from timm_parallel.machine.text import first, plural

SPLITS = ("train", "val", "test")
COLUMNS = ("file", "label", "split", "fold", "group")


@dataclass
class Row:
    """One line of the CSV file of a dataset: an image and its labels.

    The value of a missing column is empty.
    """

    line: int
    file: Path
    # The text whose hash selects the split under data.val_fraction: the group, or else the path.
    key: str
    labels: list[str]
    split: str
    fold: str
    group: str


class CsvDataset(ImageDataset):
    """Dataset of images and labels that a CSV file lists."""

    # Character between two labels of one image, for tasks in which an image may have several
    # labels.
    separator = ";"
    targets = ("label", "labels", "numbers")
    takes = ("trained_names", "target")

    def __init__(
        self,
        config: DataConfig,
        trained_names: list[str] | None = None,
        target: str = "label",
        targets: list[str] | None = None,
    ) -> None:
        """Read the CSV file and divide its images into splits.

        `trained_names`: names of the classes (or columns of numbers) of the trained run, if this
        dataset is to evaluate that run. `target`: `label` for one label per image, `labels` for any
        number of them, `numbers` for regression. `targets`: names of the columns with the numbers
        to learn; None: the column `label`.
        """
        from timm_parallel.data.decode import files_of

        several, columns, path = target == "labels", _columns(config, target), csv_file(config)
        rows = read_rows(path, several, columns)
        if trained_names is None and target == "label":
            _check_combinations(rows, path)
        divided = _divide(rows, path, config)
        if columns:
            self.target_names, listing = list(columns), _list_numbers(divided)
            _complete(listing, path, config, trained_names is None)
        else:
            self.target_names, listing = _list(divided, path, config, trained_names, several)
        self.train, self.val, self.test = files_of(listing, config.max_value)

    @classmethod
    def check(cls, config: DataConfig, evaluated: str | None = None, target: str = "label") -> None:
        """Raise ValueError if the CSV file of the dataset cannot be used.

        One image of each label must exist as a file. For training (`evaluated` is None) there are
        more conditions. In a single-label task, no cell may hold several labels. No file or group
        may be in two splits. Each label of val or test must also be in train.
        """
        path, several, columns = csv_file(config), target == "labels", _columns(config, target)
        rows = read_rows(path, several, columns)
        divided = _divide(rows, path, config)
        if columns:
            _complete(_list_numbers(divided), path, config, evaluated is None)
        else:
            _list(divided, path, config, None, several)
        if evaluated is None:
            if target == "label":
                _check_combinations(rows, path)
            _check_files(divided, path)
            _check_groups(divided, path)
            if not columns:
                _check_known_labels(rows, path, config.fold)
        for row in {tuple(row.labels): row for row in reversed(rows)}.values():
            if not row.file.is_file():
                raise ValueError(
                    f"data.root={path}: line {row.line}: no such image file: {row.file}"
                )

    @classmethod
    def size(cls, config: DataConfig, enough: int | None = None) -> int:
        """Count the training images in the CSV file. The count is the same for any train.task."""
        path = csv_file(config)
        rows = read_rows(path, several=True, columns=config.kwargs.get("targets", ()))
        return len(_divide(rows, path, config)["train"])

    @classmethod
    def groups(cls, config: DataConfig, target: str) -> dict[str, str]:
        """Return a dictionary from the path of each image to the value of its column `group`.

        Images with an empty group are left out.
        """
        columns = _columns(config, target)
        rows = read_rows(csv_file(config), target == "labels", columns)
        return {str(row.file): row.group for row in rows if row.group}


def csv_file(data: DataConfig) -> Path:
    """Return the path of the CSV file: data.root itself, or labels.csv if data.root is a folder."""
    if data.root is None:
        raise ValueError("data.root=null: set it to a CSV file with the columns file and label")
    root = Path(data.root)
    path = root / "labels.csv" if root.is_dir() else root
    if not path.is_file():
        raise ValueError(
            f"data.root={data.root}: expected a CSV file, or a folder with a labels.csv"
        )
    return path


def _columns(config: DataConfig, target: str) -> Sequence[str]:
    """Return the CSV columns with the numbers to learn, or an empty tuple if the task learns
    labels.
    """
    columns = config.kwargs.get("targets")
    if target == "numbers":
        return columns or ("label",)
    if columns:
        raise ValueError(
            f"data.kwargs.targets={columns}: names columns of numbers, but this train.task learns "
            "labels; remove the key"
        )
    return ()


def read_rows(path: Path, several: bool, columns: Sequence[str] = ()) -> list[Row]:
    """Read the rows of the CSV file from its columns `file`, `label`, `split`, `fold` and `group`.

    The last three columns are optional. Paths in `file` are relative to the folder of the CSV file.
    `several`: True if an image may have any number of labels, also none. `columns`: columns of
    numbers to read instead of the column `label`.
    """
    try:
        with open(path, newline="", encoding="utf-8-sig") as lines:
            return _parse(csv.DictReader(lines), path, several, columns)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"data.root={path}: not UTF-8 ({error.reason}); save the file as UTF-8"
        ) from None


def _parse(
    reader: csv.DictReader[str], path: Path, several: bool, columns: Sequence[str]
) -> list[Row]:
    if missing := {"file", *(columns or ("label",))} - set(reader.fieldnames or ()):
        present = ", ".join(reader.fieldnames or ()) or "no columns, because it is empty"
        raise ValueError(
            f"data.root={path}: has no column {' and '.join(sorted(missing))}; the file has "
            f"{present}"
        )
    folder = os.path.abspath(path.parent)
    rows = []
    for entry in reader:
        file, label, split, fold, group = ((entry.get(column) or "").strip() for column in COLUMNS)
        if not file or not (label or several or columns):
            column = "label" if file else "file"
            fix = "; add a label, or use a train.task for any number of labels" if file else ""
            raise ValueError(
                f"data.root={path}: line {reader.line_num} has no value in the column {column}{fix}"
            )
        if columns:
            labels = [(entry.get(column) or "").strip() for column in columns]
            for column, text in zip(columns, labels, strict=True):
                if not _is_number(text):
                    raise ValueError(
                        f"data.root={path}: line {reader.line_num}: {column}={text}: expected a "
                        "number"
                    )
        else:
            labels = _parts(label) if several else [label]
        # Remove the ".0" of a fold: pandas writes whole numbers as 0.0, 1.0, … if some cells are
        # empty.
        fold = fold.removesuffix(".0")
        group = unicodedata.normalize("NFC", group)
        rows.append(
            Row(
                reader.line_num,
                path.parent / file,
                group or path_key(file, folder),
                labels,
                split,
                fold,
                group,
            )
        )
    return rows


def _is_number(text: str) -> bool:
    with suppress(ValueError):
        return math.isfinite(float(text))
    return False


def _parts(label: str) -> list[str]:
    return [part.strip() for part in label.split(CsvDataset.separator) if part.strip()]


def path_key(file: str, folder: str) -> str:
    """Return a normalized path of an image, whose hash decides in which split the image is.

    All spellings of a path give the same text, on any machine. The text is relative to `folder`,
    the folder of the CSV file, if the image is below that folder. Else it is the normalized path.
    """
    below = os.path.join(folder, "")
    path = os.path.normpath(os.path.join(folder, file))
    return path.removeprefix(below) if path.startswith(below) else os.path.normpath(file)


def _divide(rows: Sequence[Row], path: Path, data: DataConfig) -> dict[str, list[Row]]:
    """Divide the rows of the CSV file into train, val and test.

    The column `split`, data.fold or data.val_fraction decides in which split a row is.
    """
    divided: dict[str, list[Row]] = {split: [] for split in SPLITS}
    for row in rows:
        if row.split and row.split not in SPLITS:
            raise ValueError(
                f"data.root={path}: line {row.line}: split={row.split}; expected train, val or test"
            )
        # data.fold and data.val_fraction divide only the images that the column split does not
        # already assign to val or test.
        if row.split in ("val", "test"):
            divided[row.split].append(row)
        elif data.fold is not None:
            if not row.fold:
                raise ValueError(
                    f"data.fold={data.fold}: line {row.line} of {path} has no value in the column "
                    "fold; add one"
                )
            divided["val" if row.fold == str(data.fold) else "train"].append(row)
        elif data.val_fraction is not None:
            divided[split_of(row.key, data)].append(row)
        else:
            divided["train"].append(row)
    if data.fold is not None and not divided["val"]:
        folds = ", ".join(sorted({row.fold for row in rows if row.fold}))
        raise ValueError(
            f"data.fold={data.fold}: no line of {path} has this fold; choose one of {folds}"
        )
    return divided


def _list(
    divided: dict[str, list[Row]],
    path: Path,
    data: DataConfig,
    classes: list[str] | None,
    several: bool,
) -> tuple[list[str], Listing]:
    """Return the class names, and the image files of each split with their labels.

    `classes`: class names of the trained run to evaluate, or None. `several`: True if an image may
    have several labels. The target of an image is then a tuple with one number per class: 1 if the
    image has the class, else 0. Otherwise the target is the index of the class.
    """
    names = classes or sorted(
        {label for of_split in divided.values() for row in of_split for label in row.labels}
    )
    if len(names) < 2:
        counts = (
            f"{plural(len(names), 'label')} in {plural(sum(map(len, divided.values())), 'line')}"
        )
        raise ValueError(
            f"data.root={path}: has only {counts}; expected two different labels or more"
        )
    number_of = {name: number for number, name in enumerate(names)}

    def encode(row: Row) -> int | tuple[float, ...]:
        if unknown := set(row.labels) - number_of.keys():
            raise ValueError(
                f"data.root={path}: line {row.line}: the trained run has no class "
                f"{', '.join(sorted(unknown))}; remove the line, or correct its label"
            )
        if several:
            return tuple(float(name in row.labels) for name in names)
        return number_of[row.labels[0]]

    listing = {
        split: [(row.file, encode(row)) for row in of_split] for split, of_split in divided.items()
    }
    _complete(listing, path, data, classes is None)
    return names, listing


def _list_numbers(divided: dict[str, list[Row]]) -> Listing:
    """Return the image files of each split, each with the tuple of numbers to learn."""
    return {
        split: [(row.file, tuple(map(float, row.labels))) for row in rows]
        for split, rows in divided.items()
    }


def _complete(listing: Listing, path: Path, data: DataConfig, is_trained: bool) -> None:
    """Remove the test split if it is empty. Raise ValueError if the data are for training and have
    no val split.
    """
    if not listing["test"] and not data.test_fraction:
        del listing["test"]
    if is_trained:
        if not listing["val"] and data.val_fraction is None:
            raise ValueError(
                f"data.root={path}: no image is in the val split; set data.val_fraction=0.2 or "
                "data.fold, or add a column named split"
            )
        check_splits(listing, data)


def _check_combinations(rows: list[Row], path: Path) -> None:
    """Raise ValueError if a label with semicolons looks like several labels of one image.

    A single-label task would wrongly train on such a combination as a class. A label counts as a
    combination if one of its parts also occurs in another label. So `salt; pepper` alone may be a
    class.
    """
    line_of = {row.labels[0]: row.line for row in reversed(rows)}
    counts = Counter(part for label in line_of for part in set(_parts(label)))
    for label in sorted(line_of, key=line_of.__getitem__):
        common = [part for part in _parts(label) if counts[part] > 1]
        if CsvDataset.separator in label and common:
            raise ValueError(
                f"data.root={path}: line {line_of[label]}: the label {label} would be one class, "
                f"but its part {common[0]} also occurs in another label; if an image may have "
                "several labels, choose a train.task for several labels"
            )


def _in_two_splits(
    divided: dict[str, list[Row]], name_of: Callable[[Row], str]
) -> dict[str, list[Row]]:
    """Find the files or groups that are in more than one split.

    `name_of` returns the file or group of a row. The result is a dictionary from such a file or
    group to one row of each split that contains it.
    """
    by_name: dict[str, dict[str, Row]] = {}
    for split, rows in divided.items():
        for row in rows:
            if name := name_of(row):
                by_name.setdefault(name, {}).setdefault(split, row)
    return {
        name: list(by_split.values()) for name, by_split in by_name.items() if len(by_split) > 1
    }


def _check_files(divided: dict[str, list[Row]], path: Path) -> None:
    if leaking := _in_two_splits(divided, lambda row: os.path.abspath(row.file)):
        rows = next(iter(leaking.values()))
        raise ValueError(
            f"data.root={path}: {plural(len(leaking), 'file')} would be in two splits, e.g. "
            f"{rows[0].file} ({_lines(rows)}); keep one line per file"
        )


def _check_groups(divided: dict[str, list[Row]], path: Path) -> None:
    if leaking := _in_two_splits(divided, lambda row: row.group):
        group, rows = next(iter(leaking.items()))
        total = len({row.group for of_split in divided.values() for row in of_split if row.group})
        raise ValueError(
            f"data.root={path}: {len(leaking)} of {plural(total, 'group')} would be in two splits, "
            f"e.g. {group} ({_lines(rows)}); give all lines of a group the same split or fold"
        )


def _lines(rows: list[Row]) -> str:
    return " and ".join(f"line {row.line}" for row in rows)


def _check_known_labels(rows: list[Row], path: Path, fold: int | None) -> None:
    """Raise ValueError for a label of val or test that no training image has.

    Only the columns `split` and `fold` are checked, because under data.val_fraction a rare label
    may be missing by chance. scripts/check_data.py counts labels that are missing by chance.
    """
    held_out = [
        row
        for row in rows
        if row.split in ("val", "test") or (fold is not None and row.fold == str(fold))
    ]
    lines = {row.line for row in held_out}
    known = {label for row in rows if row.line not in lines for label in row.labels}
    unknown = {
        label: row.line for row in reversed(held_out) for label in row.labels if label not in known
    }
    if unknown:
        names = sorted(unknown)
        raise ValueError(
            f"data.root={path}: found {plural(len(names), 'label')} only in val or test: "
            f"{first(names)} (line {unknown[names[0]]}); a model cannot learn labels without "
            "training images: remove their lines, or give some of them another split or fold"
        )

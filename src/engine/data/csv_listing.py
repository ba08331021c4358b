"""Images listed in a CSV file: `data=csv`. No torch: train.py also reads the file before it starts anything."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from src.engine.data.fractions import Listing, check_splits, split_of
from src.schema import DataConfig

SEPARATOR = ";"  # between the labels of one image, with train.task=multilabel
SPLITS = ("train", "val", "test")


@dataclass
class Row:
    """An image in the CSV file: its path, label, split, fold and group."""

    line: int
    file: Path
    label: str
    split: str
    fold: str
    group: str


def csv_file(data: DataConfig) -> Path:
    """Return the CSV file of data.root, which is the file itself or a folder with labels.csv."""
    if data.root is None:
        raise ValueError("data.root=null: set it to a CSV file with the columns file and label")
    root = Path(data.root)
    path = root / "labels.csv" if root.is_dir() else root
    if not path.is_file():
        raise ValueError(f"data.root={data.root}: no such file, and no folder with a labels.csv")
    return path


def read_rows(data: DataConfig, multilabel: bool = False) -> list[Row]:
    """Read the CSV file: columns file (relative to the CSV's folder) and label, and optionally split, fold and group.

    Only with `multilabel` may a label be empty.
    """
    path = csv_file(data)
    with open(path, newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file)
        if missing := {"file", "label"} - set(reader.fieldnames or ()):
            found = ", ".join(reader.fieldnames or ())
            raise ValueError(f"data.root={path}: has no column {' and '.join(sorted(missing))}; it has {found}")
        rows = []
        for entry in reader:
            values = {name: (entry.get(name) or "").strip() for name in ("file", "label", "split", "fold", "group")}
            row = Row(reader.line_num, path.parent / values.pop("file"), **values)
            if not entry["file"] or not (row.label or multilabel):
                raise ValueError(f"data.root={path}: line {row.line} has no {'label' if entry['file'] else 'file'}")
            rows.append(row)
    return rows


def labels_of(row: Row, multilabel: bool) -> list[str]:
    """Return the labels of an image: one, or with `multilabel` any number."""
    if not multilabel:
        return [row.label]
    return [label.strip() for label in row.label.split(SEPARATOR) if label.strip()]


def class_names_of(rows: Sequence[Row], path: Path, multilabel: bool) -> list[str]:
    """Return the sorted distinct labels. Raises ValueError for fewer than two."""
    names = sorted({label for row in rows for label in labels_of(row, multilabel)})
    if len(names) < 2:
        raise ValueError(f"data.root={path}: {len(names)} labels in {len(rows)} lines; expected two or more")
    return names


def divide(rows: Sequence[Row], data: DataConfig) -> dict[str, list[Row]]:
    """Divide rows into train, val and test: by data.fold, by data.val_fraction, or by the column split."""
    path = csv_file(data)
    divided: dict[str, list[Row]] = {"train": [], "val": [], "test": []}
    for row in rows:
        if row.split and row.split not in SPLITS:
            raise ValueError(f"data.root={path}: line {row.line}: split={row.split}; expected train, val or test")
        # Fold and fraction divide what the file itself does not set apart for val or test.
        if row.split in ("val", "test"):
            divided[row.split].append(row)
        elif data.fold is not None:
            if not row.fold:
                raise ValueError(f"data.fold={data.fold}: line {row.line} of {path} has no value in the column fold")
            divided["val" if row.fold == str(data.fold) else "train"].append(row)
        elif data.val_fraction is not None:
            key = row.group or row.file.relative_to(path.parent).as_posix()
            divided[split_of(key, data)].append(row)
        else:
            divided["train"].append(row)
    if data.fold is not None and not divided["val"]:
        folds = ", ".join(sorted({row.fold for row in rows if row.fold}))
        raise ValueError(f"data.fold={data.fold}: {path} has no line with this fold; its folds are {folds}")
    return divided


def list_csv(data: DataConfig, classes: list[str] | None = None, multilabel: bool = False) -> tuple[list[str], Listing]:
    """Return the class names, and each split's files with labels. `classes`: the class names of trained weights.

    A label is a class number; with `multilabel` a number per class, 1 if the image has that label, else 0.
    """
    rows, path = read_rows(data, multilabel), csv_file(data)
    names = classes or class_names_of(rows, path, multilabel)
    known = {name: index for index, name in enumerate(names)}
    for row in rows:
        for label in labels_of(row, multilabel):
            if label not in known:
                raise ValueError(f"data.root={path}: line {row.line}: the run has no class {label}")

    def encode(row: Row) -> int | tuple[float, ...]:
        if not multilabel:
            return known[row.label]
        own = set(labels_of(row, multilabel))
        return tuple(float(name in own) for name in names)

    divided = divide(rows, data)
    listing = {split: [(row.file, encode(row)) for row in of_split] for split, of_split in divided.items()}
    if not listing["test"] and not data.test_fraction:
        del listing["test"]
    if classes is None:
        if not listing["val"] and data.val_fraction is None:
            raise ValueError(
                f"data.root={path}: no image for val; set data.val_fraction=0.2 or data.fold, or add a column named split"
            )
        check_splits(listing, data)
    return names, listing


def check_csv(data: DataConfig) -> None:
    """Raise ValueError for a CSV file unusable under any train.task. Checks that one image of each label exists."""
    rows = read_rows(data, multilabel=True)
    list_csv(data, multilabel=True)
    for row in {row.label: row for row in reversed(rows)}.values():
        if not row.file.is_file():
            raise ValueError(f"data.root={csv_file(data)}: line {row.line}: no such file: {row.file}")

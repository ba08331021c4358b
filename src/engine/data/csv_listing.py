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
COLUMNS = ("file", "label", "split", "fold", "group")


@dataclass
class Row:
    """A line of the CSV file: an image and its labels. Values of missing columns are empty."""

    line: int
    file: Path
    labels: list[str]
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


def read_rows(path: Path, multilabel: bool) -> list[Row]:
    """Read the CSV file: columns file (relative to the CSV's folder) and label, and optionally split, fold and group.

    Only with `multilabel` may an image have several labels, or none.
    """
    rows = []
    with open(path, newline="", encoding="utf-8-sig") as lines:
        reader = csv.DictReader(lines)
        if missing := {"file", "label"} - set(reader.fieldnames or ()):
            present = ", ".join(reader.fieldnames or ())
            raise ValueError(f"data.root={path}: has no column {' and '.join(sorted(missing))}; it has {present}")
        for entry in reader:
            file, label, *others = ((entry.get(column) or "").strip() for column in COLUMNS)
            if not file or not (label or multilabel):
                raise ValueError(
                    f"data.root={path}: line {reader.line_num} has no value in the column {'label' if file else 'file'}"
                )
            labels = [part.strip() for part in label.split(SEPARATOR) if part.strip()] if multilabel else [label]
            rows.append(Row(reader.line_num, path.parent / file, labels, *others))
    return rows


def _divide(rows: Sequence[Row], path: Path, data: DataConfig) -> dict[str, list[Row]]:
    """Divide rows into train, val and test: by data.fold, by data.val_fraction, or by the column split."""
    divided: dict[str, list[Row]] = {split: [] for split in SPLITS}
    for row in rows:
        if row.split and row.split not in SPLITS:
            raise ValueError(f"data.root={path}: line {row.line}: split={row.split}; expected train, val or test")
        # Fold and fraction divide the images that the column split does not assign to val or test.
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
    path = csv_file(data)
    rows = read_rows(path, multilabel)
    names = classes or sorted({label for row in rows for label in row.labels})
    if len(names) < 2:
        raise ValueError(f"data.root={path}: {len(names)} labels in {len(rows)} lines; expected two or more")
    number_of = {name: number for number, name in enumerate(names)}

    def encode(row: Row) -> int | tuple[float, ...]:
        if unknown := set(row.labels) - number_of.keys():
            raise ValueError(f"data.root={path}: line {row.line}: the run has no class {', '.join(sorted(unknown))}")
        if multilabel:
            return tuple(float(name in row.labels) for name in names)
        return number_of[row.labels[0]]

    divided = _divide(rows, path, data)
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
    list_csv(data, multilabel=True)
    path = csv_file(data)
    for row in {tuple(row.labels): row for row in reversed(read_rows(path, multilabel=True))}.values():
        if not row.file.is_file():
            raise ValueError(f"data.root={path}: line {row.line}: no such file: {row.file}")

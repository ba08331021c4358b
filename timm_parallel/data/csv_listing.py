"""Dataset of images that a CSV file lists: `data=csv`.

This module does not import torch, because train.py checks the CSV file before it starts any
process.
"""

from __future__ import annotations

import csv
import os
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from timm_parallel.data.dataset import ImageDataset
from timm_parallel.data.file_list import Listing, by_split, check_splits, split_of
from timm_parallel.keys import DataConfig
from timm_parallel.machine.text import first, is_number, plural, yaml_text

COLUMNS = ("file", "split", "fold", "group")
# Bytes that are not UTF-8, as `surrogateescape` decodes them, and control characters.
NOT_TEXT = re.compile(r"[\udc80-\udcff\x00-\x1f\x7f-\x9f]")
# Characters that also join the words of a single name.
WORD_SEPARATORS = " -_"
# Character between two labels of one image, for tasks in which an image may have several labels.
SEPARATOR = ";"
# Characters that other programs write between the labels of an image. Those with a code are a
# full-width semicolon and comma, and an enumeration comma. Spaces are last, because they may follow
# another separator.
OTHER_SEPARATORS = ",|/+&\uff1b\uff0c\u3001" + WORD_SEPARATORS


@dataclass
class Row:
    """One line of the CSV file of a dataset: an image, its labels and its split.

    The value of a missing column is empty.
    """

    line: int
    file: Path
    labels: list[str]
    split: str
    fold: str
    group: str
    # True if a hash of the path or group has selected the split, for data.val_fraction.
    is_drawn: bool


class CsvDataset(ImageDataset):
    """Dataset of images and labels that a CSV file lists."""

    train: Any
    targets = ("label", "labels", "numbers")

    def __init__(
        self,
        config: DataConfig,
        trained_names: list[str] | None = None,
        target: str = "label",
        targets: str | list[str] | None = None,
    ) -> None:
        """Read the CSV file and divide its images into splits.

        `trained_names`: names of the classes (or columns of numbers) of the trained run, if this
        dataset is to evaluate that run. `target`: `label` for one label per image, `labels` for any
        number of them, `numbers` for regression. `targets`: names of the columns with the numbers
        to learn, or one name; None: the column `label`.
        """
        from timm_parallel.data.decode import files_of

        path = csv_file(config)
        rows = read_rows(path, config, target)
        self.target_names, listing = _list(rows, path, config, target, trained_names)
        self.train, self.val, self.test = files_of(listing, config.max_value)

    @classmethod
    def check(cls, config: DataConfig, evaluated: str | None = None, target: str = "label") -> None:
        """Raise ValueError if the CSV file of the dataset cannot be used.

        One image of each label must exist as a file. For training (`evaluated` is None) there are
        more conditions. In a single-label task, no cell may hold several labels. In a task of
        several labels, only semicolons may separate them. No file or group may be in two splits.
        Each label of val or test must also be in train.
        """
        path = csv_file(config)
        rows = read_rows(path, config, target)
        # An evaluation needs neither several labels nor a val split, and knows the classes of its
        # run only later.
        present = sorted({label for row in rows for label in row.labels})
        _list(rows, path, config, target, None if evaluated is None else present)
        if evaluated is None:
            _check_leaks(rows, path)
            if target != "numbers":
                _check_known_labels(rows, path)
        for row in {tuple(row.labels): row for row in reversed(rows)}.values():
            if not row.file.is_file():
                raise ValueError(
                    f"data.root={path}: line {row.line}: no such image file: {row.file}"
                )

    @classmethod
    def size(cls, config: DataConfig, enough: int | None = None) -> int:
        """Count the training images in the CSV file. The count is the same for any train.task."""
        target = "numbers" if config.kwargs.get("targets") else "labels"
        rows = read_rows(csv_file(config), config, target)
        return sum(row.split == "train" for row in rows)

    def notes(self, target: str) -> list[str]:
        """Also describe training files that several lines give different labels, as in a file with
        one line per label.
        """
        labels: dict[str, Any] = {}
        files = [(str(path), label) for path, label in self.train.files]
        repeated = [path for path, label in files if labels.setdefault(path, label) != label]
        notes = super().notes(target)
        if repeated and target != "numbers":
            notes.append(
                f"{plural(len(set(repeated)), 'file')} in several lines with different labels: "
                f"{first(sorted(set(repeated)), 3)}; each line counts as an image of its own"
            )
        return notes


def csv_groups(config: DataConfig, target: str) -> dict[str, str]:
    """Return a dictionary from the path of each image of a CSV file to the value of its column
    `group`. Images with an empty group are left out.
    """
    rows = read_rows(csv_file(config), config, target)
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


def _columns(config: DataConfig, target: str) -> list[str]:
    """Return the CSV columns with the targets: `label`, or for numbers those of
    data.kwargs.targets. YAML reads a name such as 2020 as a number, so each name is converted to
    text. A single value is the name of one column.
    """
    given = config.kwargs.get("targets") or []
    names = given if isinstance(given, list | tuple) else [given]
    columns = [unicodedata.normalize("NFC", yaml_text(name)) for name in names]
    if columns and (target != "numbers" or len(set(columns)) < len(columns)):
        raise ValueError(
            f"data.kwargs.targets=[{','.join(columns)}]: expected different columns of numbers, "
            "for train.task=regression; remove the key if the task learns labels"
        )
    return columns or ["label"]


def read_rows(path: Path, config: DataConfig, target: str) -> list[Row]:
    """Read the rows of the CSV file from its columns `file`, `label`, `split`, `fold` and `group`.

    The last three columns are optional. Paths in `file` are relative to the folder of the CSV file.
    `target`: with `labels`, an image may have any number of labels, also none; with `numbers`, the
    columns of data.kwargs.targets are read instead of the column `label`. Raises ValueError with
    the line number for a row that is not as expected.
    """
    columns = _columns(config, target)
    header: list[str] = []
    rows: list[Row] = []
    # Name the line in which a row starts. If a quotation mark is not closed, the row ends many
    # lines later.
    line = 1
    # Do not fail at bytes that are not UTF-8, because the name of an image may have such bytes.
    with open(path, newline="", encoding="utf-8-sig", errors="surrogateescape") as file:
        reader = csv.reader(file, strict=True, skipinitialspace=True)
        try:
            for cells in reader:
                if cells and header:
                    rows.append(_row(line, header, cells, config, path, target, columns))
                elif cells:
                    header = _header(cells, columns)
                line = reader.line_num + 1
        except csv.Error as error:
            raise ValueError(
                f"data.root={path}: line {line}: not a row of a CSV file ({error}); check the "
                "quotation marks from this line on"
            ) from None
        except ValueError as error:
            raise ValueError(f"data.root={path}: line {line}: {error}") from None
    if not header:
        raise ValueError(f"data.root={path}: empty; expected the columns file and label")
    return rows


def _header(cells: list[str], targets: Sequence[str]) -> list[str]:
    """Return the names of the columns. Raise ValueError if a column is missing, or if a column that
    is read occurs twice.
    """
    names = [unicodedata.normalize("NFC", cell.strip()) for cell in cells]
    if missing := {"file", *targets} - set(names):
        numbers = "; for numbers, name their columns: +data.kwargs.targets=[…]"
        # repr shows tabs, and bytes of another encoding.
        raise ValueError(
            f"no column {' and '.join(sorted(missing))}; expected columns separated by commas, in "
            f"UTF-8; the file has {', '.join(names)!r}{numbers if 'label' in missing else ''}"
        )
    for name in (*COLUMNS, *targets):
        if names.count(name) > 1:
            raise ValueError(f"the column {name} occurs twice; rename or remove one of them")
    # Remove columns without a name at the end of the header, so that a value below them counts as a
    # value without a column.
    return names[: max(number for number, name in enumerate(names, start=1) if name)]


def _row(
    line: int,
    header: list[str],
    cells: list[str],
    config: DataConfig,
    path: Path,
    target: str,
    columns: Sequence[str],
) -> Row:
    if any(cell.strip() for cell in cells[len(header) :]):
        raise ValueError(
            f"{plural(len(cells), 'value')}, but the header has {plural(len(header), 'column')}; "
            "put a value that contains a comma in quotation marks"
        )
    entry = dict(zip(header, cells, strict=False))
    file = entry.get("file", "").strip()
    if not file:
        raise ValueError("no value in the column file")
    image = _on_disk(path.parent, file)
    # Accept bytes that are not UTF-8, and control characters, only in the name of an existing file.
    if not file.isprintable() and not os.path.lexists(image):
        _text(file, "file")
    split, fold, group, *labels = (
        _text(entry.get(column, ""), column) for column in ("split", "fold", "group", *columns)
    )
    if target == "numbers":
        for column, text in zip(columns, labels, strict=True):
            if not is_number(text):
                raise ValueError(f"{column}={text}: expected a number")
    elif target == "labels":
        labels = _parts(labels[0], SEPARATOR)
    elif not labels[0]:
        raise ValueError(
            "no value in the column label; add a label, or use a train.task for any number of "
            "labels"
        )
    # Remove the ".0" of a fold: pandas writes whole numbers as 0.0, 1.0, … if some cells are empty.
    fold = fold.removesuffix(".0")
    key = group or path_key(file, os.path.abspath(path.parent))
    is_drawn = config.val_fraction is not None and split not in ("val", "test")
    return Row(line, image, labels, _split(split, fold, key, config), fold, group, is_drawn)


def _split(split: str, fold: str, key: str, data: DataConfig) -> str:
    """Return the split of a row: that of its column `split`, else that of data.fold, or the one
    that data.val_fraction selects by `key`, the group or path of the image.
    """
    if split not in ("", "train", "val", "test"):
        raise ValueError(f"split={split}; expected train, val or test")
    # data.fold and data.val_fraction divide only the images that the column split does not already
    # assign to val or test.
    if split in ("val", "test"):
        return split
    if data.fold is None:
        return "train" if data.val_fraction is None else split_of(key, data)
    if not fold:
        raise ValueError(f"data.fold={data.fold}: no value in the column fold; add one")
    return "val" if fold == str(data.fold) else "train"


def _text(cell: str, column: str) -> str:
    """Return a cell without spaces at its ends, in the Unicode form NFC. Raise ValueError if it
    contains bytes that are not UTF-8, or control characters.
    """
    text = cell.strip()
    match = NOT_TEXT.search(text)
    if match and match[0] >= "\udc80":
        raise ValueError(f"{column}: not UTF-8; save the file as UTF-8")
    # A line break is often the sign of a quotation mark that is not closed.
    if match:
        raise ValueError(
            f"{column}: contains the control character {match[0]!r}; remove it, or close the "
            "quotation mark of this row"
        )
    return unicodedata.normalize("NFC", text)


def _on_disk(folder: Path, file: str) -> Path:
    """Return the path of an image in the Unicode form that its name has on disk.

    A CSV file often has composed letters (NFC), and a disk written by macOS decomposed ones (NFD).
    If no form exists, the path is returned as it is in the CSV file.
    """
    path = folder / file
    if file.isascii() or os.path.lexists(path):
        return path
    parent, name = os.path.split(file)
    forms = (
        _on_disk(folder, parent) / unicodedata.normalize(form, name) for form in ("NFC", "NFD")
    )
    return next(filter(os.path.lexists, forms), path)


def _parts(label: str, separator: str) -> list[str]:
    return [part.strip() for part in label.split(separator) if part.strip()]


def path_key(file: str, folder: str) -> str:
    """Return a normalized path of an image, whose hash decides in which split the image is.

    All spellings of a path give the same text, on any machine. The text is relative to `folder`,
    the folder of the CSV file, if the image is below that folder. Else it is the normalized path.
    """
    below = os.path.join(folder, "")
    path = os.path.normpath(os.path.join(folder, file))
    return path.removeprefix(below) if path.startswith(below) else os.path.normpath(file)


def _list(
    rows: list[Row], path: Path, data: DataConfig, target: str, classes: list[str] | None
) -> tuple[list[str], Listing]:
    """Return the names of the outputs, and the image files of each split with their targets.

    `classes`: class names of the trained run to evaluate, or None. `target`: with `numbers`, the
    target of an image is the tuple of its numbers. With `labels` it is a tuple with one number per
    class: 1 if the image has the class, else 0. Otherwise it is the index of the class.
    """
    several = target == "labels"
    names = classes or sorted({label for row in rows for label in row.labels})
    if target == "numbers":
        names = _columns(data, target)
    elif classes is None:
        _check_combinations(rows, path, several)
        # A model can learn one label if other images have none.
        if len(names) < 2 and (not names or all(row.labels for row in rows)):
            fix = ", or images without the label" if several else ""
            raise ValueError(
                f"data.root={path}: has only {plural(len(names), 'label')} in "
                f"{plural(len(rows), 'line')}; expected two different labels or more{fix}"
            )
    number_of = {unicodedata.normalize("NFC", name): number for number, name in enumerate(names)}

    def encode(row: Row) -> int | tuple[float, ...]:
        if target == "numbers":
            return tuple(map(float, row.labels))
        if unknown := set(row.labels) - number_of.keys():
            raise ValueError(
                f"data.root={path}: line {row.line}: the trained run has no class "
                f"{', '.join(sorted(unknown))}; remove the line, or correct its label"
            )
        if several:
            return tuple(float(name in row.labels) for name in number_of)
        return number_of[row.labels[0]]

    listing = by_split((row.split, row.file, encode(row)) for row in rows)
    if data.fold is not None and "val" not in listing:
        folds = ", ".join(sorted({row.fold for row in rows if row.fold}))
        raise ValueError(
            f"data.fold={data.fold}: no line of {path} has this fold; choose one of {folds}"
        )
    if classes is None:
        if data.val_fraction is None and (empty := {"train", "val"} - listing.keys()):
            raise ValueError(
                f"data.root={path}: no image is in the split {first(sorted(empty))}; set "
                "data.val_fraction=0.2 or data.fold, or add a column named split"
            )
        check_splits(listing, data)
    return names, listing


def _check_combinations(rows: list[Row], path: Path, several: bool) -> None:
    """Raise ValueError if a label looks like several labels of one image.

    A task would wrongly train on such a combination as a class. A label counts as a combination if
    one of its parts also occurs in another label. So `salt; pepper` alone may be a class.
    `several`: True if an image may have several labels. If no image has, the file probably has
    another separator than the semicolon.
    """
    if several and any(len(row.labels) > 1 for row in rows):
        return
    line_of = {label: row.line for row in reversed(rows) for label in row.labels}
    fix = "if an image may have several labels, choose a train.task for several labels"
    for separator in OTHER_SEPARATORS if several else SEPARATOR:
        # Remove the brackets of a label such as `["beach", "sunset"]`.
        parts_of = {label: _parts(label.strip("[](){}"), separator) for label in line_of}
        counts = Counter(part for parts in parts_of.values() for part in set(parts))
        # Names such as `red oak` and `white oak` share a word, so dividing at spaces must also
        # reduce the number of labels.
        if separator in WORD_SEPARATORS and len(counts) >= len(line_of):
            continue
        if several:
            fix = f"write {SEPARATOR} instead of {separator!r} between labels"
        for label in sorted(line_of, key=line_of.__getitem__):
            common = [part for part in parts_of[label] if counts[part] > 1]
            if separator in label and common:
                raise ValueError(
                    f"data.root={path}: line {line_of[label]}: the label {label} would be one "
                    f"class, but its part {common[0]} also occurs in another label; {fix}"
                )


def _check_leaks(rows: list[Row], path: Path) -> None:
    """Raise ValueError for a file or a group that is in more than one split."""
    for kind, fix in (
        ("file", "keep one line per file"),
        ("group", "give all lines of a group the same split or fold"),
    ):
        # Name of a file or group -> the first row of each split that has it.
        by_name: dict[str, dict[str, Row]] = defaultdict(dict)
        for row in rows:
            if name := os.path.abspath(row.file) if kind == "file" else row.group:
                by_name[name].setdefault(row.split, row)
        leaking = [name for name, of_splits in by_name.items() if len(of_splits) > 1]
        if leaking:
            lines = [f"line {row.line}" for row in by_name[leaking[0]].values()]
            raise ValueError(
                f"data.root={path}: {len(leaking)} of {plural(len(by_name), kind)} would be in two "
                f"splits, e.g. {leaking[0]} ({' and '.join(lines)}); {fix}"
            )


def _check_known_labels(rows: list[Row], path: Path) -> None:
    """Raise ValueError for a label of val or test that no training image has.

    Lines that data.val_fraction divides are not checked, because a rare label may be missing by
    chance. scripts/check_data.py counts labels that are missing by chance.
    """
    known = {label for row in rows if row.split == "train" or row.is_drawn for label in row.labels}
    unknown = {
        label: row.line for row in reversed(rows) for label in row.labels if label not in known
    }
    if unknown:
        names = sorted(unknown)
        raise ValueError(
            f"data.root={path}: found {plural(len(names), 'label')} only in val or test: "
            f"{first(names)} (line {unknown[names[0]]}); a model cannot learn labels without "
            "training images: remove their lines, or give some of them another split or fold"
        )

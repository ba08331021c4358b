"""Dataset of image folders: `<root>/{train,val,test}/<class>/**.jpg`.

With data.val_fraction, the layout is `<root>/<class>/**.jpg`. This module does not import torch,
because train.py checks the data before it imports torch.
"""

from __future__ import annotations

import os
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from timm_parallel.data.dataset import IMAGE_SUFFIXES, ImageDataset, image_files, is_hidden
from timm_parallel.data.file_list import Listing, check_splits, split_of
from timm_parallel.keys import DataConfig
from timm_parallel.machine.text import first

# Names that users give to the folders of splits, in lower case.
SPLIT_NAMES = (
    *("train", "training", "test", "testing"),
    *("val", "valid", "validation", "validate", "dev", "eval", "evaluation"),
)


class FolderDataset(ImageDataset):
    """Dataset of images in `<root>/{train,val,test}/<class>/`, or in `<root>/<class>/` with
    data.val_fraction.
    """

    takes = ("trained_names",)

    def __init__(self, config: DataConfig, trained_names: list[str] | None = None) -> None:
        """List the image files of each split.

        `trained_names`: class names of the trained run, if this dataset is to evaluate that run.
        The folder train/ may then be missing.
        """
        from timm_parallel.data.decode import files_of

        self.left_out = Counter()
        self.target_names, listing = _list_folder(config, trained_names, self.left_out)
        self.train, self.val, self.test = files_of(listing, config.max_value)

    @classmethod
    def check(cls, config: DataConfig, evaluated: str | None = None, target: str = "label") -> None:
        """Raise ValueError if data.root lacks a split, a class or images.

        To be fast on large data, the check looks for one image file per class.
        """
        if config.root is None:
            is_divided = config.val_fraction is not None
            layout = "<class>/<image>" if is_divided else "train/<class>/ and val/<class>/"
            raise ValueError(f"data.root=null: set it to a folder with {layout}")
        if config.val_fraction is not None:
            root = Path(config.root)
            # Allow class folders with the names of splits in an evaluation, because the run may
            # have been trained on them.
            if evaluated is None:
                _check_trained_classes(root, root, class_folders(root))
            _check_split(root, root)
        elif evaluated is None:
            _check_trained_folder(Path(config.root))
        else:
            _check_evaluated_folder(Path(config.root), evaluated)

    @classmethod
    def size(cls, config: DataConfig, enough: int | None = None) -> int | None:
        """Count the training images, and stop counting at `enough` images."""
        if config.root is None:
            return None
        return sum(1 for _ in islice(_training_files(config), enough))


def class_folders(split: Path, left_out: Counter[str] | None = None) -> list[str]:
    """Return the sorted names of the class folders in the folder `split`.

    The position of a name in this list is the label of its class. `left_out` counts hidden folders,
    and images that are next to the class folders.
    """
    if not split.is_dir():
        raise ValueError(f"data.root: no folder {split}; expected {split}/<class>/<image>")
    left_out = Counter() if left_out is None else left_out
    names = []
    with os.scandir(split) as entries:
        for entry in entries:
            if is_hidden(entry.name):
                left_out.update([f"folder {entry.name}"] if entry.is_dir() else [])
            elif entry.is_dir():
                names.append(entry.name)
            elif entry.is_symlink() and not (link := Path(entry.path)).exists():
                raise ValueError(
                    f"data.root: {link} is a link to {link.readlink()}, which does not exist; "
                    "mount or restore the folder, or remove the link"
                )
            elif entry.name.lower().endswith(IMAGE_SUFFIXES):
                left_out["image outside of a class folder"] += 1
    _by_normal_form(split, names)
    return sorted(names)


def _by_normal_form(split: Path, names: list[str]) -> dict[str, str]:
    """Return a dictionary from the normal form (Unicode NFC) of each class folder to its name.

    macOS may write a name in another form (NFD) than other systems. Raises ValueError if two names
    in one folder differ only in their form.
    """
    forms: dict[str, str] = {}
    for name in names:
        other = forms.setdefault(unicodedata.normalize("NFC", name), name)
        if other != name:
            raise ValueError(
                f"data.root: {split} has two folders of the name {name}, in two Unicode forms; "
                "move their images into one of them"
            )
    return forms


def _list_folder(
    data: DataConfig, trained_names: list[str] | None, left_out: Counter[str]
) -> tuple[list[str], Listing]:
    """Return the class names, and the image files of each split with their labels.

    `trained_names`: class names of the trained run to evaluate. If they are given, the training
    images are not listed. `left_out` counts the files that are not listed.
    """
    root = Path(str(data.root))
    if data.val_fraction is not None:
        names = trained_names or class_folders(root)
        return names, divided(_labeled_files(root, names, left_out), root, data)
    names = trained_names or class_folders(root / "train")
    listing: Listing = {}
    for split in ("train", "val", "test") if trained_names is None else ("val", "test"):
        if (root / split).is_dir():
            check_known_classes(
                root / split, names, "train/" if trained_names is None else "the run"
            )
            listing[split] = _labeled_files(root / split, names, left_out)
    return names, listing


def divided(files: list[tuple[Path, Any]], root: Path, data: DataConfig) -> Listing:
    """Divide image files below `root` into splits by data.val_fraction and data.test_fraction.

    `files`: pairs of the path of an image and its label, or the path of its mask.
    """
    listing: Listing = {
        split: [] for split in ("train", "val", "test") if split != "test" or data.test_fraction
    }
    for path, label in files:
        listing[split_of_file(path, root, data)].append((path, label))
    check_splits(listing, data)
    return listing


def _training_files(data: DataConfig) -> Iterator[Path]:
    """Yield the paths of the training images one by one, so that a caller can stop early."""
    root = Path(str(data.root))
    folder = root if data.val_fraction is not None else root / "train"
    for name in class_folders(folder):
        for path in image_files(folder / name):
            if data.val_fraction is None or split_of_file(path, root, data) == "train":
                yield path


def _labeled_files(
    folder: Path, names: list[str], left_out: Counter[str]
) -> list[tuple[Path, int]]:
    present = _by_normal_form(folder, class_folders(folder, left_out))
    folders = [present.get(unicodedata.normalize("NFC", name)) for name in names]
    return [
        (path, label)
        for label, name in enumerate(folders)
        if name is not None
        for path in image_files(folder / name, left_out)
    ]


def split_of_file(path: Path, root: Path, data: DataConfig) -> str:
    """Return the split that data.val_fraction and data.group_pattern assign to an image file."""
    return split_of(_group_of(path.relative_to(root).as_posix(), data), data)


def _group_of(path: str, data: DataConfig) -> str:
    """Return the part of a path that matches data.group_pattern, or the whole path without a
    pattern.

    Images for which this text is equal are put into the same split.
    """
    if data.group_pattern is None:
        return path
    match = re.search(data.group_pattern, path)
    if match is None:
        raise ValueError(
            f"data.group_pattern={data.group_pattern}: does not match {path}; choose a pattern "
            "that matches the path of every image"
        )
    return match.group(1) if match.groups() else match.group()


def _check_trained_folder(root: Path) -> None:
    for folder in (root / "train", root / "val"):
        if not folder.is_dir():
            names = class_folders(root) if root.is_dir() else []
            fix = (
                ""
                if _are_splits(root, names)
                else f", or {root}/<class>/ with data.val_fraction=0.2"
            )
            raise ValueError(
                f"data.root={root}: no folder {folder}; expected {root}/train/<class>/ and "
                f"{root}/val/<class>/{fix}; the folder has {first(names) or 'no folders'}"
            )
    train = class_folders(root / "train")
    _check_trained_classes(root, root / "train", train)
    for folder in (root / "train", root / "val", root / "test"):
        if folder.is_dir():
            check_known_classes(folder, train, "train/")
            _check_split(root, folder)


def _are_splits(folder: Path, names: list[str]) -> bool:
    """Return True if folders in `folder` are probably splits and not classes. A class may have such
    a name, such as `train` among vehicles. It is a split if it contains folders, or if all folders
    have names of splits.
    """
    splits = [name for name in names if name.lower() in SPLIT_NAMES]
    return any(len(splits) == len(names) or class_folders(folder / name) for name in splits)


def _check_trained_classes(root: Path, folder: Path, names: list[str]) -> None:
    """Raise ValueError if the class folders in `folder` are probably splits, or fewer than two."""
    if _are_splits(folder, names):
        raise ValueError(
            f"data.root={root}: folders in {folder} would be read as classes, but have the names "
            f"of splits: {first(names)}; name them train, val and test and set "
            f"data.root={folder} and data.val_fraction=null, or give the folder of one split as "
            "data.root"
        )
    if len(names) < 2:
        classes = f"only the class {names[0]}" if names else "no class folders"
        raise ValueError(
            f"data.root={root}: {classes} in {folder}; expected two classes or more: "
            f"{folder}/<class>/<image>"
        )


def _check_evaluated_folder(root: Path, split: str) -> None:
    candidates = [root / name for name in (("val", "test") if split == "all" else (split,))]
    folders = [folder for folder in candidates if folder.is_dir()]
    if not folders:
        names = " or ".join(map(str, candidates))
        raise ValueError(
            f"data.root={root}: no folder {names}; expected {candidates[0]}/<class>/<image>"
        )
    for folder in folders:
        _check_split(root, folder)


def _check_split(root: Path, folder: Path) -> None:
    names = class_folders(folder)
    if not names:
        raise ValueError(
            f"data.root={root}: no class folders in {folder}; expected {folder}/<class>/<image>"
        )
    for name in names:
        if next(image_files(folder / name), None) is None:
            suffixes = ", ".join(IMAGE_SUFFIXES)
            raise ValueError(
                f"data.root={root}: class {name}: no image in {folder / name}; add images "
                f"({suffixes}), or remove the folder"
            )


def check_known_classes(folder: Path, known: list[str], of: str) -> None:
    """Raise ValueError if `folder` contains a class folder whose name is not in `known`.

    `of`: source of the known names, such as `train/` or `the run`, for the message.
    """
    names = class_folders(folder)
    normal = {unicodedata.normalize("NFC", name) for name in known}
    if unknown := [name for name in names if unicodedata.normalize("NFC", name) not in normal]:
        raise ValueError(
            f"data.root={folder.parent}: {of} does not have {len(unknown)} of the {len(names)} "
            f"classes in the folder {folder}: {first(unknown)}; it has {first(known)}"
        )

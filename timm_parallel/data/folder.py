"""Dataset of image folders: `<root>/{train,val,test}/<class>/**.jpg`.

With data.val_fraction, the layout is `<root>/<class>/**.jpg`. This module does not import torch,
because train.py checks the data before it imports torch.
"""

from __future__ import annotations

import os
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path

from timm_parallel.data.dataset import IMAGE_SUFFIXES, ImageDataset, image_files, is_hidden
from timm_parallel.data.file_list import (
    by_split,
    check_splits,
    needed_splits,
    split_folders,
    split_of_file,
)
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

    def __init__(self, config: DataConfig, trained_names: list[str] | None = None) -> None:
        """List the image files of each split.

        `trained_names`: class names of the trained run, if this dataset is to evaluate that run.
        The folder train/ may then be missing, and is not listed.
        """
        from timm_parallel.data.decode import files_of

        folders = split_folders(config)
        self.target_names = trained_names or _train_classes(config)
        if trained_names is not None:
            folders.pop("train", None)
        self.left_out = Counter()
        for folder in folders.values():
            _check_known_classes(config, folder, self.target_names, trained_names is None)
        listing = by_split(_labeled_files(config, folders, self.target_names, self.left_out))
        check_splits(listing, config)
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
        present = split_folders(config)
        folders = [*present.values()]
        if config.val_fraction is None:
            folders = [Path(config.root) / split for split in needed_splits(evaluated, present)]
            if evaluated is None:
                _check_layout(Path(config.root), folders)
        for folder in folders:
            _check_folder(config, folder)
        # Allow class folders with the names of splits in an evaluation, because the run may have
        # been trained on them.
        if evaluated is None:
            names = _train_classes(config)
            _check_trained_classes(config, folders[0], names)
            for folder in folders[1:]:
                _check_known_classes(config, folder, names, True)

    @classmethod
    def size(cls, config: DataConfig, enough: int | None = None) -> int | None:
        """Count the training images, and stop counting at `enough` images."""
        if config.root is None:
            return None
        names, folders = _train_classes(config), split_folders(config)
        files = _labeled_files(config, folders, names, Counter())
        trained = (path for split, path, _ in files if split == "train")
        return sum(1 for _ in islice(trained, enough))


def _train_classes(config: DataConfig) -> list[str]:
    """Return the names of the class folders of the training images."""
    return class_folders(split_folders(config).get("", Path(str(config.root)) / "train"))


def _labeled_files(
    config: DataConfig, folders: Mapping[str, Path], names: list[str], left_out: Counter[str]
) -> Iterator[tuple[str, Path, int]]:
    """Yield the split, path and label of each image, one by one, so that a caller can stop early.
    `folders`: the folder of each split, as from `split_folders`.
    """
    for split, folder in folders.items():
        present = {_normal(name): name for name in class_folders(folder, left_out)}
        for label, name in enumerate(map(_normal, names)):
            if name in present:
                for path in image_files(folder / present[name], left_out):
                    yield split or split_of_file(path, folder, config), path, label


def _normal(name: str) -> str:
    """Return a name in the Unicode form NFC. macOS may write it in another form (NFD) than other
    systems.
    """
    return unicodedata.normalize("NFC", name)


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
    if len({*map(_normal, names)}) < len(names):
        raise ValueError(
            f"data.root: {split} has two folders of one name, in two Unicode forms; move their "
            "images into one of them"
        )
    return sorted(names)


def _check_layout(root: Path, folders: list[Path]) -> None:
    """Raise ValueError with the two possible layouts if a folder of a split does not exist."""
    for folder in folders:
        if not folder.is_dir():
            names = class_folders(root) if root.is_dir() else []
            other = f", or {root}/<class>/ with data.val_fraction=0.2"
            raise ValueError(
                f"data.root={root}: no folder {folder}; expected {root}/train/<class>/ and "
                f"{root}/val/<class>/{'' if _are_splits(root, names) else other}; the folder has "
                f"{first(names) or 'no folders'}"
            )


def _are_splits(folder: Path, names: list[str]) -> bool:
    """Return True if folders in `folder` are probably splits and not classes. A class may have such
    a name, such as `train` among vehicles. It is a split if it contains folders, or if all folders
    have names of splits.
    """
    splits = [name for name in names if name.lower() in SPLIT_NAMES]
    return any(len(splits) == len(names) or class_folders(folder / name) for name in splits)


def _check_trained_classes(config: DataConfig, folder: Path, names: list[str]) -> None:
    """Raise ValueError if the class folders in `folder` are probably splits, or only one."""
    if _are_splits(folder, names):
        raise ValueError(
            f"data.root={config.root}: folders in {folder} would be read as classes, but have the "
            f"names of splits: {first(names)}; name them train, val and test and set "
            f"data.root={folder} and data.val_fraction=null, or give the folder of one split as "
            "data.root"
        )
    if len(names) < 2:
        raise ValueError(
            f"data.root={config.root}: only the class {names[0]} in {folder}; expected two classes "
            f"or more: {folder}/<class>/<image>"
        )


def _check_folder(config: DataConfig, folder: Path) -> None:
    """Raise ValueError if the folder of a split does not exist or has no class folders, or if one
    of them has no image.
    """
    root = Path(str(config.root))
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


def _check_known_classes(
    config: DataConfig, folder: Path, known: list[str], are_trained: bool
) -> None:
    """Raise ValueError if `folder` contains a class folder whose name is not in `known`.

    `are_trained`: True if the known names are those of train/, False if they are those of a run.
    """
    names, normal = class_folders(folder), {*map(_normal, known)}
    if unknown := [name for name in names if _normal(name) not in normal]:
        of = "train/" if are_trained else "the run"
        raise ValueError(
            f"data.root={config.root}: {of} does not have {len(unknown)} of the {len(names)} "
            f"classes in the folder {folder}: {first(unknown)}; it has {first(known)}"
        )

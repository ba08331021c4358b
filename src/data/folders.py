"""An image folder on disk: `<root>/{train,val,test}/<class>/**.jpg`. No torch: it is also looked at before anything starts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from src.schema import DataConfig

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm")


def class_names(split: Path) -> list[str]:
    """Names of the class folders of one split, sorted: their order gives the labels."""
    with os.scandir(split) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))


def image_files(folder: Path) -> Iterator[Path]:
    """Image files below `folder`, in a fixed order; a link to a folder is followed, once."""
    seen: set[tuple[int, int]] = set()
    for directory, subdirectories, files in os.walk(folder, followlinks=True):
        place = Path(directory).stat()
        if (place.st_dev, place.st_ino) in seen:  # a link upwards
            subdirectories.clear()
            continue
        seen.add((place.st_dev, place.st_ino))
        subdirectories.sort()
        for name in sorted(files):
            if name.lower().endswith(IMAGE_SUFFIXES) and not name.startswith("."):
                yield Path(directory, name)


def check_data(data: DataConfig) -> None:
    """Look at what is on disk before anything starts."""
    if data.name == "folder":
        if data.root is None:
            raise ValueError("data.root=null: set it to a folder with train/<class>/ and val/<class>/")
        check_folder_root(Path(data.root))
    elif data.name.partition("/")[0] in ("tar", "wds") and not (data.root and Path(data.root).is_dir()):
        raise ValueError(f"data.root={data.root}: no such folder; give the one that holds the tars")


def training_size(data: DataConfig) -> int | None:
    """Images in the training split, without reading any; None for a dataset class of your own."""
    size = {"digits": 1257, "synthetic": int(data.kwargs.get("num_samples", 2048))}.get(data.name)
    if data.name == "folder" and data.root is not None:
        size = sum(1 for _ in image_files(Path(data.root) / "train"))
    return size if size is None or data.limit_train is None else min(size, data.limit_train)


def check_folder_root(root: Path) -> None:
    """Refuse what cannot be a classification folder. Looks at one file per class, so it is quick on large sets."""
    folders = [root / split for split in ("train", "val", "test") if (root / split).is_dir()]
    for folder in (root / "train", root / "val"):
        if folder not in folders:
            raise ValueError(
                f"data.root={root}: no folder {folder}; expected {root}/train/<class>/ and {root}/val/<class>/"
            )
    train = class_names(root / "train")
    if len(train) < 2:
        found = f"only the class {train[0]}" if train else "no class folders"
        raise ValueError(f"data.root={root}: {found} in {root / 'train'}; expected two or more: train/<class>/<image>")
    for folder in folders:
        names = class_names(folder)
        if unknown := sorted(set(names) - set(train)):
            raise ValueError(f"data.root={root}: {folder} has a class that train/ has not: {unknown[0]}")
        if not names:
            raise ValueError(f"data.root={root}: no class folders in {folder}; expected {folder}/<class>/<image>")
        for name in names:
            if next(image_files(folder / name), None) is None:
                raise ValueError(f"data.root={root}: no image in {folder / name} ({', '.join(IMAGE_SUFFIXES)})")

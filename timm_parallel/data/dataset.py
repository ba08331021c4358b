"""Dataset interface: splits whose samples are read by index. Imports no torch."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias

from timm_parallel.machine.text import first

if TYPE_CHECKING:
    from torch import Tensor

Sample: TypeAlias = "tuple[Tensor, Any]"
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm")
# Pillow's names of the formats of these suffixes. Pillow looks at a file's content alone, and for
# others it may start programs: Ghostscript for PostScript.
IMAGE_FORMATS = ("JPEG", "PNG", "BMP", "GIF", "TIFF", "WEBP", "PPM")


class Split(Protocol):
    """Samples of one split. An index gives a uint8 image [C, H, W] and its target."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sample: ...


class ImageDataset:
    """A dataset with a train split, a val split, and optionally a test split.

    A subclass is built from the group `data` of the config, and data.kwargs.
    """

    # Kinds of targets that the dataset can give; a task needs one of them (Task.target).
    targets: ClassVar[tuple[str, ...]] = ("label",)
    # In masks: a pixel without a class.
    ignored: ClassVar[int] = 255
    # More arguments that the constructor takes. `trained_names`: in an evaluation, the
    # target_names of the evaluated run. `target`: the kind of target that the task needs.
    takes: ClassVar[tuple[str, ...]] = ()

    # What the outputs of a model mean: the names of classes, or of columns of numbers.
    target_names: list[str]
    in_chans: int = 3
    # Pixels per side, or height and width. None: any, the loader resizes.
    image_size: int | tuple[int, int] | None = None
    # Per channel, of images in 0..1. None: use the values of the model.
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    train: Split
    val: Split  # None only if a run is evaluated on a folder without val/
    test: Split | None = None

    # train.py checks the built-in datasets before it imports torch, so their modules import torch
    # in functions only.

    @classmethod
    def check(cls, config: Any, evaluated: str | None = None, target: str = "label") -> None:
        """Raise ValueError for data that cannot be used. Reads as little as possible.

        `config`: the group `data`. `evaluated`: the split to evaluate a trained run on (val, test,
        or all, which needs one of them); None: to train on. `target`: the kind that the task needs.
        """

    @classmethod
    def size(cls, config: Any, enough: int | None = None) -> int | None:
        """Count the training images without reading them; None if only building the dataset tells.

        `enough`: a number at which counting may end.
        """
        return None

    def check_classes(self, trained: list[str], run: Path | None) -> None:
        """Raise ValueError if the classes are not those of a trained run, in the same order."""
        if trained != self.target_names:
            difference = class_difference(trained, self.target_names)
            raise ValueError(f"data: expected the same classes as in the run {run} ({difference})")


class InMemory:
    """A split that fits in memory. Reading a batch is one indexing operation, which worker
    processes would only slow down.
    """

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        """images: uint8 [N, C, H, W]; labels: the targets, [N, …]."""
        self.images, self.labels = images, labels

    @staticmethod
    def of(split: Split, size: tuple[int, ...] | None = None) -> InMemory | None:
        """Return the images and labels that a split holds in memory: itself, or its attribute
        `rows`; None if it has none.

        `size` (height, width): None also if the images of `rows` have another size, and would have
        to be resized.
        """
        rows = getattr(split, "rows", split)
        if not isinstance(rows, InMemory):
            return None
        return rows if rows is split or size in (None, rows.images.shape[2:]) else None

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Sample:
        label = self.labels[index]
        return self.images[index], label if label.ndim else label.item()


def as_size(sides: Any) -> tuple[int, int]:
    """Return height and width of a value of data.image_size: a side of a square, or both sides."""
    height, width = (sides, sides) if isinstance(sides, int) else sides
    return int(height), int(width)


def image_files(folder: Path) -> Iterator[Path]:
    """Yield the image files below `folder` in a fixed order. Follows each link to a folder once."""
    seen: set[tuple[int, int]] = set()
    for directory, subdirectories, files in os.walk(folder, followlinks=True):
        status = Path(directory).stat()
        # A link to a folder above.
        if (status.st_dev, status.st_ino) in seen:
            subdirectories.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        subdirectories.sort()
        for name in sorted(files):
            if name.lower().endswith(IMAGE_SUFFIXES) and not name.startswith("."):
                yield Path(directory, name)


def class_difference(trained: list[str], data: list[str]) -> str:
    """Describe the difference between the classes of trained weights and of the data: counts and a
    few names.
    """
    parts = []
    for owner, names, others in (
        ("trained weights", trained, set(data)),
        ("data", data, set(trained)),
    ):
        if only := [name for name in names if name not in others]:
            parts.append(f"{len(only)} of {len(names)} only in the {owner}: {first(only)}")
    return "; ".join(parts) or "the same names in another order"


def train_labels(split: Split, chosen: Tensor | None) -> Tensor | None:
    """Return the labels of a split, or of its `chosen` images: [N] or [N, classes]. None if the
    split does not list them.
    """
    import torch

    files = getattr(split, "files", None)
    listed = [label for _, label in files] if files else getattr(split, "labels", None)
    # The label of an image with a mask is the name of a file.
    if listed is None or (files and isinstance(listed[0], str)):
        return None
    # Splits of tar files have a numpy array.
    labels = torch.as_tensor(listed)
    return labels if chosen is None else labels[chosen]


def split_fingerprint(*splits: Split) -> str:
    """Return a hash of all images of `splits`, which moving an image between these splits does not
    change.

    For files, relative paths and labels are hashed; for tensors, shapes and labels; else the
    length. No image is read. 1.3 million files take about a second.
    """
    entries: list[str] = [str(sum(map(len, splits)))]
    files: list[tuple[Path, int]] = [
        entry for split in splits for entry in getattr(split, "files", None) or ()
    ]
    if files:
        paths = [os.fspath(path) for path, _ in files]
        # Relative to the deepest common folder, so that copies of the data in two places are equal.
        # commonpath() takes seconds for a million paths; here the common prefix of characters is
        # cut at its last separator.
        start = os.path.commonprefix(paths).rfind(os.sep) + 1  # noqa: RUF071
        lines = (f"{path[start:]}\0{label}" for path, (_, label) in zip(paths, files, strict=True))
        entries += lines if len(splits) == 1 else sorted(lines)
    for split in splits:
        if isinstance(split, InMemory):
            digest = hashlib.sha256(split.labels.numpy().tobytes()).hexdigest()
            entries.append(f"{tuple(split.images.shape)} {digest}")
    return hashlib.sha256("\n".join(entries).encode("utf-8", "surrogateescape")).hexdigest()[:16]


def data_fingerprints(dataset: ImageDataset) -> dict[str, str]:
    """Return the fingerprint of each split by name, and under `all` the fingerprint of all images
    together.
    """
    splits = {"train": dataset.train, "val": dataset.val, "test": dataset.test}
    present = {name: split for name, split in splits.items() if split is not None}
    return {"all": split_fingerprint(*present.values())} | {
        name: split_fingerprint(split) for name, split in present.items()
    }

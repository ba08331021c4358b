"""Interface of datasets, whose splits return samples by index. This module does not
import torch.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias

from timm_parallel.data.file_list import FileList
from timm_parallel.machine.text import first, for_terminal, similar_names

if TYPE_CHECKING:
    from torch import Tensor

Sample: TypeAlias = "tuple[Tensor, Any]"
IMAGE_SUFFIXES = (
    *(".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".apng", ".bmp", ".gif", ".tif", ".tiff"),
    *(".webp", ".avif", ".ppm", ".pgm", ".pbm", ".pnm", ".pfm"),
)
# Names that Pillow gives to the accepted image formats. Pillow ignores the suffix of a file. For
# other formats it may start a program, such as Ghostscript for PostScript.
IMAGE_FORMATS = ("JPEG", "PNG", "BMP", "GIF", "TIFF", "WEBP", "AVIF", "PPM")
# Folders, in lower case, that operating systems and storage devices create next to the files of a
# user. Their images are previews, old versions or deleted images.
SYSTEM_FOLDERS = (
    *("__macosx", "@eadir", "#recycle", "#snapshot", "@recycle", "@recently-snapshot"),
    *("$recycle.bin", "system volume information", "lost+found"),
)


class Split(Protocol):
    """One split of a dataset. An index returns a uint8 image [C, H, W] and its target, or a
    dictionary of further fields of the batch.

    A training split may have a method `stream(epoch)` instead of an index. It yields the samples in
    the order of training, as many as `len()` declares. Each process reads the whole stream and
    keeps its part, so reading should be cheap, and the same epoch must yield the same samples.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sample: ...


class ImageDataset:
    """Base class of datasets, with a train split, a val split and an optional test split.

    The constructor of a subclass takes the group `data` of the config, and data.kwargs as keyword
    arguments. Parameters of these names get more: `target`, the kind of target that the task needs,
    and `trained_names`, the class names of the run to evaluate, or None.
    """

    # Kinds of targets that this dataset can return. A task declares in Task.target which of them it
    # needs.
    targets: ClassVar[tuple[str, ...]] = ("label",)
    # Value of a mask pixel that belongs to no class.
    ignored: ClassVar[int] = 255

    # Names of the outputs of the model: class names, or columns of numbers for regression.
    target_names: list[str]
    in_chans: int = 3
    # Size of the images in pixels: one side of a square, or height and width. None: the images
    # differ in size, and the transform resizes them.
    image_size: int | tuple[int, int] | None = None
    # Mean and standard deviation per channel, for pixel values from 0 to 1. None: use those of the
    # pretrained model.
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    train: Split
    # The val split may be None only when a trained run is evaluated on a folder without val/.
    val: Split
    test: Split | None = None
    # Number of files and folders below data.root that were left out, by their suffix or kind.
    left_out: Counter[str] = Counter()

    # The modules of the library's datasets import torch only inside functions, because a wrong
    # data.root is reported before torch is imported.

    @classmethod
    def check(cls, config: Any, evaluated: str | None = None, target: str = "label") -> None:
        """Raise ValueError if the data cannot be used. A check should read as few files as
        possible.

        `config`: the group `data` of the config. `evaluated`: the split on which a trained run will
        be evaluated (val, test or all); None for training. `all` needs at least one of val and
        test. `target`: the kind of target that the task needs.
        """

    @classmethod
    def size(cls, config: Any, enough: int | None = None) -> int | None:
        """Count the training images without reading them.

        Returns None if the number is unknown until the dataset is built. `enough`: the count may
        stop when it reaches this number.
        """
        return None

    def notes(self, target: str) -> list[str]:
        """Describe what was left out, guessed or changed in the data, one sentence each.

        Rank 0 logs these notes before training, and check_data.py prints them. So this method may
        read a few files, but not all. `target`: the kind of target that the task needs.
        """
        notes = left_out_notes(self.left_out)
        labels = train_labels(self.train, None) if target in ("label", "labels") else None
        if labels is not None:
            # Images have one class number, or 0 and 1 for each class.
            rows = labels if labels.ndim == 1 else labels.nonzero()[:, 1]
            present = set(rows.unique().tolist())
            absent = [name for n, name in enumerate(self.target_names) if n not in present]
            notes += absent_note(absent, self.target_names, "image")
        if target != "numbers" and (alike := similar_names(self.target_names)):
            notes.append(alike)
        # Splits of image files have this method.
        pixel_notes = getattr(self.train, "pixel_notes", None)
        return [*notes, *(() if pixel_notes is None else pixel_notes())]


class InMemory:
    """A split whose images and labels are tensors in memory.

    A loader reads a whole batch by indexing these tensors. Worker processes would only make the
    loader slower.
    """

    def __init__(self, images: Tensor, labels: Any) -> None:
        """Store the images, uint8 [N, C, H, W], and their labels: a tensor [N, …], or a dictionary
        of such tensors by the name of their field.
        """
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Sample:
        if isinstance(self.labels, dict):
            return self.images[index], {name: of[index] for name, of in self.labels.items()}
        label = self.labels[index]
        return self.images[index], label if label.ndim else label.item()


def check_classes(dataset: ImageDataset, trained: list[str], owner: str) -> None:
    """Raise ValueError if the class names of a dataset differ from those of trained weights, or are
    in another order. `owner`: the run or checkpoint with the weights, for the message.
    """
    if trained != dataset.target_names:
        difference = class_difference(trained, dataset.target_names)
        raise ValueError(
            f"data: the class names are not those of {owner} ({difference}), so labels would mean "
            "other classes; use data with the same classes, or start a new run"
        )


def in_memory(split: Split, size: tuple[int, ...] | None = None) -> InMemory | None:
    """Return the images and labels that a split holds in memory, or None if it reads files.

    The split may itself be an InMemory object, or have one as its attribute `rows`. `size`:
    height and width that the model needs. If the images in `rows` have another size, return
    None, because the split then resizes each image when it is read.
    """
    rows = getattr(split, "rows", split)
    # A subclass may change images when it reads them.
    if not isinstance(rows, InMemory) or type(rows).__getitem__ is not InMemory.__getitem__:
        return None
    return rows if rows is split or size in (None, rows.images.shape[2:]) else None


def as_size(sides: int | Sequence[int]) -> tuple[int, int]:
    """Return height and width in pixels for a value of data.image_size, which is one side of a
    square or both sides.
    """
    height, width = (sides, sides) if isinstance(sides, int) else sides
    return int(height), int(width)


def is_hidden(name: str) -> bool:
    """Return True for the name of a hidden file or folder, or of a folder of the system."""
    return name.startswith(".") or name.lower() in SYSTEM_FOLDERS


def image_files(folder: Path, left_out: Counter[str] | None = None) -> Iterator[Path]:
    """Yield the paths of all image files below `folder`, always in the same order.

    Symbolic links to folders are followed. Each folder is visited once, even if a link leads back
    to it. Hidden folders, folders of the system and folders that cannot be listed are skipped.
    `left_out` counts these folders by name, and files that are not images by suffix.
    """
    left_out = Counter() if left_out is None else left_out

    def skip(error: OSError) -> None:
        left_out[f"unreadable folder {error.filename}"] += 1

    seen: set[tuple[int, int]] = set()
    for directory, subdirectories, files in os.walk(folder, onerror=skip, followlinks=True):
        status = Path(directory).stat()
        # Skip a folder that was visited before: a symbolic link may lead back to a parent folder.
        if (status.st_dev, status.st_ino) in seen:
            subdirectories.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        left_out.update(f"folder {name}" for name in subdirectories if is_hidden(name))
        subdirectories[:] = sorted(name for name in subdirectories if not is_hidden(name))
        for name in sorted(files):
            if name.startswith("."):
                continue
            path = Path(directory, name)
            if name.lower().endswith(IMAGE_SUFFIXES):
                yield path
            else:
                is_broken = not path.suffix and not path.exists()
                left_out["broken link" if is_broken else path.suffix.lower() or "no suffix"] += 1


def left_out_notes(left_out: Counter[str]) -> list[str]:
    """Build the note that names the files that `image_files` left out, if there are any."""
    counts = [for_terminal(f"{kind} ({count})") for kind, count in left_out.most_common()]
    return [f"left out of the images: {first(counts, 8)}"] if counts else []


def absent_note(absent: list[str], names: list[str], item: str) -> list[str]:
    """Build the note that training has no `item`, such as an image, of the classes `absent`."""
    if not absent:
        return []
    return [f"no training {item} of {len(absent)} of {len(names)} classes: {first(absent)}"]


def class_difference(trained: list[str], data: list[str]) -> str:
    """Describe in one phrase how the classes of trained weights and of the data differ.

    The phrase states numbers of classes and a few of their names.
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
    """Return the labels of the images of a split as a tensor [N] or [N, classes].

    `chosen`: indices of the images whose labels are returned; None: all images. Returns None if the
    split has no list of labels.
    """
    import torch

    files = _columns(split)[1]
    listed = files or getattr(split, "labels", None)
    # A segmentation dataset has no labels, because the second entry of each file is the path of its
    # mask.
    if listed is None or isinstance(listed, dict) or (files and isinstance(listed[0], str)):
        return None
    labels = torch.as_tensor(listed)
    return labels if chosen is None else labels[chosen]


def _columns(split: Split) -> tuple[list[str], list[Any]]:
    """Return the paths and the labels of a split of image files. Both are empty for other
    splits.
    """
    files = getattr(split, "files", None) or ()
    if isinstance(files, FileList):
        return files.columns()
    return [os.fspath(path) for path, _ in files], [label for _, label in files]


def split_fingerprint(*splits: Split) -> str:
    """Compute a hash that identifies the images and labels of `splits` together.

    The hash stays the same if an image moves from one of these splits to another. For image files,
    relative paths and labels are hashed. For tensors, shapes and labels are hashed. For other
    splits, only the number of images is hashed. No image is read. 1.3 million files take about a
    second.
    """
    entries: list[str] = [str(sum(map(len, splits)))]
    paths, labels = [], []
    for split in splits:
        of_split = _columns(split)
        paths += of_split[0]
        labels += of_split[1]
    if paths:
        # Hash paths relative to the deepest common folder, so that copies of the data in two places
        # have the same fingerprint. os.path.commonpath() takes seconds for a million paths. Cutting
        # the common prefix at its last separator gives the same folder faster.
        start = os.path.commonprefix(paths).rfind(os.sep) + 1  # noqa: RUF071
        lines = (f"{path[start:]}\0{label}" for path, label in zip(paths, labels, strict=True))
        entries += lines if len(splits) == 1 else sorted(lines)
    for split in splits:
        if isinstance(split, InMemory):
            fields = split.labels if isinstance(split.labels, dict) else {"": split.labels}
            digest = hashlib.sha256(b"".join(of.numpy().tobytes() for of in fields.values()))
            entries.append(f"{tuple(split.images.shape)} {digest.hexdigest()}")
    return hashlib.sha256("\n".join(entries).encode("utf-8", "surrogateescape")).hexdigest()[:16]


def data_fingerprints(dataset: ImageDataset) -> dict[str, str]:
    """Return a dictionary from the name of each split to its fingerprint, a hash of its images and
    labels.

    The key `all` holds the fingerprint of the images of all splits together.
    """
    splits = {"train": dataset.train, "val": dataset.val, "test": dataset.test}
    present = {name: split for name, split in splits.items() if split is not None}
    return {"all": split_fingerprint(*present.values())} | {
        name: split_fingerprint(split) for name, split in present.items()
    }

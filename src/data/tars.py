"""Images inside tar files, read by index without unpacking.

Two layouts: class folders (`cat/1.jpg`; in a tar without folders the tar's own name is the class), and webdataset's, in
which an image and its label share a name (`000123.jpg`, `000123.cls`).

timm's own readers are not used: the one for tars unpickles a cache that lies beside the data, the one for webdataset is a
stream, in which no image has a number: a run could neither divide it exactly among ranks nor go on in the middle of an epoch.
"""

from __future__ import annotations

import re
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from src.data.datasets import Sample
from src.data.folders import IMAGE_SUFFIXES
from src.data.images import decode

SYNONYMS = {"validation": ("validation", "val", "valid"), "val": ("val", "validation", "valid")}
# (key, suffix) of a member's name: webdataset's key ends at the first dot of the file's name. Hidden files have none.
KEY_AND_SUFFIX = re.compile(r"((?:.*/)?[^/.]+)\.([^/]*)")


class Member(NamedTuple):
    """An image in a tar."""

    tar: int  # which of the split's tars
    offset: int  # bytes
    size: int  # bytes
    label: str


def read_splits(root: Path, names: list[str], webdataset: bool) -> tuple[list[TarSplit], list[str]]:
    """The splits of these names, and the classes of the first: of webdataset, whose labels are numbers, 0 up to the largest."""
    tars = [find_tars(root, name) for name in names]
    for name, paths in zip(names[1:], tars[1:], strict=True):
        if name != names[0] and (both := sorted({*paths} & {*tars[0]})):
            raise ValueError(
                f"data.root={root}: {both[0].name} is of the splits {names[0]} and {name}; name their tars in "
                "data.kwargs.train_split and val_split, with * or {0000..0146} for several"
            )
    members = [_read_index(paths, webdataset) for paths in tars]
    labels = {member.label for member in members[0]}
    classes = [str(number) for number in range(max(map(int, labels)) + 1)] if webdataset else sorted(labels)
    return [TarSplit(paths, found, classes) for paths, found in zip(tars, members, strict=True)], classes


class TarSplit:
    """One split: where every image lies, and its label."""

    def __init__(self, tars: list[Path], members: list[Member], classes: list[str]) -> None:
        numbers = {name: number for number, name in enumerate(classes)}
        self.tars = tars
        self.tar, self.offset, self.size = np.array([member[:3] for member in members]).T
        try:
            self.labels = np.array([numbers[member.label] for member in members])
        except KeyError as error:
            raise ValueError(f"{tars[0].parent}: the class {error} is in a split, but not in train") from None

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Sample:
        path, offset = self.tars[self.tar[index]], int(self.offset[index])
        with open(path, "rb", buffering=0) as tar:
            tar.seek(offset)
            encoded = tar.read(int(self.size[index]))
        return decode(encoded, f"{path} at byte {offset}"), int(self.labels[index])


def find_tars(root: Path, split: str) -> list[Path]:
    """`<root>/<split>.tar`, `<root>/<split>/*.tar`, `<root>/*<split>*.tar`, or a pattern such as `train-{0000..0146}.tar`."""
    if re.search(r"[*{]", split):
        found = [path for pattern in _expand_braces(split) for path in sorted(root.glob(pattern)) or [root / pattern]]
        if missing := [path for path in found if not path.is_file()]:
            raise ValueError(f"data.root={root}: {missing[0].name} of {split} is not there")
        return found
    for name in SYNONYMS.get(split, (split,)):
        for pattern in (f"{name}.tar", f"{name}/*.tar", f"*{name}*.tar"):
            if found := sorted(root.glob(pattern)):
                return found
    raise ValueError(
        f"data.root={root}: no tar of the split {split}; expected {root}/{split}.tar, {root}/{split}/*.tar or "
        f"{root}/*{split}*.tar"
    )


def _read_index(tars: list[Path], webdataset: bool) -> list[Member]:
    """Read the headers of all members; the tars must be uncompressed."""
    members: list[Member] = []
    for number, path in enumerate(tars):
        try:
            with tarfile.open(path, "r:") as archive:
                labelled = _labelled_by_cls(path, archive) if webdataset else _labelled_by_folder(path, archive)
                members += [Member(number, image.offset_data, image.size, label) for image, label in labelled]
        except (OSError, tarfile.TarError) as error:
            raise ValueError(f"{path}: not readable as an uncompressed tar ({error})") from None
    if not members:
        missing = "images with a .cls of the same name" if webdataset else "images"
        raise ValueError(f"{tars[0]}: no {missing} in it ({', '.join(IMAGE_SUFFIXES)})")
    return members


def _labelled_by_folder(path: Path, archive: tarfile.TarFile) -> Iterator[tuple[tarfile.TarInfo, str]]:
    for member in archive:
        place = Path(member.name)
        if member.isfile() and place.name.lower().endswith(IMAGE_SUFFIXES) and not place.name.startswith("."):
            yield member, place.parent.name or path.stem


def _labelled_by_cls(path: Path, archive: tarfile.TarFile) -> Iterator[tuple[tarfile.TarInfo, str]]:
    images: dict[str, tarfile.TarInfo] = {}
    labels: dict[str, str] = {}
    for member in archive:
        found = KEY_AND_SUFFIX.fullmatch(member.name)
        if found is None:
            continue
        key, suffix = found[1], found[2].lower()
        if f".{suffix}".endswith(IMAGE_SUFFIXES):
            images[key] = member
        elif suffix == "cls":
            text = archive.extractfile(member)
            labels[key] = "" if text is None else text.read(20).decode("ascii", "replace").strip()
    for key, image in images.items():
        if not labels.get(key, "").isdigit():
            raise ValueError(f"{path}: {image.name} has no label: {key}.cls must hold a number")
        yield image, str(int(labels[key]))  # 007 is 7


def _expand_braces(pattern: str) -> list[str]:
    """`a-{08..10}.tar` -> a-08.tar, a-09.tar, a-10.tar."""
    found = re.search(r"\{(\d+)\.\.(\d+)\}", pattern)
    if found is None:
        return [pattern]
    first, last = found.groups()
    numbers = (str(number).zfill(len(first)) for number in range(int(first), int(last) + 1))
    return [one for number in numbers for one in _expand_braces(pattern.replace(found[0], number, 1))]

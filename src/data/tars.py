"""Images inside tar files, read by index without unpacking.

Two layouts: class folders (`cat/1.jpg`; in a tar without folders the tar's own name is the class), and webdataset's, in
which an image and its label share a name (`000123.jpg`, `000123.cls`).

timm's own readers are not used: the one for tars unpickles a cache that lies beside the data, the one for webdataset is a
stream, in which no image has a number, so that no epoch could be told from another or gone on with in its middle.
"""

from __future__ import annotations

import re
import tarfile
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from torch import Tensor

from src.data.folders import IMAGE_SUFFIXES
from src.data.images import decode

SYNONYMS = {"validation": ("validation", "val", "valid"), "val": ("val", "validation", "valid")}


@dataclass
class Members:
    """The images of some tars, in their order."""

    tars: list[Path]
    tar: list[int] = field(default_factory=list)  # index into tars
    offset: list[int] = field(default_factory=list)
    size: list[int] = field(default_factory=list)
    label: list[str] = field(default_factory=list)

    def add(self, tar: int, member: tarfile.TarInfo, label: str) -> None:
        self.tar.append(tar)
        self.offset.append(member.offset_data)
        self.size.append(member.size)
        self.label.append(label)


class TarSplit:
    """One split: where every image lies, and its label."""

    def __init__(self, members: Members, classes: list[str]) -> None:
        numbers = {name: number for number, name in enumerate(classes)}
        self.tars = members.tars
        self.tar, self.offset, self.size = (np.array(x) for x in (members.tar, members.offset, members.size))
        try:
            self.labels = np.array([numbers[label] for label in members.label])
        except KeyError as error:
            raise ValueError(f"{members.tars[0].parent}: the class {error} is in a split, but not in train") from None

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path, offset = self.tars[self.tar[index]], int(self.offset[index])
        with open(path, "rb", buffering=0) as tar:
            tar.seek(offset)
            encoded = tar.read(int(self.size[index]))
        return decode(encoded, f"{path} at byte {offset}"), int(self.labels[index])


def find_tars(root: Path, split: str) -> list[Path]:
    """`<root>/<split>.tar`, `<root>/<split>/*.tar`, `<root>/*<split>*.tar`, or a pattern such as `train-{0000..0146}.tar`."""
    if re.search(r"[*{]", split):
        found = [path for pattern in _expand_braces(split) for path in sorted(root.glob(pattern)) or [root / pattern]]
        missing = [path for path in found if not path.is_file()]
        if missing:
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


def read_index(tars: list[Path], webdataset: bool) -> Members:
    """Read the headers of all members; the tars must be uncompressed."""
    members = Members(tars)
    for number, path in enumerate(tars):
        try:
            with tarfile.open(path, "r:") as archive:
                if webdataset:
                    _add_pairs(members, number, archive)
                else:
                    _add_folders(members, number, archive)
        except (OSError, tarfile.TarError) as error:
            raise ValueError(f"{path}: not readable as an uncompressed tar ({error})") from None
    if not members.label:
        wanted = "images with a .cls of the same name" if webdataset else "images"
        raise ValueError(f"{tars[0]}: no {wanted} in it ({', '.join(IMAGE_SUFFIXES)})")
    return members


def class_names(members: Members) -> list[str]:
    """Sorted names; for webdataset, whose labels are numbers, 0 up to the largest."""
    if all(label.isdigit() for label in members.label):
        return [str(number) for number in range(max(map(int, members.label)) + 1)]
    return sorted(set(members.label))


def _add_folders(members: Members, number: int, archive: tarfile.TarFile) -> None:
    for member in archive:
        if member.isfile() and member.name.lower().endswith(IMAGE_SUFFIXES):
            members.add(number, member, Path(member.name).parent.name or members.tars[number].stem)


def _add_pairs(members: Members, number: int, archive: tarfile.TarFile) -> None:
    """The members of a sample are neighbours."""
    images: dict[str, tarfile.TarInfo] = {}
    labels: dict[str, str] = {}
    for member in archive:
        key, _, suffix = member.name.partition(".")
        if f".{suffix.lower()}".endswith(IMAGE_SUFFIXES):
            images[key] = member
        elif suffix.lower() == "cls":
            text = archive.extractfile(member)
            labels[key] = "" if text is None else text.read(20).decode("ascii", "replace").strip()
    for key, image in images.items():
        if not labels.get(key, "").isdigit():
            raise ValueError(f"{members.tars[number]}: {image.name} has no label: {key}.cls must hold a number")
        members.add(number, image, labels[key])


def _expand_braces(pattern: str) -> list[str]:
    """`a-{08..10}.tar` -> a-08.tar, a-09.tar, a-10.tar."""
    found = re.search(r"\{(\d+)\.\.(\d+)\}", pattern)
    if found is None:
        return [pattern]
    first, last = found.groups()
    numbers = (str(number).zfill(len(first)) for number in range(int(first), int(last) + 1))
    return [one for number in numbers for one in _expand_braces(pattern.replace(found[0], number, 1))]

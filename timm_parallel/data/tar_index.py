"""Dataset of images in tar files, which are read by index without unpacking."""

# Two layouts are supported. In the first, the folder of an image names its class (`cat/1.jpg`); in
# a tar without folders, the name of the tar file is the class. In the second, that of webdataset,
# an image and its label have the same name (`000123.jpg`, `000123.cls`). The readers of timm are
# not used. The tar reader of timm unpickles a cache file next to the data, which may run code. The
# webdataset reader of timm is a stream without image indices, so a run could not divide the images
# exactly among ranks, nor continue inside an epoch.

from __future__ import annotations

import re
import tarfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from timm_parallel.data.dataset import IMAGE_SUFFIXES, ImageDataset, is_hidden
from timm_parallel.data.file_list import Member
from timm_parallel.keys import DataConfig

SYNONYMS = {"validation": ("validation", "val", "valid"), "val": ("val", "validation", "valid")}
# Split the name of a file in a tar into key and suffix. As in webdataset, the key ends at the first
# dot of the file name. Hidden files do not match.
KEY_AND_SUFFIX = re.compile(r"((?:.*/)?[^/.]+)\.([^/]*)")
LabeledImages = Iterator[tuple[tarfile.TarInfo, str]]


class TarDataset(ImageDataset):
    """Dataset of tar files: `data=timm data.name=tar data.root=<folder>`, or `data.name=wds` for
    webdataset.

    The names or patterns of the tar files of each split are given in data.kwargs.
    """

    def __init__(
        self,
        config: DataConfig,
        train_split: str = "train",
        val_split: str = "validation",
        test_split: str | None = None,
    ) -> None:
        from timm_parallel.data.decode import TarSplit

        root, webdataset = Path(str(config.root)), config.name.partition("/")[0] == "wds"
        names = [name for name in (train_split, val_split, test_split) if name is not None]
        tars = [find_tars(root, name) for name in names]
        _check_overlap(root, names, tars)
        self.left_out = Counter()
        members = [_read_index(paths, webdataset, self.left_out) for paths in tars]
        labels = {label for *_, label in members[0]}
        # In webdataset the labels are class numbers, and a number may have no image.
        self.target_names = (
            [str(number) for number in range(max(map(int, labels)) + 1)]
            if webdataset
            else sorted(labels)
        )
        splits = [
            TarSplit(paths, index, self.target_names, config.max_value)
            for paths, index in zip(tars, members, strict=True)
        ]
        self.train, self.val = splits[:2]
        self.test = splits[2] if test_split is not None else None

    @classmethod
    def check(cls, config: DataConfig, evaluated: str | None = None, target: str = "label") -> None:
        """Raise ValueError if the folder of the tar files does not exist."""
        if not (config.root and Path(config.root).is_dir()):
            raise ValueError(
                f"data.root={config.root}: no such folder; give the folder with the tar files"
            )


def _check_overlap(root: Path, names: list[str], tars: list[list[Path]]) -> None:
    """Raise ValueError if a tar file of the training split also belongs to another split."""
    for name, paths in zip(names[1:], tars[1:], strict=True):
        if name != names[0] and (both := sorted({*paths} & {*tars[0]})):
            raise ValueError(
                f"data.root={root}: the tar file {both[0].name} matches the splits {names[0]} and "
                f"{name}; set data.kwargs.train_split and data.kwargs.val_split to the names of "
                f"their tar files, or to patterns such as train-{{0000..0146}}.tar"
            )


def find_tars(root: Path, split: str) -> list[Path]:
    """Find the tar files of a split in the folder `root`.

    `split`: the name of a split, or a file pattern such as `train-{0000..0146}.tar`. A name finds
    `<split>.tar`, else `<split>/*.tar`, else `*<split>*.tar`.
    """
    if re.search(r"[*{]", split):
        matches = [
            path
            for name in _expand_braces(split)
            for path in sorted(root.glob(name)) or [root / name]
        ]
        if missing := [path for path in matches if not path.is_file()]:
            raise ValueError(
                f"data.root={root}: has no tar file {missing[0].name}, which the pattern {split} "
                "names; add the file, or change the pattern"
            )
        return matches
    for name in SYNONYMS.get(split, (split,)):
        for pattern in (f"{name}.tar", f"{name}/*.tar", f"*{name}*.tar"):
            if matches := sorted(root.glob(pattern)):
                return matches
    raise ValueError(
        f"data.root={root}: no tar of the split {split}; expected {root}/{split}.tar, "
        f"{root}/{split}/*.tar or {root}/*{split}*.tar"
    )


def _read_index(tars: list[Path], webdataset: bool, left_out: Counter[str]) -> list[Member]:
    """List the position and the label of every image in uncompressed tar files.

    Only the headers of the tar files are read, and no image. `left_out` counts the other files by
    suffix.
    """
    members: list[Member] = []
    for number, path in enumerate(tars):
        try:
            with tarfile.open(path, "r:") as archive:
                labeled = (
                    _labeled_by_cls(path, archive, left_out)
                    if webdataset
                    else _labeled_by_folder(path, archive, left_out)
                )
                members += [
                    (number, image.offset_data, image.size, label) for image, label in labeled
                ]
        except (OSError, tarfile.TarError) as error:
            raise ValueError(
                f"{path}: not readable as an uncompressed tar ({error}); replace it"
            ) from None
    if not members:
        missing = "images with a .cls of the same name" if webdataset else "images"
        raise ValueError(
            f"{tars[0]}: the tar file has no {missing}; expected files with one of "
            f"{', '.join(IMAGE_SUFFIXES)}"
        )
    return members


def _labeled_by_folder(
    path: Path, archive: tarfile.TarFile, left_out: Counter[str]
) -> LabeledImages:
    for member in archive:
        name = Path(member.name)
        if not member.isfile() or any(is_hidden(part) for part in name.parts):
            continue
        if name.name.lower().endswith(IMAGE_SUFFIXES):
            yield member, name.parent.name or path.stem
        else:
            left_out[name.suffix.lower() or "no suffix"] += 1


def _labeled_by_cls(path: Path, archive: tarfile.TarFile, left_out: Counter[str]) -> LabeledImages:
    images: dict[str, tarfile.TarInfo] = {}
    labels: dict[str, str] = {}
    for member in archive:
        match = KEY_AND_SUFFIX.fullmatch(member.name)
        if match is None or any(is_hidden(part) for part in Path(match[1]).parts):
            continue
        key, suffix = match[1], match[2].lower()
        if f".{suffix}".endswith(IMAGE_SUFFIXES):
            images[key] = member
        elif suffix != "cls":
            left_out[f".{suffix}"] += 1
        elif (text := archive.extractfile(member)) is not None:
            labels[key] = text.read(20).decode("ascii", "replace").strip()
    for key, image in images.items():
        if not labels.get(key, "").isdigit():
            raise ValueError(f"{path}: {image.name} has no label: {key}.cls must hold a number")
        # Remove leading zeros, because the label 007 is class 7.
        yield image, str(int(labels[key]))


def _expand_braces(pattern: str) -> list[str]:
    """Expand a pattern such as `a-{08..10}.tar` to a-08.tar, a-09.tar and a-10.tar."""
    match = re.search(r"\{(\d+)\.\.(\d+)\}", pattern)
    if match is None:
        return [pattern]
    first, last = match.groups()
    numbers = [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return [
        name for number in numbers for name in _expand_braces(pattern.replace(match[0], number, 1))
    ]

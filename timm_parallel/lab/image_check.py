"""Check the images of a dataset. Report unreadable files, exact duplicates, leaks across splits,
class counts and image sizes.
"""

from __future__ import annotations

import hashlib
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import pandas as pd
from rich.console import Console
from rich.progress import track
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms.functional import to_pil_image

from timm_parallel.data.dataset import ImageDataset
from timm_parallel.data.decode import open_image
from timm_parallel.errors import UnreadableImageError
from timm_parallel.lab.image_page import jpeg_base64, render_page
from timm_parallel.machine.hardware import cores
from timm_parallel.machine.process import WORKER_START
from timm_parallel.machine.text import first, for_terminal

ABSENT = "classes without an image"
# Most lines that the terminal shows of a table, or of one kind of problem. The JSON file has all.
MAX_LINES = 20
# Most images that are shown of a set of equal images, and of each class.
MAX_IMAGES = 4


@dataclass(frozen=True)
class CheckedImage:
    """One image of a dataset with its labels, size and checksum, or the reason why the file cannot
    be read.
    """

    split: str
    index: int
    file: str
    labels: tuple[str, ...]
    width: int = 0
    height: int = 0
    # PIL's name of the color mode, such as RGB, L or RGBA.
    mode: str = ""
    # Hash of the bytes of the file. If the image does not come from a file, hash of the pixels.
    digest: str = ""
    # The reason why the image cannot be read. Empty if it was read.
    error: str = ""


@dataclass
class Report:
    """Problems and statistics of all images of a dataset."""

    # Name of a statistic -> split -> value.
    measures: dict[str, dict[str, Any]]
    # Class -> split -> number of images. The rarest class comes first.
    classes: dict[str, dict[str, int]]
    # Kind of problem -> list of cases. A case is an unreadable image or several equal images. If a
    # group of images is in several splits, the case has one image of each split.
    problems: dict[str, list[list[CheckedImage]]]
    # Class -> images that the HTML page shows.
    samples: dict[str, list[CheckedImage]]
    # What the dataset left out, guessed or changed, one sentence each.
    notes: list[str] = field(default_factory=list)

    @property
    def has_problems(self) -> bool:
        return any(self.problems.values()) or any(self.measures.get(ABSENT, {}).values())


class ImageReader(Dataset[CheckedImage]):
    """Dataset that reads the images of all splits as training does. Worker processes of a
    DataLoader use it.
    """

    def __init__(self, dataset: ImageDataset, target: str) -> None:
        self.dataset, self.target = dataset, target

    def __getitem__(self, place: tuple[str, int]) -> CheckedImage:
        name, index = place
        split: Any = getattr(self.dataset, name)
        files = getattr(split, "files", None)
        path, label = files[index] if files else (Path(f"image {index}"), ())
        try:
            image, label = split[index]
        except UnreadableImageError as error:
            return CheckedImage(name, index, str(path), self._label_names(label), error=str(error))
        content, mode = (
            image.numpy().tobytes() + str(image.shape).encode(),
            f"{len(image)} channels",
        )
        if files:
            content = path.read_bytes()
            with suppress(Exception), open_image(content) as header:
                mode = header.mode
        _, height, width = image.shape
        digest = hashlib.blake2b(content, digest_size=16).hexdigest()
        return CheckedImage(
            name, index, str(path), self._label_names(label), width, height, mode, digest
        )

    def _label_names(self, label: Any) -> tuple[str, ...]:
        """Convert the target of an image to names of labels. A target that is not a class, such as
        a number, becomes its text.
        """
        names = self.dataset.target_names
        if self.target == "label":
            return (names[label],) if isinstance(label, int) else ()
        if self.target == "mask":
            # Return the classes that occur in the mask. The mask of an unreadable file has none.
            present = label.unique().tolist() if hasattr(label, "unique") else ()
            return tuple(names[number] for number in present if number < len(names))
        if self.target != "labels":
            return (str(label),)
        return tuple(name for name, value in zip(names, label, strict=False) if value > 0.5)


def check_images(
    dataset: ImageDataset, target: str, groups: Mapping[str, str] | None = None
) -> Report:
    """Read every image of a dataset and return a report of its problems and statistics. One process
    per core reads the images.

    `target`: kind of target of the task, such as `label` or `mask`. `groups`: file -> group. All
    images of a group, such as one patient, belong into one split.
    """
    splits = [name for name in ("train", "val", "test") if getattr(dataset, name, None) is not None]
    places = [(name, index) for name in splits for index in range(len(getattr(dataset, name)))]
    loader = DataLoader(
        ImageReader(dataset, target),
        64,
        sampler=places,
        num_workers=cores(),
        multiprocessing_context=WORKER_START,
        collate_fn=list,
    )
    # Start the worker processes here, because the progress bar starts a thread. A process with
    # threads must not be forked.
    batches = iter(loader)
    shown = track(
        batches,
        "images",
        len(loader),
        console=Console(stderr=True),
        disable=not sys.stderr.isatty(),
    )
    images = [image for batch in shown for image in batch]
    report = summarize(dataset.target_names, splits, images, groups)
    return replace(report, notes=dataset.notes(target))


def summarize(
    target_names: list[str],
    splits: list[str],
    images: list[CheckedImage],
    groups: Mapping[str, str] | None = None,
) -> Report:
    """Build the report of a dataset from its checked images: the problems, and per split the
    numbers of images, sizes, color modes and classes.
    """
    of_class: dict[str, list[CheckedImage]] = {name: [] for name in target_names}
    for image in images:
        for label in of_class.keys() & set(image.labels):
            of_class[label].append(image)
    # The targets of a regression are numbers, not classes.
    if not any(of_class.values()):
        of_class = {}
    counts = {name: Counter(image.split for image in group) for name, group in of_class.items()}
    rarest_first = sorted(counts, key=lambda name: sorted(counts[name][split] for split in splits))
    classes = {name: {split: counts[name][split] for split in splits} for name in rarest_first}
    measures: dict[str, dict[str, Any]] = defaultdict(dict)
    for split in splits:
        readable = [image for image in images if image.split == split and not image.error]
        measures["images"][split] = sum(image.split == split for image in images)
        for side in ("width", "height"):
            values = [getattr(image, side) for image in readable] or [0]
            measures[f"{side}: min, median, max"][split] = [
                min(values),
                median(values),
                max(values),
            ]
        measures["modes"][split] = dict(Counter(image.mode for image in readable).most_common())
        if not counts:
            continue
        sizes = [count[split] for count in counts.values()]
        measures["images per class: min, median, max"][split] = [
            min(sizes),
            median(sizes),
            max(sizes),
        ]
        measures[ABSENT][split] = sum(not count[split] for count in counts.values())
    samples = {
        name: group[:: len(group) // MAX_IMAGES or 1][:MAX_IMAGES]
        for name, group in of_class.items()
    }
    return Report(dict(measures), classes, find_problems(images, groups or {}), samples)


def find_problems(
    images: list[CheckedImage], group_of: Mapping[str, str]
) -> dict[str, list[list[CheckedImage]]]:
    """Return the problems of a dataset, as a dictionary from the kind of problem to its cases. A
    case is an unreadable image, several equal images, or images of one group in several splits.
    """
    equal: dict[str, list[CheckedImage]] = defaultdict(list)
    for image in images:
        if not image.error:
            equal[image.digest].append(image)
    groups = [group for group in equal.values() if len(group) > 1]
    by_group: dict[str, dict[str, CheckedImage]] = defaultdict(dict)
    for image in images:
        if image.file in group_of:
            by_group[group_of[image.file]].setdefault(image.split, image)
    return {
        "unreadable": [[image] for image in images if image.error],
        "leaks across splits": [
            group for group in groups if len({image.split for image in group}) > 1
        ],
        "groups in two splits": [
            list(first_of.values()) for first_of in by_group.values() if len(first_of) > 1
        ],
        "duplicates in a split": [
            group for group in groups if len({image.split for image in group}) < len(group)
        ],
        "equal images, different labels": [
            group for group in groups if len({image.labels for image in group}) > 1
        ],
    }


def describe(image: CheckedImage) -> str:
    """Format an image as a line of text: its split, its file or the error if it cannot be read, and
    its labels.
    """
    return f"{image.split}: {image.error or image.file} ({', '.join(image.labels)})"


def show_check(report: Report) -> None:
    """Print the report on the images of a dataset as text."""
    lines = [f"note: {note}" for note in report.notes]
    for rows in filter(None, (report.measures, report.classes)):
        lines += [pd.DataFrame.from_dict(rows, orient="index").to_string(max_rows=MAX_LINES), ""]
    for kind, groups in report.problems.items():
        lines.append(f"{kind}: {len(groups)}")
        lines += [
            "  " + first([describe(image) for image in group], MAX_IMAGES)
            for group in groups[:MAX_LINES]
        ]
        if len(groups) > MAX_LINES:
            lines.append(f"  and {len(groups) - MAX_LINES} more")
    print(for_terminal("\n".join(lines)))


def write_page(report: Report, dataset: ImageDataset, page: Path) -> None:
    """Write the report on the images of a dataset as one HTML file, with thumbnails of problems and
    of each class.
    """

    def thumbnail(image: CheckedImage) -> str:
        pixels, _ = getattr(dataset, image.split)[image.index]
        picture = to_pil_image(pixels[:3]).convert("RGB")
        picture.thumbnail((96, 96))
        return jpeg_base64(picture)

    values = {"report": report, "describe": describe, "thumbnail": thumbnail}
    render_page("image_check.html.j2", page, **values)

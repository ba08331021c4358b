"""Check the images of a dataset. Report unreadable files, exact duplicates, leaks across splits,
class counts and image sizes.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
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
from timm_parallel.machine.platform import WORKER_START
from timm_parallel.machine.text import first, for_terminal

ABSENT, SPREAD = "classes without an image", "min, median, max"
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


# pandas stores texts with pyarrow, if it is installed, which takes no name that is not UTF-8.
@pd.option_context("mode.string_storage", "python")
def summarize(
    target_names: list[str],
    splits: list[str],
    images: list[CheckedImage],
    groups: Mapping[str, str] | None = None,
) -> Report:
    """Build the report of a dataset from its checked images: the problems, and per split the
    numbers of images, sizes, color modes and classes.
    """
    frame = pd.DataFrame(map(vars, images))
    problems = find_problems(frame, images, groups or {})
    readable = frame[frame["error"] == ""]
    parts = {split: readable[readable["split"] == split] for split in splits}
    sides: dict[str, dict[str, Any]] = {
        f"{side}: {SPREAD}": {split: _spread(part[side]) for split, part in parts.items()}
        for side in ("width", "height")
    }
    measures = {
        "images": {split: int((frame["split"] == split).sum()) for split in splits},
        **sides,
        "modes": {split: part["mode"].value_counts().to_dict() for split, part in parts.items()},
    }
    labeled = frame.explode("labels")
    counts = pd.crosstab(labeled["labels"], labeled["split"])
    counts = counts.reindex(index=target_names, columns=splits, fill_value=0)
    # The targets of a regression are numbers, not classes.
    if not counts.to_numpy().any():
        return Report(measures, {}, problems, {})
    measures[f"images per class: {SPREAD}"] = {split: _spread(counts[split]) for split in splits}
    measures[ABSENT] = (counts == 0).sum().to_dict()
    rarest_first = counts.loc[sorted(counts.index, key=lambda name: sorted(counts.loc[name]))]
    members, samples = labeled.groupby("labels").groups, {}
    for name in target_names:
        places = members.get(name, [])
        shown = places[:: len(places) // MAX_IMAGES or 1][:MAX_IMAGES]
        samples[name] = [images[place] for place in shown]
    return Report(measures, rarest_first.to_dict(orient="index"), problems, samples)


def _spread(values: pd.Series[int]) -> list[float]:
    return values.quantile([0, 0.5, 1], interpolation="lower").tolist()


def find_problems(
    frame: pd.DataFrame, images: list[CheckedImage], group_of: Mapping[str, str]
) -> dict[str, list[list[CheckedImage]]]:
    """Return the problems of a dataset, as a dictionary from the kind of problem to its cases. A
    case is an unreadable image, several equal images, or images of one group in several splits.

    `frame`: table with a row per image.
    """

    def repeated(rows: pd.DataFrame, key: str) -> list[list[CheckedImage]]:
        """Return the images of each value of a column that several rows have."""
        several = rows[rows.duplicated(key, keep=False)]
        return [[images[i] for i in group.index] for _, group in several.groupby(key, sort=False)]

    groups = repeated(frame[frame["error"] == ""], "digest")
    grouped = frame.assign(group=frame["file"].map(group_of)).dropna(subset="group")
    return {
        "unreadable": [[image] for image in images if image.error],
        "leaks across splits": [
            group for group in groups if len({image.split for image in group}) > 1
        ],
        "groups in two splits": repeated(grouped.drop_duplicates(["group", "split"]), "group"),
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


@pd.option_context("mode.string_storage", "python")
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

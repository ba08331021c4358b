"""Predict image files with a trained model. The predictions have the order of the files."""

from __future__ import annotations

import math
import os
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch.utils._pytree import tree_leaves, tree_map

from src.commands.load import Trained, load_trained
from src.data.transforms import OnImage, evaluation_transform
from src.tasks.images import ImageTask
from timm_parallel import (
    Batch,
    Files,
    Networks,
    Strategy,
    build_eval_loaders,
    evaluation_networks,
    find_task,
    load_config,
)

# Dictionary from the path of an image file to its prediction, a dictionary of plain values. The
# prediction is None if the file cannot be read.
Predictions = dict[str, dict[str, Any] | None]


def predict(
    run: Path,
    images: Path,
    strategy: Strategy,
    *,
    checkpoint: str | None = None,
    weights: str | None = None,
    topk: int = 5,
    batch_size: int = 64,
    workers: int | str = "auto",
    folder: Path | None = None,
) -> Predictions:
    """Predict image files, divided among the ranks. Return, on every rank, the predictions of all
    files. All ranks must call this function.

    `images`: a folder of images, or one image file. `checkpoint`: best, last or the path of a file;
    None: the one that result.json names. `weights`: model (raw) or ema (averaged); None: the set
    that checkpoint.metric names. `batch_size`: number of images that a rank predicts at once.
    `folder`: folder for predictions that are files, such as masks; None: write no files.
    """
    split = Files.below(images)
    notes = "; ".join(split.notes)
    if not split.files:
        raise ValueError(f"images={images}: no image in this folder; {notes or 'it is empty'}")
    if notes and strategy.group.is_first:
        print(f"note: {notes}", file=sys.stderr)
    paths = [path for path, _ in split.files]
    base = images if images.is_dir() else images.parent
    # Names for `Task.write`, which appends the endings of its files.
    names = [path.relative_to(base).with_suffix("").as_posix() for path in paths]
    # Check on one rank, because the first rank writes files before the last rank has started.
    if folder is not None and strategy.group.is_first:
        endings = find_task(load_config(run).train.task, ImageTask).endings
        _check_written_files(folder, [name + ending for name in names for ending in endings])
    trained = load_trained(run, checkpoint, weights, strategy.device)
    networks = evaluation_networks(trained.networks, trained.config, strategy)
    predictions: dict[int, dict[str, Any] | None] = {}
    hidden = not (strategy.group.is_first and sys.stderr.isatty())
    with closing(_loader(trained, split.files, strategy, batch_size, workers)) as loader:
        for batch in track(
            loader, "images", len(loader.sampler), console=Console(stderr=True), disable=hidden
        ):
            outputs, rows = _predict(networks, trained, batch, paths, topk)
            for place, number in enumerate(batch.target.tolist()):
                predictions[number] = rows[place]
                if folder is not None:
                    of_image = tree_map(lambda of, place=place: of[place], outputs)
                    # Outside of this mode, torch lets no task change its outputs in place.
                    with torch.inference_mode():
                        trained.task.write(of_image, paths[number], folder, names[number])
    for number in loader.unreadable:
        predictions[number] = None
    by_rank = strategy.group.gather(predictions)
    merged = {int(number): values for gathered in by_rank for number, values in gathered.items()}
    assert len(merged) == len(paths), f"{len(merged)} predictions for {len(paths)} files"
    return {str(path): merged[number] for number, path in enumerate(paths)}


def _check_written_files(folder: Path, files: list[str]) -> None:
    """Raise ValueError if a file of predictions would replace another one."""
    for file, count in Counter(files).items():
        if count > 1:
            raise ValueError(
                f"folder={folder}: {file} would be written for {count} images; rename one of them"
            )
        # Unlike Path.exists, lexists finds a link whose target is missing, too.
        if os.path.lexists(folder / file):
            raise ValueError(
                f"folder={folder}: {file} exists and would be overwritten; give a new folder"
            )


def _loader(
    trained: Trained,
    files: Sequence[tuple[Path, int]],
    strategy: Strategy,
    batch_size: int,
    workers: int | str,
) -> Any:
    """Build a loader of image files for prediction. It yields the index of a file in place of a
    label, so that each prediction can be assigned to its file.
    """
    channels = trained.preprocessing.input_size[0]
    if channels not in (1, 3):
        raise ValueError(
            f"run={trained.run}: the model reads images with {channels} channels, and this command "
            "gray and RGB files only; use evaluate.py with a dataset of your own"
        )
    mode = "L" if channels == 1 else "RGB"
    preprocessing = trained.preprocessing
    is_single = trained.task.evaluation_transform(preprocessing) is None
    transform = None if is_single else OnImage(evaluation_transform(preprocessing))
    loaders = build_eval_loaders(
        {"images": (Files(files, mode, trained.config.data.max_value), transform)},
        None,
        strategy,
        preprocessing,
        batch_size=(1 if is_single else batch_size) * strategy.group.world_size,
        workers=workers,
        on_error="skip",
        channels_last=trained.config.model.channels_last is True,
    )
    return loaders["images"]


@torch.inference_mode()
def _predict(
    networks: Networks, trained: Trained, batch: Batch, paths: list[Path], topk: int
) -> tuple[Any, list[dict[str, Any]]]:
    """Return the outputs for a batch, and the prediction of each of its images."""
    try:
        outputs = trained.task.predict(networks, batch)
    except AttributeError as error:
        if not isinstance(error.obj, Batch):
            raise
        raise ValueError(
            f"run={trained.run}: its task reads the field {error.name!r} of a batch, but image "
            "files have none; use evaluate.py"
        ) from error
    # A comparison with NaN is false. A score of minus infinity excludes a class.
    are_finite = torch.stack(
        [(of.reshape(len(of), -1) < math.inf).all(1) for of in tree_leaves(outputs)]
    ).all(0)
    for number, is_finite in zip(batch.target.tolist(), are_finite.tolist(), strict=True):
        if not is_finite:
            raise ValueError(
                f"{paths[number]}: an output of the model is NaN or infinite; use another "
                "checkpoint, or train with train.precision=fp32"
            )
    columns = trained.task.predictions(outputs, topk)
    rows = zip(*columns.values(), strict=True)
    return outputs, [dict(zip(columns, row, strict=True)) for row in rows]

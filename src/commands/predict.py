"""Predict image files with a trained model. The predictions have the order of the files."""

from __future__ import annotations

import math
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch.utils._pytree import tree_leaves, tree_map

from src.commands.load import Trained, load_trained
from src.data.transforms import OnImage, evaluation_transform
from src.tasks.images import find_task
from timm_parallel import (
    Batch,
    Files,
    Networks,
    Strategy,
    build_eval_loaders,
    evaluation_networks,
    load_config,
)

# Dictionary from the path of an image file to its prediction, a dictionary of plain values. The
# prediction is None if the file cannot be read.
Predictions = dict[str, dict[str, Any] | None]


@dataclass
class PredictionRequest:
    """Arguments of `predict`: the images, the trained model and options."""

    run: Path
    # The images to predict: a folder of images, or one image file.
    images: Path
    # Checkpoint to load: best, last or the path of a file. None: the one that result.json names.
    checkpoint: str | None
    # Set of weights to load: model (raw) or ema (averaged). None: the set that checkpoint.metric
    # names.
    weights: str | None
    topk: int
    # Number of images that a rank predicts at once.
    batch_size: int
    workers: int | str
    # Folder for predictions that are files, such as masks; None: write no files.
    folder: Path | None = None
    # File that the caller writes the predictions to; None: no file.
    output: Path | None = None


def predict(request: PredictionRequest, strategy: Strategy) -> Predictions:
    """Predict image files, divided among the ranks. Return, on every rank, the predictions of all
    files. All ranks must call this function.
    """
    split = Files.below(request.images)
    files, notes = split.files, "; ".join(split.notes)
    if not files:
        raise ValueError(
            f"images={request.images}: no image in this folder; {notes or 'it is empty'}"
        )
    if notes and strategy.group.is_first:
        print(f"note: {notes}", file=sys.stderr)
    paths = [path for path, _ in files]
    endings = find_task(load_config(request.run).train.task).endings
    names = _file_names(request, paths, endings)
    # Check on one rank, because the first rank writes files before the last rank has started.
    if strategy.group.is_first:
        _check_written_files(request, paths, [name + end for name in names for end in endings])
    trained = load_trained(request.run, request.checkpoint, request.weights, strategy.device)
    networks = evaluation_networks(trained.networks, trained.config, strategy)
    predictions: dict[int, dict[str, Any] | None] = {}
    hidden = not (strategy.group.is_first and sys.stderr.isatty())
    with closing(_loader(trained, files, request, strategy)) as loader:
        bar = track(
            loader, "images", len(loader.sampler), console=Console(stderr=True), disable=hidden
        )
        try:
            for batch in bar:
                predictions.update(_predict(networks, trained, batch, paths, names, request))
        except AttributeError as error:
            if not isinstance(error.obj, Batch):
                raise
            raise ValueError(
                f"run={request.run}: its task reads the field {error.name!r} of a batch, but image "
                "files have none; use evaluate.py with predictions=<file>"
            ) from error
    for number in loader.unreadable:
        predictions[number] = None
    by_rank = strategy.group.gather(predictions)
    merged = {int(number): values for gathered in by_rank for number, values in gathered.items()}
    assert len(merged) == len(paths), f"{len(merged)} predictions for {len(paths)} files"
    return {str(path): merged[number] for number, path in enumerate(paths)}


def _file_names(
    request: PredictionRequest, paths: list[Path], endings: tuple[str, ...]
) -> list[str]:
    """Choose the name of each image for `Task.write`, which appends the endings. The name is the
    path without suffix, unless an image would then share a file with another image.
    """
    endings = endings or ("",)
    base = request.images if request.images.is_dir() else request.images.parent
    whole = [path.relative_to(base).as_posix() for path in paths]
    names = [str(Path(name).with_suffix("")) for name in whole]
    # A longer name may collide with another name, so repeat until all names differ.
    while True:
        count = Counter(name + ending for name in names for ending in endings)
        kept = [
            full if any(count[name + ending] > 1 for ending in endings) else name
            for name, full in zip(names, whole, strict=True)
        ]
        if kept == names:
            return names
        names = kept


def _check_written_files(request: PredictionRequest, paths: list[Path], files: list[str]) -> None:
    """Raise ValueError if the predictions would replace an image or another file."""
    folder, output = request.folder, request.output
    if output is not None and any(
        path.exists() and path.samefile(output) for path in paths if output.exists()
    ):
        raise ValueError(f"output={output}: one of the images; give the path of another file")
    if folder is None:
        return
    if request.images.is_dir():
        of_images = set(map(os.path.realpath, {request.images, *(path.parent for path in paths)}))
        real = Path(os.path.realpath(folder))
        if not of_images.isdisjoint(map(str, [real, *real.parents])):
            raise ValueError(
                f"folder={folder}: lies in images={request.images}; give a folder outside of it"
            )
    for file in files:
        # Unlike Path.exists, lexists finds a link whose target is missing, too.
        if os.path.lexists(folder / file):
            raise ValueError(
                f"folder={folder}: {file} exists and would be overwritten; give a new folder"
            )


def _loader(
    trained: Trained,
    files: Sequence[tuple[Path, int]],
    request: PredictionRequest,
    strategy: Strategy,
) -> Any:
    """Build a loader of image files for prediction. It yields the index of a file in place of a
    label, so that each prediction can be assigned to its file.
    """
    channels = trained.preprocessing.input_size[0]
    if channels not in (1, 3):
        raise ValueError(
            f"run={request.run}: the model reads images with {channels} channels, and this command "
            "gray and RGB files only; use evaluate.py predictions=<file> with a dataset of your own"
        )
    mode = "L" if channels == 1 else "RGB"
    preprocessing = trained.preprocessing
    is_single = trained.task.evaluation_transform(preprocessing) is None
    per_rank = 1 if is_single else request.batch_size
    transform = None if is_single else OnImage(evaluation_transform(preprocessing))
    loaders = build_eval_loaders(
        {"images": (Files(files, mode, trained.config.data.max_value), transform)},
        None,
        strategy,
        preprocessing,
        batch_size=per_rank * strategy.group.world_size,
        workers=request.workers,
        on_error="skip",
        channels_last=trained.config.model.channels_last is True,
    )
    return loaders["images"]


@torch.inference_mode()
def _predict(
    networks: Networks,
    trained: Trained,
    batch: Batch,
    paths: list[Path],
    names: list[str],
    request: PredictionRequest,
) -> Iterator[tuple[int, dict[str, Any]]]:
    numbers = batch.target.tolist()
    outputs = trained.task.predict(networks, batch)
    columns = trained.task.predictions(outputs, request.topk)
    values = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    # A comparison with NaN is false. A score of minus infinity excludes a class.
    are_finite = torch.stack(
        [(of.reshape(len(of), -1) < math.inf).all(1) for of in tree_leaves(outputs)]
    ).all(0)
    for number, is_finite in zip(numbers, are_finite.tolist(), strict=True):
        if not is_finite:
            raise ValueError(
                f"{paths[number]}: an output of the model is NaN or infinite; use another "
                "checkpoint, or train with train.precision=fp32"
            )
    for place, (number, prediction) in enumerate(zip(numbers, values, strict=True)):
        if request.folder is not None:
            of_image = tree_map(lambda of, place=place: of[place], outputs)
            trained.task.write(of_image, paths[number], request.folder, names[number])
        yield number, prediction

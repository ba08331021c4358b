"""Evaluate the checkpoint of a run, or a model with weights from timm or from a file. Any number of
ranks gives the same result.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pandas as pd
from PIL import Image
from torch import nn
from torchvision.transforms.functional import to_pil_image

from src.schema import ResolvedConfig
from src.tasks.images import ImageTask
from src.train.build import DataAndModel, build_data_and_model
from timm_parallel import (
    Evaluation,
    Strategy,
    build_networks,
    check_classes,
    check_networks,
    evaluate,
    evaluation_networks,
    load_networks,
    load_weights,
    preprocessing_of,
    read_checkpoint,
    write_text,
)
from timm_parallel.lab import write_images

# Longest side of the images on the page of the worst ones, in pixels, and the number of columns of
# the table of predictions that it shows.
SHOWN_SIDE, COLUMNS = 256, 8
# Keys of the group data that set how evaluation images are resized, cropped and normalized.
PREPARATION = ("mean", "std", "crop_pct", "crop_mode", "interpolation")


def evaluate_config(
    config: ResolvedConfig,
    strategy: Strategy,
    folder: Path | None,
    split: str,
    which: str | None,
    predictions: Path | None = None,
    weights: str | None = None,
    worst: int | None = None,
    page: Path | None = None,
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Evaluate a model on val, test or all splits. Yield a pair (split, metrics) for each split and
    each set of weights. All ranks must call this function.

    `folder`: the run folder; None: evaluate the weights that config.model gives. `which`: the
    checkpoint of the run, as best, last or a file; None: the checkpoint that result.json names.
    `weights`: model (raw) or ema (averaged); None: evaluate both. `predictions`: the CSV file to
    write, with a line per image. If both sets of weights are evaluated, it has the predictions of
    the set that checkpoint.metric names. `worst`: number of images with the highest loss to show on
    the HTML page `page`, for each split and the same set of weights.
    """
    with ExitStack() as on_close:
        path: Path | None = None
        contents: dict[str, Any] = {}
        if folder is not None:
            path, contents = read_checkpoint(folder, which)
            _prepare_as_trained(config, contents.get("preprocessing", {}))
        elif config.model.weights is not None:
            _prepare_as_trained(config, preprocessing_of(Path(config.model.weights)))
        built = build_data_and_model(config, strategy, contents.get("classes"))
        dataset, task, loaders = built.dataset, built.task, built.eval_loaders
        for loader in loaders.values():
            on_close.callback(loader.close)
        if not loaders:
            raise ValueError(
                f"data.root={config.data.root}: no image is in val or test, the splits to evaluate "
                "on; add images to one of them"
            )
        # Class weights need the training labels, and the loss of an evaluation does not use them.
        config.train.class_weights = None
        task.ranks = strategy.group
        networks = build_networks(task, built.model, strategy.device)
        check_networks(task, networks, next(iter(loaders.values())).peek(1))
        line = _load_weights(config, folder, contents, built)
        if line and strategy.group.is_first:
            print(f"weights      {line}", file=sys.stderr)
        if split not in ("all", *loaders):
            raise ValueError(
                f"split={split}: the data does not have this split; it has {', '.join(loaders)}"
            )
        chosen = list(loaders) if split == "all" else [split]
        averaged = ["ema"] if "ema" in contents.get("averages", {}) else []
        sets = [weights] if weights else ["model", *averaged]
        predicting = sets[-1] if config.checkpoint.metric.endswith("_ema") else sets[0]
        tables: list[pd.DataFrame] = []
        shown: dict[str, list[tuple[Image.Image, list[str]]]] = {}
        if predictions is not None and not has_table(task):
            # Refuse before the evaluation, which would ask the task for the rows of a table.
            task.table(Evaluation(0, {}, {}))
        for evaluated, name in itertools.product(sets, chosen):
            if contents:
                load_networks(networks, contents, evaluated)
            keeps_rows = predictions is not None and evaluated == predicting
            is_shown = worst is not None and evaluated == predicting
            evaluation = evaluate(
                evaluation_networks(networks, config, strategy),
                loaders[name],
                task,
                strategy.group,
                keep_rows=keeps_rows,
                keep=task.losses_and_pictures if is_shown else None,
            )
            # evaluate() returns None only after a stop request, which evaluate.py does not pass.
            assert evaluation is not None
            if is_shown and strategy.group.is_first:
                assert worst is not None
                shown[f"{name}, {config.model.name}"] = worst_images(
                    evaluation, getattr(dataset, name), task, worst
                )
            if keeps_rows and strategy.group.is_first:
                rows = table_of(evaluation, getattr(dataset, name), task)
                tables.append(rows.assign(split=name, weights=evaluated))
            source = (
                {"checkpoint": str(path), "weights": evaluated}
                if contents
                else {"model": config.model.name}
            )
            yield (
                name,
                {
                    **source,
                    "world_size": strategy.measured_world_size(),
                    **evaluation.numbers,
                    **task.details(evaluation),
                },
            )
        if predictions is not None and tables:
            write_text(predictions, pd.concat(tables).to_csv(index=False, lineterminator="\n"))
        if page is not None and shown:
            write_images("Images with the highest loss", shown, page)
            print(f"page         {page}", file=sys.stderr)


def has_table(task: ImageTask) -> bool:
    """Return True if a task gives its predictions as a table."""
    return type(task).table is not ImageTask.table


def table_of(evaluation: Evaluation, split: Any, task: ImageTask) -> pd.DataFrame:
    """Build a table of predictions with one row per image. The columns are the path of the image
    (or its index) and the columns of the task. `evaluation`: must have been run with keep_rows.
    """
    assert evaluation.rows is not None
    files, indices = getattr(split, "files", None), evaluation.rows[0].tolist()
    paths = [str(files[index][0]) if files else index for index in indices]
    # With another type, pandas would use pyarrow, if it is installed, and fail for a name that is
    # not UTF-8.
    return pd.DataFrame({"path": paths, **task.table(evaluation)}, dtype=object)


def worst_images(
    evaluation: Evaluation, split: Any, task: ImageTask, count: int
) -> list[tuple[Image.Image, list[str]]]:
    """Return the `count` images of a split with the highest loss as pictures, highest first, each
    with lines that describe it. `evaluation`: must have kept `losses_and_pictures`.
    """
    assert evaluation.rows is not None and evaluation.kept is not None
    losses, *others = evaluation.kept
    if has_table(task):
        table = table_of(evaluation, split, task)
    else:
        table = pd.DataFrame({"index": evaluation.rows[0].tolist()})
    images = []
    # A loss that is not a number counts as the highest.
    for place in losses.argsort(descending=True)[:count].tolist():
        pixels, target = split[int(evaluation.rows[0][place])]
        photo = to_pil_image(pixels[:3] if len(pixels) > 2 else pixels[:1]).convert("RGB")
        photo.thumbnail((SHOWN_SIDE, SHOWN_SIDE))
        columns = table.iloc[place, :COLUMNS].items()
        lines = [f"loss: {float(losses[place]):.4g}"]
        lines += [f"{key}: {f'{of:.3f}' if isinstance(of, float) else of}" for key, of in columns]
        images.append((task.picture(photo, target, tuple(of[place] for of in others)), lines))
    return images


def _load_weights(
    config: ResolvedConfig, folder: Path | None, contents: dict[str, Any], built: DataAndModel
) -> str:
    """Load the weights of the file model.weights, and return a line about them for the log. If
    model.weights is not set, only check that the model was trained for the classes of the data.
    """
    dataset, model = built.dataset, built.model
    if config.model.weights is not None:
        path = Path(config.model.weights)
        is_sorted = built.task.target in ("label", "labels")
        return load_weights(
            model, path, dataset.target_names, for_evaluation=True, sorted_names=is_sorted
        )
    if folder is None:
        _check_head(config, model, len(dataset.target_names))
    else:
        check_classes(dataset, contents.get("classes", dataset.target_names), f"the run {folder}")
    return ""


def _prepare_as_trained(config: ResolvedConfig, preprocessing: dict[str, Any]) -> None:
    """Copy the preprocessing of the training run, such as mean and std, into the config. A key that
    the command line sets keeps its value.
    """
    # The crop_pct of a run with another crop_mode would crop the whole images that the command asks
    # for.
    kept = {"crop_pct"} if config.data.keeps_whole_images else set()
    for key in PREPARATION:
        if key not in kept and getattr(config.data, key) is None and key in preprocessing:
            value = preprocessing[key]
            setattr(config.data, key, list(value) if isinstance(value, tuple) else value)


def _check_head(config: ResolvedConfig, model: nn.Module, classes: int) -> None:
    """Raise ValueError if the model's weights were trained for another number of classes than the
    data has. Without this check, timm would silently replace the last layer by a random one.
    """
    trained_outputs = getattr(model, "pretrained_cfg", {}).get("num_classes")
    if trained_outputs != classes:
        raise ValueError(
            f"model.name={config.model.name}: its weights are for {trained_outputs} classes, the "
            f"data has {classes}; train the model on the data first, and give run=<run folder>"
        )

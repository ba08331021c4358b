"""What a trained model says of images in files: the best classes of each, in the order of the files."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from src.data.augment import evaluation_transform
from src.data.datasets import Files
from src.data.feed import DeviceFeed
from src.data.folders import image_files
from src.data.loader import Loader, Reader, num_workers
from src.data.sampling import EvaluationRequests
from src.engine.config.combinations import check_combination
from src.engine.config.resolve import resolve
from src.engine.machine.files import write_text
from src.engine.machine.ranks import Ranks
from src.parallel import build_strategy
from src.parallel.forward import AUTOCAST
from src.parallel.single import Single
from src.schema import Config, DataConfig, ParallelConfig, ResolvedParallel
from src.trained.load import Trained, load_trained


@dataclass
class PredictionRequest:
    """What is to be predicted, with what."""

    run: Path
    images: Path  # a file or a folder
    checkpoint: str | None  # best, last or a file; None: what result.json names
    weights: str | None  # model or ema; None: those that checkpoint.metric judged
    topk: int
    batch_size: int  # of each rank
    workers: int | str
    parallel: ParallelConfig


@dataclass
class Prediction:
    """The most likely classes of one image, best first; none for a file that cannot be read."""

    path: str
    classes: list[str]
    probabilities: list[float]


def predict(request: PredictionRequest, ranks: Ranks, store: Any) -> list[Prediction]:
    """The predictions for all files, on every rank; each reads every world_size-th of them."""
    paths = [request.images] if request.images.is_file() else list(image_files(request.images))
    if not paths:
        raise ValueError(f"images={request.images}: no image in this folder")
    strategy = build_strategy(_resolved(request, ranks), ranks, store)
    trained = load_trained(request.run, request.checkpoint, request.weights, strategy.device)
    model = strategy.for_evaluation(trained.model, AUTOCAST[trained.config.train.precision])
    found: dict[int, Prediction] = {}
    shown, on = strategy.is_first and sys.stderr.isatty(), Console(stderr=True)
    with closing(_loader(trained, paths, request, strategy, ranks.local_world_size)) as loader:
        for images, numbers in track(loader, "images", len(loader.requests), console=on, disable=not shown):
            found.update(_best(model, trained, images, numbers, paths, request.topk))
    for number in loader.unreadable:
        found[number] = Prediction(str(paths[number]), [], [])
    everyone = strategy.gather({number: asdict(prediction) for number, prediction in found.items()})
    strategy.close()
    merged = {int(number): Prediction(**values) for own in everyone for number, values in own.items()}
    assert len(merged) == len(paths), f"{len(merged)} predictions for {len(paths)} files"
    return [merged[number] for number in sorted(merged)]


def _resolved(request: PredictionRequest, ranks: Ranks) -> ResolvedParallel:
    config = Config(
        parallel=request.parallel, data=DataConfig(batch_size=None, batch_size_per_device=request.batch_size)
    )
    check_combination(config)
    sizes = (ranks.world_size, ranks.local_world_size) if request.parallel.has_ranks else ()
    return resolve(config, *sizes).parallel


def _loader(
    trained: Trained, paths: list[Path], request: PredictionRequest, strategy: Single, local_world_size: int
) -> Loader:
    """In place of a label stands the file's number, so that answers find their file."""
    mode = "L" if trained.preprocessing.input_size[0] == 1 else "RGB"
    files = Files([(path, number) for number, path in enumerate(paths)], mode)
    reader = Reader(files, len(paths), evaluation_transform(trained.preprocessing), seed=0, on_error="skip")
    requests = EvaluationRequests(
        len(files), request.batch_size * strategy.world_size, strategy.rank, strategy.world_size
    )
    feed = DeviceFeed(strategy.device, trained.preprocessing, trained.config.model.channels_last)
    return Loader(reader, requests, feed, num_workers(DataConfig(workers=request.workers), files, local_world_size))


@torch.inference_mode()
def _best(
    model: torch.nn.Module, trained: Trained, images: Tensor, numbers: Tensor, paths: list[Path], topk: int
) -> Iterator[tuple[int, Prediction]]:
    names = trained.class_names
    best = model(images)[:, : len(names)].float().softmax(1).topk(min(topk, len(names)))
    for number, indices, values in zip(numbers.tolist(), best.indices.tolist(), best.values.tolist(), strict=True):
        yield number, Prediction(str(paths[number]), [names[index] for index in indices], values)


def write(predictions: list[Prediction], form: str, output: Path | None) -> None:
    """`form` is console, csv or json; printed where there is no `output`, which is written whole or not at all."""
    text = {"console": _as_lines, "csv": _as_csv, "json": _as_json}[form](predictions)
    text = text.encode(errors="replace").decode()  # a file's name may be no UTF-8
    if output is None:
        sys.stdout.write(text)
    else:
        write_text(output, text)


def _as_lines(predictions: list[Prediction]) -> str:
    lines = []
    for one in predictions:
        best = [f"{name} {share:.4f}" for name, share in zip(one.classes, one.probabilities, strict=True)]
        lines.append(f"{one.path}  {', '.join(best) or 'unreadable'}\n")
    return "".join(lines)


def _as_csv(predictions: list[Prediction]) -> str:
    file = io.StringIO(newline="")
    most = max(len(one.classes) for one in predictions)
    writer = csv.writer(file, lineterminator="\n")
    columns = [f"{what}_{place}" for place in range(1, most + 1) for what in ("class", "probability")]
    writer.writerow(["path", *columns])
    for one in predictions:
        pairs = zip(one.classes, one.probabilities, strict=True)
        cells = [cell for name, share in pairs for cell in (name, f"{share:.6f}")]
        writer.writerow([one.path, *cells, *[""] * (2 * most - len(cells))])
    return file.getvalue()


def _as_json(predictions: list[Prediction]) -> str:
    return json.dumps([asdict(one) for one in predictions], indent=1) + "\n"

"""What a trained model says of images in files: the best classes of each, in the order of the files."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor

from src.data.augment import evaluation_transform
from src.data.feed import DeviceFeed
from src.data.folders import image_files
from src.data.images import decode_file
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
    paths = find_images(request.images)
    strategy = build_strategy(_resolved(request, ranks), ranks, store)
    trained = load_trained(request.run, request.checkpoint, request.weights, strategy.device)
    loader = _loader(trained, paths, request, strategy, ranks.local_world_size)
    model = strategy.for_evaluation(trained.model, AUTOCAST[trained.config.train.precision])
    found: dict[int, Prediction] = {}
    try:
        for images, numbers in _with_progress(loader, len(paths), strategy):
            found.update(_best(model, trained, images, numbers, paths, request.topk))
    finally:
        loader.close()
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
    if request.parallel.has_ranks:
        return resolve(config, ranks.world_size, ranks.local_world_size).parallel
    return resolve(config).parallel


def find_images(images: Path) -> list[Path]:
    """The files, in a fixed order."""
    found = [images] if images.is_file() else list(image_files(images)) if images.is_dir() else []
    if not found:
        raise ValueError(
            f"images={images}: {'no image in this folder' if images.is_dir() else 'no such file or folder'}"
        )
    return found


class ImageFiles:
    """A split of files without labels; in place of a label stands the file's number, so that answers find their file."""

    def __init__(self, paths: list[Path], in_chans: int) -> None:
        self.paths, self.in_chans = paths, in_chans

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return decode_file(self.paths[index], "L" if self.in_chans == 1 else "RGB"), index


def _loader(
    trained: Trained, paths: list[Path], request: PredictionRequest, strategy: Single, local_world_size: int
) -> Loader:
    files = ImageFiles(paths, trained.preprocessing.input_size[0])
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


def _with_progress(loader: Loader, total: int, strategy: Single) -> Iterator[tuple[Tensor, Tensor]]:
    """A bar on rank 0's terminal, in files of all ranks; nothing where the errors go to a file."""
    from rich.console import Console
    from rich.progress import Progress

    shown = strategy.is_first and sys.stderr.isatty()
    with Progress(console=Console(stderr=True), disable=not shown) as progress:
        task = progress.add_task("images", total=total)
        for images, numbers in loader:
            yield images, numbers
            progress.advance(task, len(numbers) * strategy.world_size)


def write(predictions: list[Prediction], form: str, output: Path | None) -> None:
    """`form` is console, csv or json; printed where there is no `output`, which is written whole or not at all."""
    text = io.StringIO(newline="")
    {"console": _write_lines, "csv": _write_csv, "json": _write_json}[form](predictions, text)
    if output is None:
        sys.stdout.write(text.getvalue().encode(errors="replace").decode())  # a file's name may be no UTF-8
    else:
        write_text(output, text.getvalue().encode(errors="replace").decode())


def _write_lines(predictions: list[Prediction], file: TextIO) -> None:
    for one in predictions:
        best = [f"{name} {share:.4f}" for name, share in zip(one.classes, one.probabilities, strict=True)]
        file.write(f"{one.path}  {', '.join(best) or 'unreadable'}\n")


def _write_csv(predictions: list[Prediction], file: TextIO) -> None:
    most = max(len(one.classes) for one in predictions)
    writer = csv.writer(file, lineterminator="\n")
    columns = [f"{what}_{place}" for place in range(1, most + 1) for what in ("class", "probability")]
    writer.writerow(["path", *columns])
    for one in predictions:
        pairs = zip(one.classes, one.probabilities, strict=True)
        cells = [cell for name, share in pairs for cell in (name, f"{share:.6f}")]
        writer.writerow([one.path, *cells, *[""] * (2 * most - len(cells))])


def _write_json(predictions: list[Prediction], file: TextIO) -> None:
    json.dump([asdict(one) for one in predictions], file, indent=1)
    file.write("\n")

"""Helpers for tests. They compose small configs and command lines in the same way as train.py, and
read metrics.jsonl.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from src.schema import AugmentConfig, ResolvedConfig, ResolvedTrain, TrainConfig
from timm_parallel.batch import Batch
from timm_parallel.config.compose import compose_command
from timm_parallel.config.resolve import resolve
from timm_parallel.data.loader import Loader, TrainLoader
from timm_parallel.metric import Metric
from timm_parallel.parallel.networks import Networks
from timm_parallel.parallel.strategy import Strategy
from timm_parallel.runtime.evaluation import Evaluation, evaluate
from timm_parallel.task import Task
from timm_parallel.task_rules import check_task

TINY = (
    "print_config=false",
    "model=tiny",
    "parallel.threads_per_device=1",
    "data.limit_train=192",
    "data.batch_size=32",
    "optim.warmup_epochs=0",
    "train.epochs=2",
)


def resolved(*overrides: str) -> ResolvedConfig:
    """Build the resolved config that `python train.py` would use with the overrides in TINY and the
    given overrides. TINY sets a tiny model and 192 training images.
    """
    config = compose_command(parse(*tiny(*overrides))).config
    check_task(config)
    return cast(ResolvedConfig, resolve(config))


def parse(*words: str) -> Any:
    """Parse command-line arguments with Hydra's argument parser and return the result."""
    from timm_parallel.patches import hydra_parser

    return hydra_parser().parse_args(list(words))


def conf(folder: Path, **files: str) -> Path:
    """Write YAML files into a folder for the option `--config-dir`, and return the folder. `files`
    maps a file name without suffix to its YAML text. Two underscores in a name stand for a slash.
    """
    for name, text in files.items():
        path = folder / f"{name.replace('__', '/')}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder


def tiny(*overrides: str) -> list[str]:
    """Return the overrides of a tiny training run, followed by the given overrides. A given
    override replaces the default override of the same key.
    """
    chosen = {word.partition("=")[0]: word for word in (*TINY, *overrides)}
    return list(chosen.values())


def plain(channels: int, mean: float = 0.0, std: float = 1 / 255) -> dict[str, tuple[float, ...]]:
    """Return the mean and standard deviation per channel for a DevicePrefetcher, as a dictionary of
    keyword arguments. With the default values, normalization leaves pixel values in 0..255
    unchanged.
    """
    return {"mean": (mean,) * channels, "std": (std,) * channels}


def train_loader_of(*parts: Any) -> TrainLoader:
    """Build a training loader from a batch fetcher, a sampler, a device prefetcher and a number of
    worker processes.
    """
    loader = TrainLoader.__new__(TrainLoader)
    Loader.__init__(loader, *parts)
    return loader


def task_of(classes: int, train: TrainConfig | None = None, **augment: Any) -> Any:
    """Build the task object of a classification run with the given number of classes. `train`
    replaces the config section train, and `augment` sets keys of data.augment.
    """
    config = resolved()
    if train is not None:
        config.train = ResolvedTrain(**vars(train))
    config.data.augment = AugmentConfig(**augment)
    return Task.find(config.train.task)(config, [str(number) for number in range(classes)])


def evaluate_batches(
    model: Any,
    batches: Iterable[Any],
    strategy: Strategy,
    num_samples: int,
    num_classes: int,
    metrics: Mapping[str, Metric] | None = None,
) -> Evaluation:
    """Evaluate a model on given batches, or pairs of images and targets, instead of a data loader.
    Metrics that need the rows of all images are not supported, because they need a loader.
    """

    def as_batch(batch: Any) -> Batch:
        return batch if isinstance(batch, Batch) else Batch({"image": batch[0], "target": batch[1]})

    prefetcher = SimpleNamespace(device=strategy.device)
    fetcher = SimpleNamespace(split=range(num_samples))
    loader: Any = SimpleNamespace(prefetcher=prefetcher, unreadable=set(), fetcher=fetcher)
    task = task_of(num_classes)
    evaluation = evaluate(
        strategy.for_evaluation(Networks({"model": model})),
        loader,
        task,
        strategy.group,
        metrics=metrics,
        batches=map(as_batch, batches),
    )
    assert evaluation is not None
    return evaluation


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def without_times(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return logged metric lines without times, speeds and memory use, which differ between equal
    runs. Lines that have no metrics left are dropped.
    """
    timed = (
        "time",
        "train/images_per_sec",
        "train/images_per_sec_per_device",
        "train/data_wait",
        "seconds",
    )
    kept = [
        {k: v for k, v in line.items() if k not in timed and not k.startswith("memory/")}
        for line in lines
    ]
    return [line for line in kept if any("/" in key for key in line)]

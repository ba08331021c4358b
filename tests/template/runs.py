"""Helpers that compose the config of a tiny run of the template, train it in the process of a test
or in forked ranks, or take its steps without logs and files.
"""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from PIL import Image

from src.app import app
from src.schema import AugmentConfig, ResolvedConfig, ResolvedTrain, TrainConfig
from src.tasks.images import ImageTask
from src.train.run import train
from timm_parallel import compose, find_task, resolve
from timm_parallel.batch import Batch
from timm_parallel.data.loader import TrainLoader
from timm_parallel.data.on_device import DevicePrefetcher
from timm_parallel.keys import ResolvedParallel
from timm_parallel.machine.ranks import Ranks
from timm_parallel.metric import Metric
from timm_parallel.parallel.networks import Networks
from timm_parallel.parallel.strategy import Strategy, build_strategy
from timm_parallel.record.result import read_result
from timm_parallel.run.evaluation import evaluate
from timm_parallel.run.parts import RunParts
from timm_parallel.run.run import Run, start_run
from timm_parallel.run.step import MetricWindow, Step
from timm_parallel.task import Evaluation
from timm_parallel.testing.configs import merged, plain, read_lines, train_loader_of
from timm_parallel.testing.ranks import train_warm

ROOT = app.root
EXAMPLES = ROOT / "examples"
FAULTY = ROOT / "timm_parallel" / "tests" / "promises" / "faulty"
# Code that lets a process import the examples as files of the packages of src.
IMPORT_EXAMPLES = f"""
from importlib import import_module

for name in ("tasks", "models", "data", "train"):
    import_module(f"src.{{name}}").__path__.append({str(EXAMPLES)!r})
"""
TINY = (
    "print_config=false",
    "model=tiny",
    "parallel.threads_per_device=1",
    "data.limit_train=192",
    "data.batch_size=32",
    "optim.warmup_epochs=0",
    "train.epochs=2",
)


def run_python(
    *words: str,
    cwd: Path = ROOT,
    environment: Mapping[str, str] | None = None,
    timeout: float = 300,
) -> subprocess.CompletedProcess[str]:
    """Run a Python command, and return its exit code and output."""
    return subprocess.run(
        [sys.executable, *words],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def fault_environment(fault: str, mark: Path) -> dict[str, str]:
    """Build the environment variables that let faulty/sitecustomize.py inject a fault.

    `fault`: kind, rank, step and phase, such as `kill:1:7:the forward pass`. `mark`: file to which
    the time of the fault is written.
    """
    path = os.pathsep.join([str(FAULTY), str(ROOT)])
    return {"FAULT": fault, "FAULT_MARK": str(mark), "PYTHONPATH": path}


def draw_images(root: Path, *folders: str, count: int = 1, size: int = 16) -> Path:
    """Write `count` random images into each folder, and return the root folder. Without folders,
    write the classes a and b of the splits train and val.
    """
    pixels = np.random.default_rng(0)
    for folder in folders or ("train/a", "train/b", "val/a", "val/b"):
        (root / folder).mkdir(parents=True)
        for number in range(count):
            image = pixels.integers(0, 256, (size, size, 3), dtype=np.uint8)
            Image.fromarray(image).save(root / folder / f"{number}.png")
    return root


def files_below(folder: Path) -> dict[str, bytes]:
    """Return the contents of all files below a folder, without those of git and bytecode."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and not {".git", "__pycache__"} & {*path.relative_to(folder).parts}
    }


def tiny(*overrides: str) -> list[str]:
    """Return TINY with the given overrides, which replace those of the same key."""
    return merged(*TINY, *overrides)


def resolved(*overrides: str) -> ResolvedConfig:
    """Build the resolved config that `python train.py` would use with the overrides in TINY and the
    given overrides. TINY sets a tiny model and 192 training images.
    """
    return own(resolve(compose(*tiny(*overrides))))


def own(config: Any) -> ResolvedConfig:
    """Return a resolved config, whose class is that of the project."""
    assert isinstance(config, ResolvedConfig)
    return config


def run_warm(folder: Path, *overrides: str) -> Path:
    """Train a run with TINY and the given overrides in forked ranks; fail if it fails."""
    return train_warm(resolved(*overrides), folder)


def losses_of(folder: Path) -> list[float]:
    lines = read_lines(folder / "metrics.jsonl")
    return [line["train/loss"] for line in lines if "train/loss" in line]


def numbers_of(folder: Path) -> tuple[str | None, list[tuple[int, float]]]:
    """Return the hash of the parameters of a run, and step and loss of each logged step."""
    lines = read_lines(folder / "metrics.jsonl")
    logged = [(line["step"], line["train/loss"]) for line in lines if "train/loss" in line]
    return read_result(folder).parameters_hash, logged


def training_of(contents: dict[str, Any]) -> dict[str, Any]:
    """Return the contents of a checkpoint except the record of attempts and commands, and the
    seconds of training, which differ between an uninterrupted and a resumed run.
    """
    contents["progress"].pop("seconds")
    return {
        key: value
        for key, value in contents.items()
        if key not in ("made_by", "segments", "config")
    }


def assert_equal_trees(one: Any, other: Any, where: str = "") -> None:
    if isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            assert_equal_trees(one[key], other[key], f"{where}/{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), where
        for index, (a, b) in enumerate(zip(one, other, strict=True)):
            assert_equal_trees(a, b, f"{where}/{index}")
    elif isinstance(one, torch.Tensor):
        assert torch.equal(one, other), where
    else:
        assert one == other, where


def task_of(classes: int, train: TrainConfig | None = None, **augment: Any) -> Any:
    """Build the task object of a classification run with the given number of classes. `train`
    replaces the config section train, and `augment` sets keys of data.augment.
    """
    config = copy.deepcopy(_default_config())
    if train is not None:
        config.train = ResolvedTrain(**vars(train))
    config.data.augment = AugmentConfig(**augment)
    return find_task(config.train.task, ImageTask)(
        config, [str(number) for number in range(classes)]
    )


@cache
def _default_config() -> ResolvedConfig:
    """Compose the config of `task_of` once, because this takes longer than most of its tests."""
    return resolved()


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
    task.metrics = metrics or task.metrics
    evaluation = evaluate(
        strategy.for_evaluation(Networks({"model": model})),
        loader,
        task,
        strategy.group,
        batches=map(as_batch, batches),
    )
    assert evaluation is not None
    return evaluation


def cpu_loader(fetcher: Any, sampler: Any, workers: int = 0) -> TrainLoader:
    """Build a training loader on the CPU that leaves the values of pixels in 0..255."""
    prefetcher = DevicePrefetcher(torch.device("cpu"), **plain(3), channels_last=False)
    return train_loader_of(fetcher, sampler, prefetcher, workers)


def cpu_strategy(
    kind: str = "single", devices: int = 1, ranks: Ranks | None = None, store: Any = None
) -> Strategy:
    config = ResolvedParallel(
        strategy=kind, devices=devices, accelerator="cpu", threads_per_device=1, backend="gloo"
    )
    return build_strategy(ResolvedConfig(parallel=config), ranks, store)


def parts_of(config: Any, ranks: Ranks | None = None, store: Any = None) -> RunParts:
    """Build the parts of a new run."""
    return start_run(config, Path("no such folder"), ranks, store).parts


def train_run(
    config: ResolvedConfig, folder: Path, ranks: Ranks | None = None, store: Any = None
) -> Run:
    run = start_run(config, folder, ranks, store)
    with run.training() as training:
        train(training)
    return run


def take_steps(
    parts: RunParts, batches: Iterator[Batch] | None = None, count: int | None = None
) -> Iterator[dict[str, float | None]]:
    """Take steps of an epoch, and yield the numbers of each logged step. Nothing is evaluated,
    logged or saved. `batches`: replaces those of the training loader. `count`: number of steps;
    None: all that are left.
    """
    until = None if count is None else parts.progress.step + count
    progress = parts.progress
    window = MetricWindow(parts.strategy.device, progress)
    if batches is None:
        batches = parts.train_loader.epoch(progress.epoch)
    stops = False
    last = min(parts.total_steps, progress.step - progress.step_in_epoch + parts.steps_per_epoch)
    while progress.step < last and not stops and progress.step != until:
        for phase in parts.state.phases:
            phase.wrapped.train()
        step = Step(parts, batches, window)
        numbers = step.train()
        stops = step._stops
        if numbers:
            yield numbers

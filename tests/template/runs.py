"""Helpers that start a run in the process of a test, or take its steps without logs and files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from src.train.build import build_run
from src.train.run import train
from timm_parallel.batch import Batch
from timm_parallel.keys import ResolvedConfig
from timm_parallel.machine.ranks import Ranks
from timm_parallel.measure.metric_window import MetricWindow
from timm_parallel.parallel.build import build_strategy
from timm_parallel.runtime.run import Run
from timm_parallel.runtime.step import Step
from timm_parallel.state.parts import RunParts


def parts_of(config: Any, ranks: Ranks | None = None, store: Any = None) -> RunParts:
    """Build the parts of a run, seeded as a run seeds them."""
    torch.manual_seed(config.seed)
    strategy = build_strategy(config.parallel, ranks or Ranks(), store, config.train.deterministic)
    return build_run(config, strategy)


def start_run(
    config: ResolvedConfig, folder: Path, ranks: Ranks | None = None, store: Any = None
) -> Run:
    """Build a run, and resume it if its folder has a checkpoint."""
    return Run(parts_of(config, ranks, store), folder)


def train_run(
    config: ResolvedConfig, folder: Path, ranks: Ranks | None = None, store: Any = None
) -> Run:
    """Train a run to its end in this process, and return it."""
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
    progress, window = parts.progress, MetricWindow(parts.strategy.device)
    if batches is None:
        batches = parts.train_loader.epoch(progress.epoch)
    stops = False
    while parts.has_steps and not stops and progress.step != until:
        for phase in parts.state.phases:
            phase.wrapped.train()
        step = Step(parts, batches, window, parts.is_logged(progress.step + 1))
        parts.hooks.start_step(step.number)
        step.seed()
        numbers = step.train()
        stops = step.stops
        if numbers:
            yield numbers

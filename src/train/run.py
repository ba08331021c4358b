"""A training run from top to bottom: build, resume, train, evaluate, write. Read this file first.

Every rank executes this code, and only rank 0 writes files.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from src.schema import ResolvedConfig
from src.train.build import build_run
from timm_parallel import Ranks, RefusedError, Run, Training, build_strategy, import_name

if TYPE_CHECKING:
    from torch.distributed import Store


def run(config: ResolvedConfig, folder: Path, ranks: Ranks, store: Store | None) -> None:
    """Train as one rank of a run. Continue from the newest checkpoint in the run folder, if there
    is one. All ranks must call this function.
    """
    # Seed every rank alike, so that every rank and every strategy starts from the same weights.
    torch.manual_seed(config.seed)
    try:
        strategy = build_strategy(config.parallel, ranks, store, config.train.deterministic)
        started = Run(build_run(config, strategy), folder)
    # These errors mean that data, model, optimizer or checkpoint do not fit the config, so the user
    # must change it.
    except ValueError as error:
        raise RefusedError(str(error)) from error
    with started.training() as training:
        loop = train if config.train.loop is None else import_name(config.train.loop)
        loop(training)


def train(training: Training) -> None:
    """Take all steps of a run. Between two steps, the library evaluates, logs and saves where this
    is due.

    A loop of your own (`train.loop=src.<module>.<function>`) may take a step in parts, and may log
    more numbers.
    """
    for step in training.steps():
        training.log(step.train())

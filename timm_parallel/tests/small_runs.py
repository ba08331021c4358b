"""Helpers that train the small project in the process of a test, and read what a run wrote."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from small.config import ResolvedConfig
from torch import Tensor

from timm_parallel.app import find_app
from timm_parallel.machine.ranks import Ranks
from timm_parallel.run import run
from timm_parallel.run.run import Run
from timm_parallel.testing import configs

# Importing this app makes the small project the current one, also in a forked rank.
find_app("small.app:app")
PROJECT = Path(__file__).with_name("small_project")
SGD = ("optim.opt=momentum", "optim.lr=0.03")
# Options of each task. Rounding errors change the weights more with AdamW, which is the default,
# because it divides by gradients that are near 0.
TASKS = {
    "position": (),
    "pair": (*SGD, "train.task=pair", "+optim.of={critic: {opt: sgd, lr: 0.01}}"),
    "points": (*SGD, "train.task=points", "data.name=scattered"),
}


def resolved(*overrides: str) -> ResolvedConfig:
    """Build the resolved config of a run on one device, or as the overrides say."""
    words = configs.merged("parallel=single", "parallel.threads_per_device=1", *overrides)
    config = configs.resolved(*words)
    assert isinstance(config, ResolvedConfig)
    return config


def start_run(
    config: ResolvedConfig, folder: Path, ranks: Ranks | None = None, store: Any = None
) -> Run:
    """Build a run on this rank, and resume it if its folder has a checkpoint."""
    folder.mkdir(exist_ok=True)
    return run.start_run(config, folder, ranks, store)


def take_steps(started_run: Run) -> Iterator[dict[str, float | None]]:
    """Train a run to its end, and yield the numbers of each logged step."""
    with started_run.training() as started:
        for step in started.steps():
            numbers = step.train()
            started.log(numbers)
            if numbers:
                yield numbers


def contents_of(folder: Path) -> dict[str, Any]:
    path = folder / "checkpoints" / "last.pt"
    return dict(torch.load(path, weights_only=True))


def weights_of(folder: Path) -> dict[str, Tensor]:
    """Return all tensors of the networks and averages of a run by name."""
    contents = contents_of(folder)
    networks = {"model": contents["model"], **contents["networks"], **contents["averages"]}
    return {
        f"{network}.{name}": tensor
        for network, tensors in networks.items()
        for name, tensor in tensors.items()
    }

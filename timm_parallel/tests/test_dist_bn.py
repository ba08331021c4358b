"""Tests of parallel.dist_bn, which makes BatchNorm statistics equal on all ranks before an
evaluation.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from small.model import Tiny
from torch import nn

from timm_parallel.machine.ranks import Ranks
from timm_parallel.parallel.strategy import build_strategy
from timm_parallel.testing.ranks import in_ranks
from timm_parallel.tests.small_runs import resolved, start_run, take_steps

# Module name under which configs find this file, because they may name only classes of small/.
HERE = "small.dist_bn_of_test"
sys.modules[HERE] = sys.modules[__name__]
DDP = ("parallel=ddp", "parallel.devices=2")


class Normed(Tiny):
    """Tiny with BatchNorm."""

    __module__ = HERE

    def __init__(self, outputs: int, width: int) -> None:
        super().__init__(outputs, width)
        self.features.insert(1, nn.BatchNorm2d(width))


def shared_mean(ranks: Ranks, store: Any, dist_bn: str | None) -> float:
    """Return the running mean of BatchNorm after the ranks have shared their statistics. Before
    sharing, the mean is 0 on rank 0 and 1 on rank 1. All ranks must call this function.
    """
    overrides = () if dist_bn is None else (f"parallel.dist_bn={dist_bn}",)
    config = resolved(*DDP, *overrides)
    strategy = build_strategy(config.parallel, ranks, store)
    norm = nn.BatchNorm2d(3)
    assert norm.running_mean is not None
    norm.running_mean.fill_(float(ranks.rank))
    strategy.buffers.share(norm)
    strategy.close()
    return float(norm.running_mean[0])


@pytest.mark.processes
@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("dist_bn", "expected"), [(None, 0.0), ("broadcast", 0.0), ("reduce", 0.5)]
)
def test_dist_bn_broadcast_copies_statistics_of_rank_0_and_dist_bn_reduce_averages_all_ranks(
    dist_bn: str | None, expected: float
) -> None:
    assert in_ranks(shared_mean, 2, dist_bn) == [expected, expected]


def evaluated_and_own_statistics(
    ranks: Ranks, store: Any, folder: Path
) -> tuple[list[float], list[float]]:
    """Train one epoch under ddp. Return the running statistics of BatchNorm after the evaluation,
    for which the ranks have shared them, and those from the images of this rank alone. All ranks
    must call this function.
    """
    # Use a learning rate so low that the weights do not change. The BatchNorm statistics then
    # depend only on the images.
    overrides = (f"model.name={HERE}.Normed", "optim.lr=1e-12", "train.epochs=1")
    config = resolved(*DDP, *overrides, "parallel.dist_bn=reduce")
    run = start_run(config, folder, ranks, store)
    alone = copy.deepcopy(run.parts.state.model).train()
    for batch in run.parts.train_loader.epoch(0):
        alone(batch.image)
    for _ in take_steps(run):
        pass
    return averages(run.parts.state.model), averages(alone)


def averages(model: nn.Module) -> list[float]:
    return torch.cat(
        [value.flatten() for name, value in model.named_buffers() if "running" in name]
    ).tolist()


@pytest.mark.slow(seconds=2)
@pytest.mark.processes
def test_ddp_dist_bn_reduce_averages_batchnorm_statistics_of_ranks_after_an_epoch(
    tmp_path: Path,
) -> None:
    of_ranks = in_ranks(evaluated_and_own_statistics, 2, tmp_path, timeout=120)
    (evaluated, own), (evaluated_on_1, own_on_1) = of_ranks
    assert evaluated == evaluated_on_1
    assert own != pytest.approx(own_on_1, rel=0.01), (
        "the ranks must differ, or rank 0's statistics would pass too"
    )
    mean = [(value + other) / 2 for value, other in zip(own, own_on_1, strict=True)]
    assert evaluated == pytest.approx(mean, rel=1e-4, abs=1e-5)

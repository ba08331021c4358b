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
from timm_parallel.testing.ranks import in_ranks
from timm_parallel.tests.small_runs import resolved, start_run, take_steps

# Module name under which configs find this file, because they may name only classes of small/.
HERE = "small.dist_bn_of_test"
sys.modules[HERE] = sys.modules[__name__]


class Normed(Tiny):
    """Tiny with BatchNorm."""

    __module__ = HERE

    def __init__(self, outputs: int, width: int) -> None:
        super().__init__(outputs, width)
        self.features.insert(1, nn.BatchNorm2d(width))


def evaluated_and_own_statistics(
    ranks: Ranks, store: Any, folder: Path, dist_bn: str | None
) -> tuple[list[float], list[float]]:
    """Train one epoch under ddp. Return the running statistics of BatchNorm after the evaluation,
    for which the ranks have shared them, and those from the images of this rank alone. All ranks
    must call this function.
    """
    # Use a learning rate so low that the weights do not change. The BatchNorm statistics then
    # depend only on the images.
    overrides = (f"model.name={HERE}.Normed", "optim.lr=1e-12", "train.epochs=1")
    given = () if dist_bn is None else (f"parallel.dist_bn={dist_bn}",)
    config = resolved("parallel=ddp", "parallel.devices=2", *overrides, *given)
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
@pytest.mark.parametrize("dist_bn", ["reduce", "broadcast", None])
@pytest.mark.sample(2)
def test_dist_bn_averages_batchnorm_statistics_of_ranks_after_an_epoch_or_copies_those_of_rank_0(
    tmp_path: Path, dist_bn: str | None
) -> None:
    of_ranks = in_ranks(evaluated_and_own_statistics, 2, tmp_path, dist_bn, timeout=120)
    (evaluated, own), (evaluated_on_1, own_on_1) = of_ranks
    assert evaluated == evaluated_on_1
    # The ranks differ, or the statistics of rank 0 would pass too.
    assert own != pytest.approx(own_on_1, rel=0.01)
    mean = [(value + other) / 2 for value, other in zip(own, own_on_1, strict=True)]
    expected = mean if dist_bn == "reduce" else own
    assert evaluated == pytest.approx(expected, rel=1e-4, abs=1e-5)

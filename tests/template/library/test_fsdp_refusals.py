"""fsdp refuses models and losses that it cannot shard, with key and fix."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import PrefixStore
from torch.nn import functional

from src.train.build import build_run
from tests.template.runs import resolved
from timm_parallel.machine.ranks import Ranks
from timm_parallel.parallel.strategy import build_strategy
from timm_parallel.testing.ranks import in_ranks

# Let configs refer to the classes of this file by a name below src, because a config may name only
# classes of src/.
HERE = "src.fsdp_refusals_of_test"
sys.modules[HERE] = sys.modules[__name__]


class Block(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)
        self.norm = nn.LayerNorm(size)

    def forward(self, features: Tensor) -> Tensor:
        return self.norm(self.linear(features).relu())  # type: ignore[no-any-return]


class ReadsWeight(nn.Module):
    """Model that reads the weight of a block outside of the forward pass of the block."""

    def __init__(self, num_classes: int, in_chans: int) -> None:
        super().__init__()
        self.block, self.head = Block(in_chans * 64), nn.Linear(in_chans * 64, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        features = self.block(images.flatten(1))
        return self.head(functional.linear(features, self.block.linear.weight))  # type: ignore[no-any-return]


class NamesNoBlocks(ReadsWeight):
    def shard_blocks(self) -> list[nn.Module]:
        return []


class Scaled(ReadsWeight):
    def __init__(self, num_classes: int, in_chans: int) -> None:
        super().__init__(num_classes, in_chans)
        self.scale = nn.Parameter(torch.tensor(2.0))


class Temperature(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(outputs * self.scale, targets)


def refusals_of_fsdp(ranks: Ranks, store: Any) -> list[str]:
    """Train a step under fsdp with each model or loss; return the error messages."""
    messages = []
    for number, name in enumerate(("ReadsWeight", "Scaled", "Temperature", "NamesNoBlocks")):
        config = resolved(
            "parallel=fsdp", "parallel.devices=2", "data.image_size=8", "data.batch_size=24"
        )
        if name == "Temperature":
            config.train.loss = f"{HERE}.{name}"
        else:
            config.model.name, config.model.kwargs = f"{HERE}.{name}", {}
        strategy = build_strategy(config.parallel, ranks, PrefixStore(str(number), store))
        try:
            run = build_run(config, strategy)
            losses, _ = run.state.phases[0].wrapped(next(run.train_loader.epoch(0)))
            losses.mean().backward()
            messages.append("")
        except ValueError as error:
            messages.append(str(error))
        strategy.close()
    return messages


@pytest.mark.slow(seconds=3)
def test_fsdp_error_for_a_model_or_loss_that_cannot_be_sharded_names_key_and_fix() -> None:
    for reads_weight, scaled, temperature, names_no_blocks in in_ranks(refusals_of_fsdp, 2):
        assert "shard_blocks()" in reads_weight and "parallel=ddp" in reads_weight
        assert scaled.startswith("model.name: scale ") and "parallel=ddp" in scaled
        assert temperature.startswith("train.loss: scale ")
        assert names_no_blocks == ""

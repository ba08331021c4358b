"""Bytes that fsdp moves in a step: parameters gathered for each pass through the model, and gradients scattered."""

from __future__ import annotations

import torch
from torch import nn

from src.engine.parallel.communication import Communication


class ShardTraffic(Communication):
    """Counts the bytes of fsdp, whose devices all send and receive alike."""

    method = "not measured: gathers and scatters are kernels among others"

    def __init__(self, world_size: int, shard_size: int, dtype: torch.dtype | None, kept: bool) -> None:
        """`dtype`: type of gathered parameters, if not their own; `kept`: gathered once for both passes."""
        self._world_size, self._shard_size, self._dtype = world_size, shard_size, dtype
        self._gathers = 1 if kept else 2

    def seconds(self) -> tuple[float, float] | None:
        return None

    def bytes(self, model: nn.Module, accumulate: int) -> tuple[int, int]:
        """Count bytes per step: each batch gathers parameters, and the last one of a step reduces gradients in float32.

        Rings, in which a rank of n sends (n - 1) / n of what is gathered or scattered. Copies of the model then average
        their parts by all-reduce.
        """
        parameters = list(model.parameters())
        size = sum(p.numel() * (self._dtype or p.dtype).itemsize for p in parameters)
        gradients = sum(p.numel() * 4 for p in parameters if p.requires_grad)
        shards, copies = self._shard_size, self._world_size // self._shard_size
        moved = accumulate * self._gathers * size + gradients
        averaged = 2 * (copies - 1) * gradients // (copies * shards)
        return moved + gradients // shards * (copies > 1), (shards - 1) * moved // shards + averaged

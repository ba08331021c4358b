"""Measure the FLOPs and the memory of a training step on fake tensors, which have shapes but no
values.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from timm_parallel.keys import ResolvedParallel
from timm_parallel.lab.plan import Bytes
from timm_parallel.measure.flops import step_costs
from timm_parallel.parallel.blocks import gathered_bytes


def measure_step(
    parallel: ResolvedParallel,
    step: nn.Module,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: tuple[Tensor, Tensor],
    dtype: torch.dtype | None,
    has_ema: bool,
) -> tuple[int, Bytes]:
    """Measure the FLOPs and the memory of one training step of one device, on fake tensors. Return
    (FLOPs of forward and backward pass, memory).

    `step`: module that computes the loss of `model`. `batch`: images and targets of one device.
    `dtype`: type of autocast, or None if it is off. `has_ema`: True if the run averages its
    weights.
    """
    averaged = [*model.parameters(), *model.buffers()]
    weights = [*step.parameters(), *step.buffers()]
    flops, activations = step_costs(lambda: step(*batch)[0], excluding=[*weights, batch[0]])
    optimizer.step()
    gradients = [p.grad for p in step.parameters() if p.grad is not None]
    states = (
        value
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor)
    )
    parts = (parallel.shard_size or parallel.devices) if parallel.shards else 1
    has_buckets = parallel.has_buckets and not parallel.gradient_as_bucket_view

    memory = Bytes(
        weights=_size(weights) // parts,
        gradients=_size(gradients) // parts,
        optimizer=_size(states) // parts,
        ema=_size(averaged) // parts if has_ema else 0,
        activations=activations,
        batch=_size(batch),
        buckets=_size(gradients) if has_buckets else 0,
        gathered=gathered_bytes(model, dtype, parallel.reshard_after_forward) if parts > 1 else 0,
    )
    return flops, memory


def _size(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)

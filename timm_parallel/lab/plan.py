"""Sizes, steps and memory that a run would have on a given number of devices, as records and as a
printed table.

The FLOPs and the memory are those of a training step on fake tensors, which have shapes but no
values.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from timm_parallel.keys import ResolvedParallel
from timm_parallel.lab.sweep.board import plain_console, show_table
from timm_parallel.measure.flops import step_costs

COLUMNS = (
    "devices",
    "batch",
    "per device",
    "images/device",
    "dropped",
    "steps",
    "lr",
    "GFLOP/step",
    "MiB/device",
)


@dataclass
class Plan:
    """Sizes and steps of a run on a number of devices. If the run is not possible, only `reason` is
    set.
    """

    devices: int
    reason: str = ""
    strategy: str = ""
    # Number of images of all devices in one batch.
    batch_size: int = 0
    # Number of images that one device gets of a batch. If the parts differ, the largest counts.
    batch_size_per_device: int = 0
    # Number of images of the training split.
    images: int = 0
    # Number of images that one device processes in an epoch.
    images_per_device: int = 0
    dropped_per_epoch: int = 0
    steps_per_epoch: int = 0
    steps: int = 0
    # Highest learning rate of the schedule.
    learning_rate: float = 0.0
    parameters: int = 0
    # Operations of the forward and backward pass on all devices. A multiply-add counts as 2.
    flops_per_step: int = 0
    # Estimated memory of the tensors on one device.
    bytes_per_device: int = 0
    warnings: list[str] = field(default_factory=list)


def measure_step(
    parallel: ResolvedParallel,
    step: nn.Module,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: tuple[Tensor, Tensor],
    has_ema: bool,
) -> tuple[int, int]:
    """Measure the FLOPs and the memory of one training step of one device, on fake tensors. Return
    (FLOPs of forward and backward pass, bytes of the tensors at the end of the forward pass).

    Memory is highest there. Under dp, the bytes are those of device 0, which needs the most. Whole
    blocks that fsdp gathers, and copies of gradients for ddp, are not counted.

    `step`: module that computes the loss of `model`. `batch`: images and targets of one device.
    `has_ema`: True if the run averages its weights.
    """
    averaged = [*model.parameters(), *model.buffers()] if has_ema else []
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
    kept = _size(weights) + _size(gradients) + _size(states) + _size(averaged)
    return flops, kept // parts + activations + _size(batch)


def show_plan(plans: list[Plan]) -> None:
    """Print a table with a row per number of devices: batches, steps, learning rate, FLOPs and
    memory of a run. Warnings follow below the table.
    """
    console = plain_console()
    possible = [row for row in plans if not row.reason]
    if possible:
        show_table(COLUMNS, map(_cells, possible))
        parameters = f"{possible[0].parameters:,} parameters"
        console.print(f"{parameters}; memory of tensors, without libraries and caches")
    for row in plans:
        if row.reason:
            console.print(f"{row.devices} devices: cannot run: {row.reason}")
        for warning in row.warnings:
            console.print(f"{row.devices} devices: {warning}")


def _cells(row: Plan) -> list[str]:
    counts = (row.batch_size, row.batch_size_per_device, row.images_per_device)
    return [
        f"{row.devices} {row.strategy}",
        *map(str, (*counts, row.dropped_per_epoch)),
        f"{row.steps} = {row.steps / row.steps_per_epoch:g} x {row.steps_per_epoch}",
        f"{row.learning_rate:g}",
        f"{row.flops_per_step / 1e9:.4g}",
        f"{row.bytes_per_device / 2**20:,.1f}",
    ]


def _size(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)

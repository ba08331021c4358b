"""Sizes, steps and memory that a run would have on a given number of devices, as records and as a
printed table.

The FLOPs and the memory are those of a training step on fake tensors, which have shapes but no
values.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from timm_parallel.batch import Batch
from timm_parallel.keys import ResolvedParallel
from timm_parallel.lab.sweep.board import plain_console, show_table
from timm_parallel.model.flops import step_costs
from timm_parallel.parallel.networks import Networks
from timm_parallel.task import Task

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
    # Operations of the forward and backward pass on all devices. A multiply-add counts as 2. None:
    # the losses need values of tensors, which a plan does not have.
    flops_per_step: int | None = None
    # Estimated memory of the tensors on one device. None: as above.
    bytes_per_device: int | None = None
    warnings: list[str] = field(default_factory=list)


def measure_step(
    parallel: ResolvedParallel,
    task: Task[Any],
    networks: Networks,
    optimizers: Sequence[torch.optim.Optimizer],
    batch: Batch,
    averaged: Sequence[nn.Module],
) -> tuple[int, int]:
    """Measure the FLOPs and the memory of one training step of one device, on fake tensors. Return
    (FLOPs of the forward and backward passes, bytes of the tensors at the end of the forward pass
    of the largest phase).

    Memory is highest there. Under dp, the bytes are those of device 0, which needs the most. Whole
    blocks that fsdp gathers, and copies of gradients for ddp, are not counted.

    `optimizers`: one for each phase of the task. `batch`: that of one device. `averaged`: networks
    of which the run keeps an average besides those of the task.
    """
    networks.train()
    weights = [*networks.parameters(), *networks.buffers()]
    averages = [t for module in averaged for t in (*module.parameters(), *module.buffers())]
    fields = [field for field in tree_leaves(batch.fields) if isinstance(field, Tensor)]
    flops = activations = gradients = 0
    for phase, optimizer in zip(task.phases, optimizers, strict=True):

        def loss(phase: str = phase) -> Tensor:
            return task.losses(networks, batch, phase)[0].sum()

        of_phase = step_costs(loss, excluding=[*weights, *fields])
        flops, activations = flops + of_phase[0], max(activations, of_phase[1])
        optimizer.step()
        own = (p for group in optimizer.param_groups for p in group["params"])
        gradients = max(gradients, _size(p.grad for p in own if p.grad is not None))
    states = (
        value
        for optimizer in optimizers
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor)
    )
    parts = parallel.devices if parallel.shards else 1
    kept = _size(weights) + gradients + _size(states) + _size(averages)
    return flops, kept // parts + activations + _size(fields)


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
        "unknown" if row.flops_per_step is None else f"{row.flops_per_step / 1e9:.4g}",
        "unknown" if row.bytes_per_device is None else f"{row.bytes_per_device / 2**20:,.1f}",
    ]


def _size(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)

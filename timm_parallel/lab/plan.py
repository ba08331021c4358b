"""Sizes, steps and memory that a run would have on a given number of devices, as records and as a
printed table.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table

COLUMNS = (
    "devices",
    "batch",
    "per device",
    "images/device",
    "dropped",
    "steps",
    "lr",
    "GFLOP/step",
    "gradients",
)


@dataclass
class Bytes:
    """Memory in bytes of the tensors on one device at the end of the forward pass, when it is
    highest. Under dp, the values are those of device 0, which needs the most memory.

    `buckets`: ddp's copies of the gradients. `gathered`: whole parameters that fsdp holds in
    addition to its shards.
    """

    weights: int
    gradients: int
    optimizer: int
    ema: int
    activations: int
    batch: int
    buckets: int
    gathered: int
    total: int = field(init=False)

    def __post_init__(self) -> None:
        self.total = sum(vars(self).values())


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
    bytes: Bytes | None = None
    warnings: list[str] = field(default_factory=list)


def show_plan(plans: list[Plan]) -> None:
    """Print a table with a row per number of devices: batches, steps, learning rate, FLOPs and
    memory of a run. Warnings follow below the table.
    """
    console = Console(width=None if Console().is_terminal else 200, markup=False, emoji=False)
    table = Table(
        *COLUMNS, "held per device: weights + gradients + optimizer + EMA + activations + rest"
    )
    for row in plans:
        if row.bytes is None:
            table.add_row(str(row.devices), *[""] * (len(COLUMNS) - 1), f"cannot run: {row.reason}")
            continue
        memory = row.bytes
        rest = memory.batch + memory.buckets + memory.gathered
        parts = (
            memory.weights,
            memory.gradients,
            memory.optimizer,
            memory.ema,
            memory.activations,
            rest,
        )
        table.add_row(
            f"{row.devices} {row.strategy}",
            *map(
                str,
                (
                    row.batch_size,
                    row.batch_size_per_device,
                    row.images_per_device,
                    row.dropped_per_epoch,
                ),
            ),
            f"{row.steps} = {row.steps / row.steps_per_epoch:g} x {row.steps_per_epoch}",
            f"{row.learning_rate:g}",
            f"{row.flops_per_step / 1e9:.4g}",
            _mebibytes(memory.gradients),
            f"{_mebibytes(memory.total)} = {' + '.join(_mebibytes(part) for part in parts)}",
        )
    console.print(table)
    if parameters := max(row.parameters for row in plans):
        console.print(f"{parameters:,} parameters; tensors in MiB, without libraries and caches")
    for row in plans:
        for warning in row.warnings:
            console.print(f"{row.devices} devices: {warning}", highlight=False)


def _mebibytes(size: int) -> str:
    return f"{size / 2**20:.1f}" if size < 2**30 else f"{size / 2**20:.0f}"

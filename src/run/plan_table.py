"""A plan for people: one row per device count, the warnings below."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from src.run.plan import Plan

COLUMNS = ("devices", "batch", "per device", "images/device", "dropped", "steps", "lr", "GFLOP/step", "gradients")


def show(plans: list[Plan]) -> None:
    console = Console(width=None if Console().is_terminal else 200, markup=False, emoji=False)
    table = Table(*COLUMNS, "held per device: weights + gradients + optimizer + EMA + activations + rest")
    for one in plans:
        if one.bytes is None:
            table.add_row(str(one.devices), *[""] * (len(COLUMNS) - 1), f"cannot be: {one.reason}")
            continue
        held = one.bytes
        rest = held.batch + held.buckets
        parts = (held.weights, held.gradients, held.optimizer, held.ema, held.activations, rest)
        table.add_row(
            f"{one.devices} {one.strategy}",
            str(one.batch_size),
            str(one.batch_size_per_device),
            str(one.images_per_device),
            str(one.dropped_per_epoch),
            f"{one.steps} = {one.steps / one.steps_per_epoch:g} x {one.steps_per_epoch}",
            f"{one.learning_rate:g}",
            f"{one.flops_per_step / 1e9:.4g}",
            mebibytes(held.gradients),
            f"{mebibytes(held.total)} = {' + '.join(mebibytes(part) for part in parts)}",
        )
    console.print(table)
    made = [one for one in plans if one.bytes is not None]
    if made:
        console.print(
            f"{made[0].parameters:,} parameters; bytes in MiB, of tensors alone: libraries and caches come on top"
        )
    for one in plans:
        for warning in one.warnings:
            console.print(f"{one.devices} devices: {warning}", highlight=False)


def mebibytes(size: int) -> str:
    return f"{size / 2**20:.1f}" if size < 2**30 else f"{size / 2**20:.0f}"

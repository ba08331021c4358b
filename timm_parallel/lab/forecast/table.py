"""Forecast the speed on more devices from the runs in a sweep folder, and format the forecast as
text.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from textwrap import indent
from typing import Any

import pandas as pd

from timm_parallel.lab.analysis.runs import RunRecord
from timm_parallel.lab.forecast.model import Answer, Measured, forecast
from timm_parallel.lab.report.collect import collect


def forecast_sweep(folder: Path, **options: Any) -> dict[str, Answer]:
    """Forecast the speed on more devices from the runs of a sweep. Return a dictionary from setting
    to forecast. The runs of a setting differ only in number of devices, batch and repeat.

    `options`: arguments of `forecast`, such as counts and bandwidth. Raises ValueError if no
    setting was measured on two or more numbers of devices.
    """
    measured: dict[str, list[Measured]] = defaultdict(list)
    for run in collect([folder]):
        if (step := read_measured(run)) is not None:
            measured[setting_of(run)].append(step)
    enough = {
        name: runs for name, runs in measured.items() if len({run.devices for run in runs}) > 1
    }
    if not enough:
        raise ValueError(
            f"{folder}: a forecast needs finished runs of one setting on two or more numbers of "
            "devices, with single or ddp; sweep over parallel.devices without concurrent jobs"
        )
    return {name: forecast(runs, **options) for name, runs in enough.items()}


def read_measured(run: RunRecord) -> Measured | None:
    """Return the step time, images per step and bytes of gradients of a run. Return None for a run
    of dp or fsdp, and for a run that is unfinished, has no measured speed, or ran next to other
    jobs.
    """
    speed, batch, sent = (
        run.measure("images_per_sec"),
        run.integer("batch_size"),
        run.measure("bytes_per_step"),
    )
    alone = run.comparable and run.integer("processes") == run.devices and not run.neighbours
    if not (alone and speed and batch and run.devices) or sent is None:
        return None
    images = batch * int(run.config.get("train.accumulate") or 1)
    ring = run.measure("communication_ms")
    return Measured(
        devices=run.devices,
        images=images,
        seconds=images / speed,
        gradient_bytes=int(sent),
        ring=ring / 1000 if ring and run.devices > 1 else None,
        waits_for_data=run.measure("data_wait") or 0.0,
        flagged=bool(run.flags),
    )


def setting_of(run: RunRecord) -> str:
    """Return the overrides of a run that describe its setting, joined to a text. Overrides of the
    strategy, devices, batch and seed are dropped. If no other override remains, return the name of
    the model.
    """
    covered = (
        "parallel=",
        "parallel.devices=",
        "data.batch_size",
        "sweep.",
        "seed=",
        "experiment=",
        "hydra.",
    )
    others = [override for override in run.overrides if not override.startswith(covered)]
    return " ".join(others) or str(run.result.get("model") or "")


def as_text(answers: dict[str, Answer]) -> Iterator[str]:
    """Yield the lines of a printed forecast: the fitted costs, reasons to doubt them, and a table
    each for strong and weak scaling.
    """
    for name, answer in answers.items():
        model = answer.model
        link = model.across or model.link
        yield f"{name}: {answer.verdict}"
        yield (
            f"  step = {figure(1000 * model.fixed)} ms + {figure(1000 * model.per_image)} ms per "
            f"image; ring of {figure(model.gradient_bytes / 2**20)} MiB over "
            f"{figure(8 * link.bandwidth / 1e9)} Gbit/s, {figure(1e6 * link.latency)} us per "
            f"message, hidden behind up to {model.hidden:.0%} of the compute time"
        )
        if model.data_rate is not None:
            yield (
                f"  the loader delivers {figure(model.data_rate)} images/s per device, which "
                "bounds the step"
            )
        yield from (f"  {note}" for note in answer.notes)
        if answer.error is None:
            yield "  low and high: unknown, because two counts leave none to check"
        else:
            yield (
                "  low and high: over the fits without one count, widened by the model's "
                "largest error"
            )
        kinds = {
            "strong, the same global batch": answer.strong,
            "weak, the same batch per device": answer.weak,
        }
        for title, rows in kinds.items():
            table = pd.DataFrame(rows).rename(
                columns={"per_device": "per device", "speed": "images/s"}
            )
            table["efficiency"] = table["efficiency"].map("{:.1%}".format)
            numbers = table.columns.drop("efficiency")
            table[numbers] = table[numbers].astype(float).map(figure)
            yield f"  {title}"
            yield indent(table.to_string(index=False), "  ")


def figure(value: float) -> str:
    """Format a number without an exponent: three significant digits below 100, else an integer with
    thousands separators.
    """
    if math.isnan(value):
        return "unknown"
    return f"{value:.3g}" if 0.001 <= value < 100 else f"{value:,.0f}"

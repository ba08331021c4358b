"""The forecast of a sweep folder: its runs read, and the answer as text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from textwrap import indent
from typing import Any

import pandas as pd

from src.engine.report.collect import collect
from src.engine.report.forecast import Answer, Measured, forecast
from src.engine.report.measured import RunRecord


def forecast_sweep(folder: Path, **options: Any) -> dict[str, Answer]:
    """An answer per set of runs that differ in devices, batch and repeat only, by what they have in common.

    `options` as in `forecast`. Errors: ValueError, one line, where no set has two device counts.
    """
    found: dict[str, list[Measured]] = {}
    for run in collect([folder]):
        if (measured := read_measured(run)) is not None:
            found.setdefault(what(run), []).append(measured)
    enough = {name: runs for name, runs in found.items() if len({run.devices for run in runs}) > 1}
    if not enough:
        raise ValueError(
            f"{folder}: no two device counts with timed runs of single or ddp that are alike, ended well and ran alone; "
            "sweep over parallel.devices"
        )
    return {name: forecast(runs, **options) for name, runs in enough.items()}


def read_measured(run: RunRecord) -> Measured | None:
    """None for a run that tells nothing: dp, neighbours beside it, in no block, not done, or too short to be timed."""
    speed, batch = run.measure("images_per_sec"), run.integer("batch_size")
    alone = run.comparable and run.strategy != "dp" and not run.neighbours and run.block is not None
    if not (alone and speed and batch and run.devices):
        return None
    images = batch * int(run.config.get("train.accumulate") or 1)
    ring = run.measure("communication_ms")
    return Measured(
        devices=run.devices,
        images=images,
        seconds=images / speed,
        gradient_bytes=int(run.measure("bytes_per_step") or 0),
        ring=ring / 1000 if ring and run.devices > 1 else None,
        waits_for_data=run.measure("data_wait") or 0.0,
    )


def what(run: RunRecord) -> str:
    """The overrides that a forecast does not see through."""
    seen = ("parallel=", "parallel.devices=", "data.batch_size", "sweep.", "seed=", "experiment=", "hydra.")
    kept = [word for word in run.overrides if not word.startswith(seen)]
    return " ".join(kept) or str(run.result.get("model") or "")


def as_text(answers: dict[str, Answer]) -> Iterator[str]:
    for name, answer in answers.items():
        model = answer.model
        link = model.across or model.link
        yield f"{name}: {answer.verdict}"
        yield (
            f"  step = {1000 * model.fixed:.3g} ms + {1000 * model.per_image:.3g} ms per image; "
            f"ring of {model.gradient_bytes / 2**20:.3g} MiB over {8 * link.bandwidth / 1e9:.3g} Gbit/s, "
            f"{1e6 * link.latency:.3g} us a message, {model.hidden:.0%} of the compute time can hide it"
        )
        if model.data_rate is not None:
            yield f"  the loader delivers {model.data_rate:.4g} images/s to a device, and bounds the step"
        kinds = {"strong, the same global batch": answer.strong, "weak, the same batch per device": answer.weak}
        for title, rows in kinds.items():
            table = pd.DataFrame(rows).astype({"low": float, "high": float, "measured": float})
            table = table.rename(columns={"per_device": "per device", "speed": "images/s"})
            yield f"  {title}"
            yield indent(table.to_string(index=False, na_rep="unknown", float_format="{:.4g}".format), "  ")

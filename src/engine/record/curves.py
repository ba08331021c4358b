"""Two runs' curves side by side: where they part, beyond a tolerance."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from src.engine.record.result import read_metrics, read_result

Curve = dict[int, float]  # step -> value
BY_THE_CLOCK = re.compile(r"epoch|step|time|train/(images_per_sec(_per_device)?|data_wait)|(memory|utilisation)/.*")


@dataclass
class Compared:
    """One curve of both runs."""

    name: str
    points: int
    largest: float  # relative difference
    parts_at: int | None  # the first step with a larger difference than the tolerance; None: they agree
    values: tuple[float, float]  # there


def compare(one: Path, other: Path, tolerance: float) -> list[Compared]:
    """The curves that both runs have, by name. Runs of different length, data or batch are refused."""
    first, second = _size(one), _size(other)
    for key, a in first.items():
        if a != second[key]:
            raise ValueError(
                f"{key}: {a} in {one}, {second[key]} in {other}: runs on different data, of different length or batch"
            )
    mine, theirs = curves(one), curves(other)
    common = sorted(set(mine) & set(theirs))
    if not common:
        raise ValueError(f"{one} and {other} have no curve in common")
    return [_compare(name, mine[name], theirs[name], tolerance) for name in common]


def _size(run: Path) -> dict[str, Any]:
    """Where two runs differ in one of these, it was another training."""
    result = read_result(run)
    numbers = {key: getattr(result, key) for key in ("steps", "batch_size", "samples_seen", "dropped_per_epoch")}
    return numbers | {f"{split} samples": getattr(result, split).get("samples") for split in ("val", "test")}


def curves(run: Path) -> dict[str, Curve]:
    """metrics.jsonl by name, without what depends on the clock or on memory."""
    found: dict[str, Curve] = {}
    if not (run / "metrics.jsonl").is_file():
        raise ValueError(f"{run}: no metrics.jsonl here; is this a run folder?")
    for line in read_metrics(run / "metrics.jsonl"):
        for name, value in line.items():
            if not BY_THE_CLOCK.fullmatch(name):
                found.setdefault(name, {})[line["step"]] = math.nan if value is None else value
    return found


def _compare(name: str, one: Curve, other: Curve, tolerance: float) -> Compared:
    """A step that only one of them has, or a value that only one could not compute, is where they part."""
    found = Compared(name, len(one), 0.0, None, (math.nan, math.nan))
    for step in sorted(set(one) | set(other)):
        a, b = one.get(step, math.nan), other.get(step, math.nan)
        if math.isnan(a) and math.isnan(b) and step in one and step in other:
            continue
        difference = 0.0 if a == b else math.inf if math.isnan(a + b) else abs(a - b) / max(abs(a), abs(b))
        found.largest = max(found.largest, difference)
        if difference > tolerance and found.parts_at is None:
            found.parts_at, found.values = step, (a, b)
    return found

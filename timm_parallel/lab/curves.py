"""Compare the metric curves of two runs, and find the first step where they differ by more than a
tolerance.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from timm_parallel.record.result import read_metrics, read_result

Curve = dict[int, float]  # step -> value
BY_THE_CLOCK = re.compile(
    r"epoch|step|time|train/(images_per_sec(_per_device)?|data_wait)|(memory|utilisation)/.*"
)


@dataclass
class CurveComparison:
    """Result of comparing one metric curve of two runs."""

    name: str
    points: int
    largest: float  # relative difference
    differs_at: (
        int | None
    )  # the first step with a difference above the tolerance; None: the curves agree
    values: tuple[float, float]  # at that step


def compare_curves(one: Path, other: Path, tolerance: float) -> list[CurveComparison]:
    """Compare the curves of all metrics that both runs logged. Raises ValueError if length, data or
    batch differ.
    """
    first, second = _size(one), _size(other)
    for key, a in first.items():
        # A run that failed early has no fingerprints.
        if key in second and a != second[key]:
            raise ValueError(
                f"{key}: {a} in {one}, {second[key]} in {other}; expected runs on equal data, of "
                "equal length and batch"
            )
    of_one, of_other = curves(one), curves(other)
    common = sorted(of_one.keys() & of_other.keys())
    if not common:
        raise ValueError(
            f"{one} and {other}: no metric is in both metrics.jsonl files; expected two runs of "
            "one task"
        )
    return [_compare(name, of_one[name], of_other[name], tolerance) for name in common]


def _size(run: Path) -> dict[str, Any]:
    """Return a run's length, batch size and data fingerprints, which must be equal in two runs to
    compare them.
    """
    result = read_result(run)
    numbers = {
        key: getattr(result, key)
        for key in ("steps", "batch_size", "samples_seen", "dropped_per_epoch")
    }
    numbers |= {
        f"{split} samples": getattr(result, split).get("samples") for split in ("val", "test")
    }
    return numbers | {f"data ({split})": fingerprint for split, fingerprint in result.data.items()}


def curves(run: Path) -> dict[str, Curve]:
    """Read {step: value} of each metric from a run's metrics.jsonl. Omits metrics of time and
    memory.
    """
    if not (run / "metrics.jsonl").is_file():
        raise ValueError(f"{run}: has no metrics.jsonl; expected a run folder")
    by_name: dict[str, Curve] = defaultdict(dict)
    for line in read_metrics(run / "metrics.jsonl"):
        for name, value in line.items():
            if not BY_THE_CLOCK.fullmatch(name):
                by_name[name][line["step"]] = math.nan if value is None else value
    return by_name


def _compare(name: str, one: Curve, other: Curve, tolerance: float) -> CurveComparison:
    """Compare the curves of one metric. A step or value that only one of the runs has is an
    infinite difference.
    """
    result = CurveComparison(name, len(one), 0.0, None, (math.nan, math.nan))
    for step in sorted(one.keys() | other.keys()):
        a, b = one.get(step, math.nan), other.get(step, math.nan)
        both_nan = step in one and step in other and math.isnan(a) and math.isnan(b)
        if a == b or both_nan:
            continue
        difference = math.inf if math.isnan(a + b) else abs(a - b) / max(abs(a), abs(b))
        result.largest = max(result.largest, difference)
        if difference > tolerance and result.differs_at is None:
            result.differs_at, result.values = step, (a, b)
    return result

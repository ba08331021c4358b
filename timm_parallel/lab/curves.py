"""Compare the metric curves of two runs, and find the first step at which the values differ by more
than a tolerance.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from timm_parallel.record.result import read_metrics, read_result

# Logged values of one metric: step -> value.
Curve = dict[int, float]
# Logged metrics that differ between any two runs, because they measure time or memory.
BY_THE_CLOCK = re.compile(
    r"epoch|step|time|train/(images_per_sec(_per_device)?|data_wait)|(memory|utilisation)/.*"
)


@dataclass
class CurveComparison:
    """Result of comparing the curve of one metric in two runs."""

    # The metric, such as `train/loss`.
    name: str
    # Number of logged values in the first run.
    points: int
    # Largest relative difference of two values at the same step.
    largest: float
    # First step at which the difference exceeds the tolerance. None if there is no such step.
    differs_at: int | None
    # Values of the first and the second run at the step `differs_at`.
    values: tuple[float, float]


def compare_curves(one: Path, other: Path, tolerance: float) -> list[CurveComparison]:
    """Compare the curves of all metrics that both runs logged, and return a result per metric.
    Raises ValueError if the runs have different numbers of steps, data or batch sizes.

    `tolerance`: relative difference up to which two values count as equal.
    """
    first, second = _size(one), _size(other)
    for key, a in first.items():
        # A run that failed before it loaded its data recorded no fingerprints of the data.
        if key in second and a != second[key]:
            raise ValueError(
                f"{key}: {a} in {one}, but {second[key]} in {other}; expected two runs with "
                "equal data, number of steps and batch size"
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
    """Read the length, batch size and data fingerprints of a run. The curves of two runs can be
    compared only if all of these are equal.
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
    """Read the values of each metric by step from a run's metrics.jsonl. Measurements of time and
    memory are left out.
    """
    if not (run / "metrics.jsonl").is_file():
        raise ValueError(
            f"{run}: has no metrics.jsonl; expected the folder of a run that has logged metrics"
        )
    by_name: dict[str, Curve] = defaultdict(dict)
    for line in read_metrics(run / "metrics.jsonl"):
        for name, value in line.items():
            if not BY_THE_CLOCK.fullmatch(name):
                by_name[name][line["step"]] = math.nan if value is None else value
    return by_name


def _compare(name: str, one: Curve, other: Curve, tolerance: float) -> CurveComparison:
    """Compare the curves of one metric in two runs. A step or value that only one run has counts as
    an infinite difference.
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

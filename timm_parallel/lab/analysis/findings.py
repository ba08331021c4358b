"""Findings: the statements of a report, before they are put into words. A finding is a kind with
numbers. `lab/report/sentences.j2` has one macro per kind, with a parameter per number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from timm_parallel.lab.analysis.groups import Configuration

Kind = Literal[
    # Strategies and numbers of devices, compared by their speed.
    "disturbed",
    "no_speed",
    "simplest",
    "not_compared",
    "alone",
    "no_gain",
    "faster_than_single",
    "slow_rank",
    # Settings, compared by a metric.
    "better",
    "too_few_repeats",
    "all_equal",
    "best_mean",
    "better_without",
    "only_setting",
    "until_decided",
    "expected",
    "not_worse",
    "other_baseline",
    "lost_runs",
    "far_off",
    "extended",
    "over_folds",
    "over_seeds",
    # A change of the code.
    "refused",
    "refused_by_code",
    "not_ended",
    "failed",
    "loses_runs",
    "not_measured",
    "head_is",
    "noted",
    "not_equal",
    "number_of_verdict",
    # Notes below a table.
    "devices_are_threads",
    "more_threads_than_cores",
    "unlike_threads",
    "odd_run",
    # A pair of configurations, and the jobs of a page.
    "pair",
    "ratio",
    "sweep_not_ended",
    "unknown_direction",
    "code_changed",
]


@dataclass(frozen=True)
class Finding:
    """A statement of a report. `numbers` has plain values only, as report.json stores them."""

    kind: Kind
    numbers: Mapping[str, Any] = field(default_factory=dict)


def finding(kind: Kind, **numbers: Any) -> Finding:
    """Build a finding from its numbers."""
    return Finding(kind, numbers)


def point_numbers(point: Configuration) -> dict[str, Any]:
    """Return what names a strategy on a number of devices."""
    return {
        "strategy": point.first.strategy,
        "devices": point.first.devices,
        "nodes": point.first.nodes,
        "options": point.options,
    }


def setting_numbers(setting: Configuration) -> dict[str, Any]:
    """Return what names a setting: its label, and how many of its runs were lost for each
    reason.
    """
    reasons = Counter(
        "not finite" if run.status == "done" else run.status.replace("_", " ")
        for run in setting.lost
    )
    return {
        "label": setting.label,
        "lost": dict(reasons),
        "runs": len(setting.lost) + len(setting.runs),
    }

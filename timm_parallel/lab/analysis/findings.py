"""Findings: the statements of a report, before they are put into words. A finding is a kind with
numbers. `lab/report/sentences.j2` has one macro per kind, with a parameter per number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from timm_parallel.lab.analysis.groups import Configuration, Group

Kind = Literal[
    # Strategies and numbers of devices, compared by their speed.
    "disturbed",
    "no_speed",
    "no_common_host",
    "simplest",
    "not_compared",
    "only_strategy",
    "no_gain",
    "no_single",
    "faster_than_single",
    "second_device",
    "several_hosts",
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
    "not_recommended",
    "far_off",
    "extended",
    "over_folds",
    "over_seeds",
    # Settings of a tuning, compared by their speed.
    "trains_faster",
    "none_faster",
    "peak_memory",
    "changes_training",
    "first_step",
    "fastest_of_only_speed",
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
    "speed_next_to_jobs",
    "speed_on_busy_machine",
    # Notes below a table.
    "mean_of_lost",
    "unequal_repeats",
    "single_is_missing",
    "devices_are_threads",
    "more_threads_than_cores",
    "unlike_threads",
    "outlier",
    # A pair of configurations, and the jobs of a page.
    "pair",
    "ratio",
    "sweep_not_ended",
    "edited_seed",
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


def other_baseline(group: Group) -> Finding:
    """Build the finding that no run of the requested baseline is done."""
    return finding("other_baseline", missing=group.missing_baseline, baseline=group.baseline)


def point_numbers(point: Configuration) -> dict[str, Any]:
    """Return what names a strategy on a number of devices."""
    return {
        "strategy": point.strategy,
        "devices": point.devices,
        "nodes": point.nodes,
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

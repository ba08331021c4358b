"""Configurations: the runs that repeat one another, of which a sweep compares several."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from src.engine.analysis.runs import RunRecord
from src.engine.analysis.statistics import Summary, summarize

# Settings that do not change the training, or by which repeats differ on purpose.
NOT_A_SETTING = (
    *("paths.", "checkpoint.", "cluster.", "sweep.", "search.", "debug", "experiment", "tags"),
    *("task_name", "seed", "resume", "print_config", "optimized_metric"),
)


@dataclass(frozen=True)
class Configuration:
    """All runs (repeats) with the same settings."""

    runs: tuple[RunRecord, ...]

    @property
    def repeats(self) -> list[RunRecord]:
        """Runs within blocks, without the two extra runs of the baseline, the first of which warms the machine up."""
        return [run for run in self.runs if run.block is not None]

    @property
    def is_simulated(self) -> bool:
        return any(run.is_simulated for run in self.runs)

    def measure(self, name: str) -> Summary | None:
        return summarize(run.measure(name) for run in self.repeats)

    @property
    def speed(self) -> Summary | None:
        """Images per second over the repeats; None for dp over CPU threads, whose speed is meaningless."""
        return None if self.is_simulated else self.measure("images_per_sec")

    @cached_property
    def peak_bytes(self) -> list[Summary]:
        """Peak memory per device, over the repeats that recorded the largest number of devices."""
        peaks = [dict(enumerate(run.peak_bytes)) for run in self.repeats]
        devices = max(map(len, peaks), default=0)
        return list(summarize_columns(of_run for of_run in peaks if len(of_run) == devices).values())


def summarize_columns(rows: Iterable[Mapping[Any, float | None]]) -> dict[str, Summary]:
    columns: dict[str, list[float | None]] = defaultdict(list)
    for row in rows:
        for name, value in row.items():
            columns[str(name)].append(value)
    summaries = {name: summarize(column) for name, column in columns.items()}
    return {name: summary for name, summary in summaries.items() if summary}


def varied(runs: Iterable[RunRecord]) -> dict[str, list[Any]]:
    """Return the config keys that differ between the runs, with their values; a missing key counts as null."""
    return {key: seen for key, seen in values(run.config for run in runs).items() if len(seen) > 1}


def values(trees: Iterable[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the distinct values of each key over flat trees; None where a tree lacks the key. Skips empty trees."""
    known = [tree for tree in trees if tree]
    keys = dict.fromkeys(key for tree in known for key in tree)
    return {key: list({repr(tree.get(key)): tree.get(key) for tree in known}.values()) for key in keys}

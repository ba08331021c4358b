"""Configuration: the runs of a sweep that have the same settings, with statistics over these
repeats.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from timm_parallel.lab.analysis.runs import RunRecord
from timm_parallel.lab.analysis.statistics import Summary, summarize

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
    def is_simulated(self) -> bool:
        return any(run.is_simulated for run in self.runs)

    def measure(self, name: str) -> Summary | None:
        return summarize(run.measure(name) for run in self.runs)

    @property
    def speed(self) -> Summary | None:
        """Median and range of images/s over the repeats; None for dp over CPU threads, which says
        nothing about GPUs.
        """
        return None if self.is_simulated else self.measure("images_per_sec")

    @cached_property
    def peak_bytes(self) -> list[Summary]:
        """Median and range of peak memory in bytes, per device. Ignores repeats that recorded fewer
        devices than others.
        """
        peaks = [dict(enumerate(run.peak_bytes)) for run in self.runs]
        devices = max(map(len, peaks), default=0)
        return list(
            summarize_columns(of_run for of_run in peaks if len(of_run) == devices).values()
        )


def summarize_columns(rows: Iterable[Mapping[Any, float | None]]) -> dict[str, Summary]:
    columns: dict[str, list[float | None]] = defaultdict(list)
    for row in rows:
        for name, value in row.items():
            columns[str(name)].append(value)
    summaries = {name: summarize(column) for name, column in columns.items()}
    return {name: summary for name, summary in summaries.items() if summary}


def varied(runs: Iterable[RunRecord]) -> dict[str, list[Any]]:
    """Return the config keys that differ between the runs, with their values; a missing key counts
    as null.
    """
    return {key: seen for key, seen in values(run.config for run in runs).items() if len(seen) > 1}


def values(trees: Iterable[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the distinct values of each dotted key in several configs. A missing key counts as
    None; empty configs are ignored.
    """
    known = [tree for tree in trees if tree]
    keys = dict.fromkeys(key for tree in known for key in tree)
    return {
        key: list({repr(tree.get(key)): tree.get(key) for tree in known}.values()) for key in keys
    }

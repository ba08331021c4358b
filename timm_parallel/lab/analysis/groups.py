"""Group runs with the same hardware, code, model and batch, whose speeds can be compared, by
strategy and devices.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Any

import pandas as pd

from timm_parallel.lab.analysis.questions import (
    NOT_A_SETTING,
    Configuration,
    Question,
    summarize_columns,
    varied,
)
from timm_parallel.lab.analysis.runs import RunRecord
from timm_parallel.lab.analysis.statistics import LEVEL, Contrast, Row, Summary
from timm_parallel.lab.analysis.wording import describe_settings, model_name, percent

SPEED = "images_per_sec"
# Chance of a wrong verdict, by measure. Speed, the subject of a sweep, has LEVEL; the other
# measures share a fifth of it. So a page on which nothing differs has a wrong verdict in 6 % of
# cases at most.
LEVELS = {SPEED: LEVEL} | dict.fromkeys(
    ("first_step_seconds", "cpu_seconds", "busy"), LEVEL / 5 / 3
)
COMPLEXITY = {"single": 0, "dp": 1, "ddp": 2, "fsdp": 3}  # custom strategies come last
SLOW_RANK = 1.1  # the report warns of a rank that takes this many times as long as the median rank
# Settings by which the configurations of one group differ on purpose, and fields of the group.
_NOT_OF_A_GROUP = (*NOT_A_SETTING, "parallel.", "model.name", "data.batch_size")


@dataclass(frozen=True)
class MeasuredPoint(Configuration):
    """All runs (repeats) of one strategy on one number of devices and nodes."""

    strategy: str
    devices: int
    nodes: int
    # Parallel options that differ from other configurations with this strategy and device count.
    options: str
    suffix: str  # of the label: nodes and options

    @property
    def needless_threads(self) -> tuple[int, int] | None:
        return next((run.needless_threads for run in self.runs if run.needless_threads), None)

    @cached_property
    def metrics(self) -> dict[str, Summary]:
        """Median and range of the headline metric (`checkpoint.metric`) over the repeats, by its
        name.
        """
        return summarize_columns({run.metric: run.metric_value} for run in self.runs)

    @property
    def flagged(self) -> int:
        return sum(bool(run.flags) for run in self.runs)


@dataclass(frozen=True)
class Group(Question[MeasuredPoint]):
    """Configurations whose speeds one table compares: same hardware, model, batch and other
    settings.
    """

    hardware: str
    accelerator: str
    model: str
    kind: str  # strong: `batch` is global; weak: `batch` is per device
    batch: int | None
    settings: str  # other settings that differ between the groups of the report
    model_name: str  # `model`; if model.kwargs changes it, with its option and size

    @property
    def title(self) -> str:
        return ", ".join(filter(None, (self.model_name, self.scaling, self.settings)))

    @property
    def scaling(self) -> str:
        batch = "—" if self.batch is None else str(self.batch)
        if self.kind == "weak":
            return f"weak scaling, batch {batch} per device"
        return f"strong scaling, global batch {batch}"

    def rows(self, measure: str) -> list[Row]:
        """Return (configuration, repeat on one host, value of `measure`) of each run whose value
        may be compared.

        Excludes runs with concurrent jobs and, except for the time to the first step, runs of dp
        over CPU threads.
        """
        measured: list[Row] = []
        for point in self.members:
            for run in point.runs:
                value = run.measure(measure)
                is_meaningful = measure == "first_step_seconds" or not run.is_simulated
                if value is not None and is_meaningful and not run.neighbours:
                    measured.append((point.label, (run.sweep, run.block, run.hosts[:1]), value))
        return measured

    def pairs(self, measure: str) -> list[tuple[str, str]]:
        """Return the pairs of configurations to compare: ddp and dp on equally many devices; for
        speed, also each with single.
        """
        # Each additional pair would widen all confidence intervals.
        labels = []
        for a in self.members:
            opponents = [self.single] if measure == SPEED else []
            if a.strategy == "ddp" and a.devices > 1:
                opponents.append(self.at("dp", a.devices))
            for b in opponents:
                if b is not None and b is not a and (measure != SPEED or (a.speed and b.speed)):
                    labels.append((a.label, b.label))
        return labels

    @cached_property
    def speeds(self) -> pd.DataFrame:
        """Table of all runs with their images/s, in run order. `relative`: images/s over the
        configuration's median.
        """
        columns = ["point", "run", "sweep", "position", "block", "strategy", "devices", "series"]
        columns += [SPEED, "relative", "flagged"]
        rows = [
            [p.label, run.name, run.sweep, run.position, run.block, p.strategy, p.devices]
            + [p.strategy + p.suffix, value, value / speed.median, bool(run.flags)]
            for p in self.members
            if (speed := p.speed) and speed.median > 0
            for run in p.runs
            if (value := run.measure(SPEED)) is not None
        ]
        frame = pd.DataFrame(rows, columns=columns).astype({"position": "Int64", "block": "Int64"})
        return frame.sort_values(["sweep", "position"], ignore_index=True)

    @property
    def single(self) -> MeasuredPoint | None:
        return self.at("single", 1)

    def at(self, strategy: str, devices: int) -> MeasuredPoint | None:
        """Return the configuration of this strategy and device count; of several, the simplest."""

        def simplicity(point: MeasuredPoint) -> tuple[int, int, str]:
            options_set = point.options.count("=") - point.options.count("=null")
            return point.nodes, options_set, point.options

        points = [
            point
            for point in self.members
            if (point.strategy, point.devices) == (strategy, devices)
        ]
        return min(points, key=simplicity, default=None)

    def over_single(self, point: MeasuredPoint) -> Contrast | None:
        return self.contrast(point, self.single)

    def efficiency(self, point: MeasuredPoint) -> float | None:
        """Return the scaling efficiency: images/s per device, divided by the images/s of strategy
        single. 1 is ideal.
        """
        contrast = self.over_single(point)
        return (
            contrast.ratio / point.devices
            if contrast and contrast.ratio and point.devices
            else None
        )

    def same_threads(self, point: MeasuredPoint) -> bool:
        """Return False if `point` and strategy single ran on a CPU with different numbers of
        threads per device.
        """
        if self.accelerator != "cpu" or self.single is None:
            return True
        threads, of_single = (
            {run.integer("threads_per_device") for run in p.runs} for p in (point, self.single)
        )
        return threads == of_single

    @property
    def warnings(self) -> list[str]:
        """Warnings about several hosts and about slow ranks, a sentence each."""
        warnings = []
        hosts = sorted({run.hosts[0] for run in self.runs if run.hosts})
        if len(hosts) > 1:
            warnings.append(
                f"Runs on {len(hosts)} hosts ({', '.join(hosts[:4])}): each host is a separate "
                "block."
            )
        for point in self.members:
            for rank, share in summarize_columns(run.rank_shares for run in point.runs).items():
                if share.median >= SLOW_RANK:
                    longer = (
                        f"{percent(share.median - 1)} longer for its part of a step (data "
                        "and computing)"
                    )
                    warnings.append(f"{point.label}: {rank} needs {longer} than the median rank.")
        return warnings


def group_runs(runs: Iterable[RunRecord]) -> list[Group]:
    """Group the finished runs, largest group first; sort each group by strategy and devices.
    Computes no contrasts.
    """
    comparable = [run for run in runs if run.comparable]
    settings = [key for key in varied(comparable) if not key.startswith(_NOT_OF_A_GROUP)]
    # `data.workers=auto` may give strategies different numbers, which does not count as a
    # difference in settings.
    workers = {(run.strategy, run.devices, run.config.get("data.workers")) for run in comparable}
    if "data.workers" in settings and len(workers) == len(
        {(strategy, devices) for strategy, devices, _ in workers}
    ):
        settings.remove("data.workers")
    commits = {run.commit for run in comparable if run.commit}
    data = {run.data for run in comparable if run.data}
    groups: dict[Group, list[RunRecord]] = defaultdict(list)
    for run in comparable:
        batch = run.config.get("data.batch_size_per_device")
        kind = "strong" if batch is None else "weak"
        batch = batch or run.integer("batch_size") or run.config.get("data.batch_size")
        differing = describe_settings(run, settings) if run.config else ""
        code = f"code {run.commit or 'unknown'}" if len(commits) > 1 else ""
        key = Group(
            hardware=run.hardware,
            accelerator=run.accelerator,
            model=str(run.result.get("model") or "—"),
            kind=kind,
            batch=batch,
            settings=", ".join(
                filter(None, (differing, code, f"data {run.data}" if len(data) > 1 else ""))
            ),
            model_name=model_name(run),
        )
        groups[key].append(run)
    full = [replace(empty, members=_points(members)) for empty, members in groups.items()]
    return sorted(full, key=lambda group: (-len(group.members), group.hardware, group.title))


def _points(runs: list[RunRecord]) -> tuple[MeasuredPoint, ...]:
    points = []
    for (_, strategy, devices, nodes), alike in groupby(sorted(runs, key=_sort_key), key=_sort_key):
        members = list(alike)
        options = [key for key in varied(members) if key.startswith("parallel.")]
        members.sort(key=lambda run: [_natural(run.config.get(key)) for key in options])
        for text, repeats in groupby(
            members, key=lambda run: describe_settings(run, options, "parallel.")
        ):
            suffix = f" on {nodes} nodes" if nodes > 1 else ""
            suffix += f" ({text})" if text else ""
            label = f"{strategy} × {devices}{suffix}"
            points.append(
                MeasuredPoint(tuple(repeats), label, strategy, devices, nodes, text, suffix)
            )
    return tuple(points)


def _sort_key(run: RunRecord) -> tuple[int, str, int, int]:
    return COMPLEXITY.get(run.strategy, len(COMPLEXITY)), run.strategy, run.devices, run.nodes


def _natural(value: Any) -> tuple[int, float, str]:
    return (0, float(value), "") if isinstance(value, int | float) else (1, 0.0, str(value))

"""Group runs whose speeds can be compared, because hardware, code, model and batch are equal. In a
group, collect the runs of each strategy on each number of devices.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

import pandas as pd

from timm_parallel.lab.analysis.groups import (
    NOT_A_SETTING,
    SPEED,
    Configuration,
    Group,
    describe_settings,
    model_name,
    simplest,
    varied,
)
from timm_parallel.lab.analysis.runs import RunRecord
from timm_parallel.lab.analysis.statistics import LEVEL, Row
from timm_parallel.machine.text import yaml_text

# Chance of a wrong verdict, by measure. Speed is the subject of a sweep and has the usual level.
# The other three measures share a fifth of that level. A page without any true difference therefore
# has a wrong verdict in at most 6 % of cases.
LEVELS = {SPEED: LEVEL} | dict.fromkeys(
    ("first_step_seconds", "cpu_seconds", "busy"), LEVEL / 5 / 3
)
# Order of the strategies in a table. Custom strategies come last.
COMPLEXITY = {"single": 0, "dp": 1, "ddp": 2, "fsdp": 3}
# Keys that do not separate groups: the configurations of a group differ in them on purpose, or a
# condition of the group holds their value.
_NOT_OF_A_GROUP = (*NOT_A_SETTING, "parallel.", "model.name", "data.batch_size")


def group_runs(runs: Iterable[RunRecord]) -> list[Group]:
    """Group the finished runs whose speeds can be compared. The largest group comes first, and each
    group is sorted by strategy and number of devices. The result contains no comparisons yet;
    `with_contrasts` adds them.
    """
    comparable = [run for run in runs if run.comparable]
    settings = [key for key in varied(comparable) if not key.startswith(_NOT_OF_A_GROUP)]
    # Do not put strategies into separate groups because of their numbers of loader workers, which
    # `data.workers=auto` may choose differently for each strategy.
    workers = {(run.strategy, run.devices, run.config.get("data.workers")) for run in comparable}
    if "data.workers" in settings and len(workers) == len(
        {(strategy, devices) for strategy, devices, _ in workers}
    ):
        settings.remove("data.workers")
    commits = {run.commit for run in comparable if run.commit}
    data = {run.data for run in comparable if run.data}
    alike: dict[tuple[str, ...], list[RunRecord]] = defaultdict(list)
    for run in comparable:
        parts = (
            describe_settings(run, settings) if run.config else "",
            f"code {run.commit or 'unknown'}" if len(commits) > 1 else "",
            f"data {run.data}" if len(data) > 1 else "",
        )
        differing = ", ".join(filter(None, parts))
        alike[run.hardware, run.accelerator, model_name(run), run.scaling, differing].append(run)
    groups = [
        _group(model, scaling, differing, members)
        for (_, _, model, scaling, differing), members in alike.items()
    ]
    return sorted(groups, key=lambda group: (-len(group.members), group.hardware, group.title))


def _group(model: str, scaling: str, settings: str, runs: list[RunRecord]) -> Group:
    members = _configurations(runs)
    single = simplest(members, "single", 1)
    return Group(
        kind="strategies",
        title=", ".join(filter(None, (model, scaling, settings))),
        settings=settings,
        members=members,
        baseline=single.label if single else "",
        rows={measure: _rows(members, measure) for measure in LEVELS},
        pairs={measure: _pairs(members, single, measure) for measure in LEVELS},
    )


def _configurations(runs: list[RunRecord]) -> tuple[Configuration, ...]:
    points = []
    for (_, strategy, devices, nodes), alike in groupby(sorted(runs, key=_sort_key), key=_sort_key):
        members = list(alike)
        keys = [key for key in varied(members) if key.startswith("parallel.")]
        members.sort(key=lambda run: [_natural(run.config.get(key)) for key in keys])
        for text, repeats in groupby(
            members, key=lambda run: describe_settings(run, keys, "parallel.")
        ):
            of_point = tuple(repeats)
            options = {key: yaml_text(of_point[0].config.get(key)) for key in keys}
            of_nodes = f" on {nodes} nodes" if nodes > 1 else ""
            label = f"{strategy} × {devices}{of_nodes}{f' ({text})' if text else ''}"
            points.append(Configuration(of_point, label, options))
    return tuple(points)


def _sort_key(run: RunRecord) -> tuple[int, str, int, int]:
    return COMPLEXITY.get(run.strategy, len(COMPLEXITY)), run.strategy, run.devices, run.nodes


def _natural(value: Any) -> tuple[int, float, str]:
    return (0, float(value), "") if isinstance(value, int | float) else (1, 0.0, str(value))


def _rows(members: Sequence[Configuration], measure: str) -> list[Row]:
    """Return (configuration, repeat on one host, value) of each run whose value of `measure` can be
    compared.

    `measure`: name of a measured value, such as `images_per_sec`. Runs that had concurrent jobs are
    excluded. Runs of dp over CPU threads are excluded too, except for the time to the first step.
    """
    return [
        (point.label, (run.sweep, run.block, run.hosts[:1]), value)
        for point in members
        for run in point.runs
        if not run.neighbours and (measure == "first_step_seconds" or not run.is_simulated)
        if (value := run.measure(measure)) is not None
    ]


def _pairs(
    members: Sequence[Configuration], single: Configuration | None, measure: str
) -> list[tuple[str, str]]:
    """Return the pairs of configurations to compare. Every measure compares ddp with dp on equally
    many devices. The measure speed also compares each configuration with single.
    """
    # Compare no further pairs, because each additional pair would widen all confidence intervals.
    labels = []
    for a in members:
        opponents = [single] if measure == SPEED else []
        if a.first.strategy == "ddp" and a.first.devices > 1:
            opponents.append(simplest(members, "dp", a.first.devices))
        for b in opponents:
            if b is not None and b is not a and (measure != SPEED or (a.speed and b.speed)):
                labels.append((a.label, b.label))
    return labels


def speed_table(group: Group) -> pd.DataFrame:
    """Build a table with the images/s of each run, in the order in which the runs started. The
    column `relative` is the speed divided by the median speed of the configuration. The column
    `series` is the label of the configuration without its number of devices.
    """
    columns = ["point", "run", "sweep", "position", "block", "strategy", "devices", "series"]
    columns += [SPEED, "relative", "flagged"]
    rows = [
        [p.label, run.name, run.sweep, run.position, run.block, run.strategy, run.devices]
        + [p.label.replace(f" × {run.devices}", "", 1), value, value / speed.median]
        + [bool(run.flags)]
        for p in group.members
        if (speed := p.speed) and speed.median > 0
        for run in p.runs
        if (value := run.measure(SPEED)) is not None
    ]
    frame = pd.DataFrame(rows, columns=columns).astype({"position": "Int64", "block": "Int64"})
    return frame.sort_values(["sweep", "position"], ignore_index=True)


def efficiency(group: Group, point: Configuration) -> float | None:
    """Return the scaling efficiency of a configuration: its images/s per device divided by the
    images/s of single. The ideal is 1.
    """
    contrast, devices = group.over_baseline(point), point.first.devices
    return contrast.effect / devices if contrast and contrast.effect and devices else None


def same_threads(group: Group, point: Configuration) -> bool:
    """Return False if a configuration and single ran on a CPU with different numbers of threads per
    device.
    """
    if point.first.accelerator != "cpu" or not group.baseline:
        return True
    threads, of_single = (
        {run.integer("threads_per_device") for run in p.runs}
        for p in (point, group.named(group.baseline))
    )
    return threads == of_single

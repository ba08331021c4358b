"""Convert groups and runs to tables of text for HTML and Markdown. A missing value is a dash, never
0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import shorten

from timm_parallel.config.suggest import is_lower_better
from timm_parallel.lab.analysis.configurations import values
from timm_parallel.lab.analysis.groups import Group, MeasuredPoint
from timm_parallel.lab.analysis.runs import RunRecord
from timm_parallel.lab.analysis.statistics import Summary
from timm_parallel.lab.analysis.wording import (
    DASH,
    effect_text,
    figure,
    join_short,
    percent,
    verdict_text,
    with_range,
)
from timm_parallel.machine.text import yaml_text

NOT_HERE = "n/a"
MOST_LINKS, MOST_NAMED = 12, 12  # folders of a configuration; outliers and flagged runs of a group
OUTLIER = 0.75  # a run below this share of its configuration's median speed is named
MOST_DEVICES = 8
MOST_UNFINISHED = 300  # rows: report.html stays small; report.csv has all
LONGEST_REASON = 240  # characters
# Columns that say nothing about GPUs if the devices are threads on CPU.
_OF_GPUS = (
    "images/s",
    "over single (95 %)",
    "ms per step",
    "p95",
    "exposed comm., ms",
    "J per image",
)
_OF_ONE_RUN = ("format", "time", "command", "topology")  # keys of an environment record


@dataclass(frozen=True)
class Table:
    rows: Sequence[dict[str, str]]  # by column, the same in every row
    caption: str = ""
    notes: Sequence[str] = ()
    text_columns: Sequence[str] = ()  # all other columns hold numbers
    runs: Sequence[
        Sequence[RunRecord]
    ] = ()  # of each row; a last column links to the first MOST_LINKS of them


def points_table(group: Group) -> Table:
    """Return a table of speed, memory and metrics with a row per configuration, without empty
    columns.
    """
    metrics = list(dict.fromkeys(name for point in group.points for name in point.metrics))
    largest = max((peak.high for point in group.points for peak in point.peak_bytes), default=0)
    unit, factor = ("GiB", 2**-30) if largest >= 2**30 else ("MiB", 2**-20)
    memory = f"{'resident' if group.accelerator == 'cpu' else 'peak'} memory, {unit}, by device"
    rows = []
    for point in group.points:
        row = _point_row(group, point)
        for name in metrics:
            title = f"{name} (lower is better)" if is_lower_better(name) else name
            row[title] = _summary(point.metrics.get(name))
        rows.append(row | {memory: _peaks(point, factor)})
    filled = {
        name for row in rows for name, text in row.items() if text not in (DASH, NOT_HERE)
    } | {"images/s"}
    shown = [{name: text for name, text in row.items() if name in filled} for row in rows]
    caption = f"{group.scaling.capitalize()}: medians (smallest–largest) of the repeats"
    return Table(shown, caption, _notes(group), ["point"], [point.runs for point in group.points])


def _point_row(group: Group, point: MeasuredPoint) -> dict[str, str]:
    efficiency, steps = group.efficiency(point), point.measure("steps_timed")
    marks = {
        " *": point.is_simulated,
        " †": point.needless_threads,
        " ‡": not group.same_threads(point),
    }
    flagged = f", {point.flagged} flagged" if point.flagged else ""
    row = {
        "point": point.label + "".join(mark for mark, is_set in marks.items() if is_set),
        "runs": f"{len(point.runs)}{flagged}",
        "images/s": _summary(point.speed),
        "over single (95 %)": effect_text(group.over_single(point)),
        "efficiency": figure(efficiency) if efficiency else DASH,
        "ms per step": _summary(point.measure("step_ms")),
        "p95": _median(point.measure("step_ms_p95")),
        "steps timed": f"{steps.median:,.0f}" if steps else DASH,
        "data wait, %": _median(point.measure("data_wait"), factor=100),
        "exposed comm., ms": _median(point.measure("exposed_ms")),
        "CPU s per s": _median(point.measure("cpu_seconds")),
        "J per image": _median(point.measure("joules_per_image")),
        "to first step, s": _summary(point.measure("first_step_seconds")),
    }
    return row | dict.fromkeys(_OF_GPUS, NOT_HERE) if point.is_simulated else row


def contrasts_table(group: Group) -> Table:
    """Return a table of the compared pairs of configurations: ratio of images/s, interval and
    verdict.
    """
    rows = [
        {
            "A over B, images/s": f"{contrast.a} over {contrast.b}",
            "ratio (95 %)": effect_text(contrast),
            "A faster than B?": "disturbed: no verdict"
            if group.disturbed
            else verdict_text(contrast),
            "min. detectable difference": DASH
            if contrast.detectable is None
            else percent(contrast.detectable, 1),
            "runs of each": str(contrast.n),
        }
        for contrast in group.contrasts.get("images_per_sec", ())
    ]
    return Table(rows, "Comparisons", text_columns=["A over B, images/s", "A faster than B?"])


def disturbed_table(group: Group) -> Table:
    """Return a table of runs, at most MOST_NAMED, whose speed was disturbed by other programs or
    heat, with reasons.
    """
    flagged = [(run, point) for point in group.points for run in point.runs if run.flags]
    rows = [
        {"disturbed run": r.name, "point": p.label, "why": "; ".join(r.flags)}
        for r, p in flagged[:MOST_NAMED]
    ]
    notes = (
        [f"{len(flagged) - MOST_NAMED} more disturbed runs, in report.csv."]
        if len(flagged) > MOST_NAMED
        else []
    )
    return Table(rows, "Disturbed runs, which are kept", notes, ["disturbed run", "point", "why"])


def settings_tables(runs: Sequence[RunRecord]) -> list[Table]:
    """Return tables of keys and values: config keys that differ between the runs, equal ones,
    hardware and versions.
    """
    config = values(run.config for run in runs)
    environment = {}
    for key, seen in values(run.environment for run in runs).items():
        known = [value for value in seen if value not in (None, "", [], {})]
        if known and key not in _OF_ONE_RUN:
            environment[key] = known
    tables = []
    for caption, settings in (
        ("What varied", {key: seen for key, seen in config.items() if len(seen) > 1}),
        ("What all points share", {key: seen for key, seen in config.items() if len(seen) == 1}),
        ("Hardware and versions", environment),
    ):
        rows = [
            {"key": key, "values": join_short(map(yaml_text, seen), 12)}
            for key, seen in sorted(settings.items())
        ]
        tables.append(Table(rows, caption, text_columns=["key", "values"]))
    return tables


def unfinished_table(runs: Sequence[RunRecord]) -> Table:
    """Return a table of the jobs that cannot be compared, such as failed ones, with the reason."""
    unfinished = [run for run in runs if not run.comparable]
    shown = unfinished[:MOST_UNFINISHED]
    rows = [
        {
            "point": f"{run.strategy or DASH} × {run.devices or DASH}",
            "overrides": " ".join(run.overrides) or DASH,
            "status": "done, not compared" if run.doubt else run.status.replace("_", " "),
            "reason": shorten(run.doubt or run.reason or DASH, LONGEST_REASON, placeholder="…"),
        }
        for run in shown
    ]
    notes = (
        [f"and {len(unfinished) - len(shown)} more, in report.csv"]
        if len(unfinished) > len(shown)
        else []
    )
    folders = [[run] if run.folder.is_dir() else [] for run in shown]
    return Table(rows, "", notes, ["point", "overrides", "status", "reason"], folders)


def _notes(group: Group) -> list[str]:
    notes = []
    if group.single is None:
        notes.append(
            "No run of single on 1 device is done here, so there is no ratio to it and no "
            "efficiency."
        )
    if any(point.is_simulated for point in group.points):
        notes.append(
            "* Its devices are threads on CPU: its speed says nothing about GPUs and is not "
            "compared."
        )
    for threads, cores in sorted(
        {point.needless_threads for point in group.points if point.needless_threads}
    ):
        notes.append(f"† {threads} threads on {cores} cores.")
    if not all(map(group.same_threads, group.points)):
        notes.append(
            "‡ Its devices have another number of threads than single's: the ratio mixes both "
            "effects."
        )
    speeds = group.speeds
    outliers = speeds[speeds["relative"] < OUTLIER]
    slow = [
        f"run {run.run} ({run.point}) at {figure(run.images_per_sec)} images/s."
        for run in outliers.itertuples()
    ]
    notes += [f"Outlier, kept: {text}" for text in slow[:MOST_NAMED]]
    if len(slow) > MOST_NAMED:
        notes.append(f"Outlier, kept: {len(slow) - MOST_NAMED} more, in report.csv.")
    return notes


def _summary(summary: Summary | None) -> str:
    return with_range(summary) if summary else DASH


def _median(summary: Summary | None, factor: float = 1) -> str:
    """Format the median without its range, for a table of many columns.
    report.json has the range.
    """
    return figure(summary.median * factor) if summary else DASH


def _peaks(point: MeasuredPoint, factor: float) -> str:
    peaks = [figure(peak.median * factor) for peak in point.peak_bytes]
    if peaks and any(run.shared_memory for run in point.runs):
        return f"{peaks[0]} shared by {point.devices}" if point.devices > 1 else peaks[0]
    rest = f", … ({len(peaks)})" if len(peaks) > MOST_DEVICES else ""
    return ", ".join(peaks[:MOST_DEVICES]) + rest or DASH

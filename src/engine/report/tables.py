"""Groups and runs as tables of text: what HTML and Markdown both show. A missing figure is a dash, never 0."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import shorten
from typing import Any

from src.engine.report.comparison import Group, MeasuredPoint
from src.engine.report.measured import RunRecord
from src.engine.report.settings import flat, shared, spelled, values, varied
from src.engine.report.statistics import Summary
from src.engine.report.wording import doubt, figure, percent, times, with_range

DASH, NOT_HERE = "—", "n/a"
MOST_LINKS = 12
OUTLIER = 0.75  # a run at a smaller share of its point's median speed is named
MOST_DEVICES = 8
MOST_UNFINISHED = 300  # rows: report.html stays small; report.csv has all
LONGEST_REASON = 240  # characters
_OF_ONE_RUN = ("format", "time", "command", "topology")  # of an environment record


@dataclass(frozen=True)
class Cell:
    text: str
    runs: tuple[RunRecord, ...] = ()  # shown as links to their folders, the first MOST_LINKS of them
    number: bool = False


@dataclass(frozen=True)
class Table:
    rows: Sequence[dict[str, Cell]]  # by column, the same in every row
    caption: str = ""
    notes: Sequence[str] = ()


def points_table(group: Group) -> Table:
    """One row per point; columns that no point has a figure for are left out."""
    largest = max((peak.high for point in group.points for peak in point.peak_bytes), default=0)
    unit, factor = ("GiB", 2**-30) if largest >= 2**30 else ("MiB", 2**-20)
    memory = f"{'resident' if group.accelerator == 'cpu' else 'peak'} memory, {unit}, by device"
    rows = [_point_row(group, point, memory, factor) for point in group.points]
    told = {name for row in rows for name, cell in row.items() if cell.text not in (DASH, NOT_HERE)} | {"images/s"}
    caption = f"{group.batch_words.capitalize()}: medians (smallest–largest) of the repeats"
    return Table([{name: row[name] for name in row if name in told} for row in rows], caption, _notes(group))


def _point_row(group: Group, point: MeasuredPoint, memory: str, factor: float) -> dict[str, Cell]:
    contrast, efficiency, hidden = group.over_single(point), group.efficiency(point), point.stand_in
    over_single = times(contrast) if contrast and contrast.ratio is not None else DASH
    marks = " *" * point.stand_in + " †" * bool(point.needless_threads) + " ‡" * (not group.same_threads(point))
    return {
        "point": Cell(point.label + marks),
        "runs": _number(str(len(point.runs)) + (f", {point.flagged} flagged" if point.flagged else "")),
        "images/s": _summary(point.speed, hidden),
        "over single (95 %)": _number(NOT_HERE if hidden else over_single),
        "efficiency": _number(figure(efficiency) if efficiency else DASH),
        "ms per step": _summary(point.measure("step_ms"), hidden),
        "p95": _summary(point.measure("step_ms_p95"), hidden, middle=True),
        "steps timed": _number(f"{steps.median:,.0f}" if (steps := point.measure("steps_timed")) else DASH),
        "data wait, %": _summary(point.measure("data_wait"), factor=100, middle=True),
        "comm. not hidden, ms": _summary(point.measure("exposed_ms"), hidden, middle=True),
        "CPU s per s": _summary(point.measure("cpu_seconds"), middle=True),
        "to first step, s": _summary(point.measure("first_step_seconds")),
        memory: _number(_peaks(point, factor)),
        "val. accuracy, %": _summary(point.measure("accuracy"), factor=100),
        "folders": Cell("", point.runs),
    }


def contrasts_table(group: Group) -> Table:
    """Every statement about speed that this report makes or leaves open."""
    rows = [
        {
            "images/s": Cell(f"{c.a} over {c.b}"),
            "ratio (95 %)": _number(times(c) if c.ratio is not None else DASH),
            "is the first faster?": Cell("disturbed: no verdict" if group.disturbed else doubt(c)),
            "could have been seen": _number(percent(c.detectable, 1) if c.detectable is not None else DASH),
            "runs of each": _number(str(c.n)),
        }
        for c in group.contrasts.get("images_per_sec", ())
    ]
    return Table(rows, "What was compared")


def parts_table(group: Group) -> Table:
    """What a step is made of, at the points that were profiled; no rows where none was."""
    names = list(dict.fromkeys(name for point in group.points for name in point.parts))
    rows = [
        {"point": Cell(point.label + " *" * point.stand_in)}
        | {name: _summary(parts.get(name), middle=True) for name in names}
        | {"sum": _number(figure(sum(part.median for part in parts.values())))}
        for point in group.points
        if (parts := point.parts)
    ]
    return Table(rows, "Where a step's time goes (train.profile_steps): ms of rank 0, medians")


def settings_tables(runs: Sequence[RunRecord]) -> list[Table]:
    """What the runs were set to and where they ran: every key with its values, what differs first."""
    places = [flat({k: v for k, v in run.environment.items() if k not in _OF_ONE_RUN}) for run in runs]
    seen = {key: [v for v in found if v not in (None, "", [], {})] for key, found in values(places).items()}
    return [
        _keys("What varied", varied(runs)),
        _keys("What all points share", {key: [value] for key, value in shared(runs).items()}),
        _keys("Hardware and versions", {key: found for key, found in seen.items() if found}),
    ]


def _keys(caption: str, found: dict[str, list[Any]]) -> Table:
    def listed(seen: list[Any], most: int = 12) -> str:
        more = f", … ({len(seen)} values)" if len(seen) > most else ""
        return ", ".join(map(spelled, seen[:most])) + more

    return Table([{"key": Cell(key), "values": Cell(listed(seen))} for key, seen in sorted(found.items())], caption)


def unfinished_table(runs: Sequence[RunRecord]) -> Table:
    """Jobs without comparable figures, with their reasons."""
    unfinished = [run for run in runs if not run.comparable]
    rows = [
        {
            "point": Cell(f"{run.strategy or DASH} × {run.devices or DASH}"),
            "overrides": Cell(" ".join(run.overrides) or DASH),
            "status": Cell("done, not compared" if run.doubt else run.status.replace("_", " ")),
            "reason": Cell(shorten(run.doubt or run.reason or DASH, LONGEST_REASON, placeholder="…")),
            "folder": Cell("", (run,)),
        }
        for run in unfinished[:MOST_UNFINISHED]
    ]
    more = len(unfinished) - len(rows)
    return Table(rows, notes=[f"and {more} more, in report.csv"] if more else [])


def _notes(group: Group) -> list[str]:
    notes = [f"({p.letter}) {p.options}" for p in {p.letter: p for p in group.points if p.letter}.values()]
    if group.single is None:
        notes.append("No run of single on 1 device has finished here, so there is no ratio to it and no efficiency.")
    if any(point.stand_in for point in group.points):
        notes.append(
            "* dp on CPU: threads on CPU stand in for devices. Its speed says nothing about GPUs and is not compared."
        )
    for threads, cores in sorted({point.needless_threads for point in group.points if point.needless_threads}):
        notes.append(f"† {threads} threads on {cores} cores: more threads than cores.")
    if not all(map(group.same_threads, group.points)):
        notes.append("‡ Its devices have other numbers of threads than single's: the ratio mixes both effects.")
    runs = [(point, run, run.measure("images_per_sec")) for point in group.points for run in point.runs]
    slow = [(p, run, own) for p, run, own in runs if own and (usual := p.speed) and own < OUTLIER * usual.median]
    notes += [f"Outlier, kept: run {r.name} ({p.label}) at {figure(own)} images/s." for p, r, own in slow[:MOST_LINKS]]
    flagged = [f"Flagged: run {run.name} ({p.label}): {'; '.join(run.flags)}." for p, run, _ in runs if run.flags]
    notes += flagged[:MOST_LINKS]
    extra = sorted((run for run in group.runs if run.block is None), key=lambda run: run.position or 0)
    speeds = [figure(speed) for run in extra if (speed := run.measure("images_per_sec")) is not None]
    return [*notes, *([f"The baseline, first and last: {' and '.join(speeds)} images/s."] if len(speeds) > 1 else [])]


def _summary(summary: Summary | None, hidden: bool = False, factor: float = 1, middle: bool = False) -> Cell:
    """`middle`: the median alone, for a table of many columns; report.json has the range."""
    if hidden or summary is None:
        return _number(NOT_HERE if hidden else DASH)
    return _number(figure(summary.median * factor) if middle else with_range(summary, factor=factor))


def _peaks(point: MeasuredPoint, factor: float) -> str:
    peaks = [figure(peak.median * factor) for peak in point.peak_bytes]
    if any(run.shared_memory for run in point.runs):
        return f"{peaks[0]} for all {point.devices}"
    more = f", … ({len(peaks)})" if len(peaks) > MOST_DEVICES else ""
    return ", ".join(peaks[:MOST_DEVICES]) + more or DASH


def _number(text: str) -> Cell:
    return Cell(text, number=True)

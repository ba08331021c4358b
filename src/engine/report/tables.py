"""Groups and runs as tables of text: what HTML and Markdown both show. A missing figure is a dash, never 0."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from src.engine.report.comparison import Group, Point
from src.engine.report.measured import Run
from src.engine.report.settings import flat, shared, spelled, varied
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
    runs: tuple[Run, ...] = ()  # shown as links to their folders
    number: bool = False
    more: int = 0  # runs left out of the links


@dataclass(frozen=True)
class Table:
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    caption: str = ""
    notes: Sequence[str] = ()


def points_table(group: Group) -> Table:
    """One row per point; columns that no point has a figure for are left out."""
    unit, factor = _memory_unit(group)
    memory = f"{'resident' if group.accelerator == 'cpu' else 'peak'} memory, {unit}, by device"
    rows = [_point_row(group, point, memory, factor) for point in group.points]
    told = [name for name in rows[0] if any(row[name].text not in (DASH, NOT_HERE) for row in rows)]
    kept = [name for name in rows[0] if name in ("images/s", *told)]
    caption = f"{group.batch_words.capitalize()}: medians (smallest–largest) of the repeats"
    return Table(kept, [[row[name] for name in kept] for row in rows], caption, _notes(group))


def _point_row(group: Group, point: Point, memory: str, factor: float) -> dict[str, Cell]:
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
        "folders": _links(point.runs),
    }


def contrasts_table(group: Group) -> Table:
    """Every statement about speed that this report makes or leaves open."""
    rows = [
        [
            Cell(f"{c.a} over {c.b}"),
            _number(times(c) if c.ratio is not None else DASH),
            Cell("disturbed: no verdict" if group.disturbed else doubt(c)),
            _number(percent(c.detectable, 1) if c.detectable is not None else DASH),
            _number(str(c.n)),
        ]
        for c in group.contrasts.get("images_per_sec", ())
    ]
    columns = ["images/s of", "ratio (95 %)", "that the first is faster", "could have seen", "runs of each"]
    return Table(columns, rows, "What is held against what")


def parts_table(group: Group) -> Table:
    """What a step is made of, at the points that were profiled; no rows where none was."""
    names = list(dict.fromkeys(name for point in group.points for name in point.parts))
    rows = [
        [
            Cell(point.label + " *" * point.stand_in),
            *(_summary(parts.get(name), middle=True) for name in names),
            _number(figure(sum(part.median for part in parts.values()))),
        ]
        for point in group.points
        if (parts := point.parts)
    ]
    return Table(
        ["point", *names, "sum"], rows, "Where a step's time goes (train.profile_steps): ms of rank 0, medians"
    )


def settings_tables(runs: Sequence[Run]) -> list[Table]:
    """What the runs were set to and where they ran: every key with its values, what differs first."""
    environments: dict[str, dict[str, Any]] = {}
    for run in runs:
        for key, value in flat({k: v for k, v in run.environment.items() if k not in _OF_ONE_RUN}).items():
            if value not in (None, "", [], {}):
                environments.setdefault(key, {})[spelled(value)] = value
    return [
        _keys("What varied", varied(runs)),
        _keys("What all points share", {key: [value] for key, value in shared(runs).items()}),
        _keys("Hardware and versions", {key: list(values.values()) for key, values in environments.items()}),
    ]


def _keys(caption: str, values: dict[str, list[Any]]) -> Table:
    def listed(seen: list[Any], most: int = 12) -> str:
        more = f", … ({len(seen)} values)" if len(seen) > most else ""
        return ", ".join(map(spelled, seen[:most])) + more

    return Table(["key", "values"], [[Cell(key), Cell(listed(seen))] for key, seen in sorted(values.items())], caption)


def unfinished_table(runs: Sequence[Run]) -> Table:
    """Jobs without comparable figures, with their reasons."""
    unfinished, rows = [run for run in runs if not run.comparable], []
    for run in unfinished[:MOST_UNFINISHED]:
        reason = run.doubt or run.reason or DASH
        shown = reason if len(reason) <= LONGEST_REASON else reason[: LONGEST_REASON - 1] + "…"
        point = f"{run.strategy or DASH} × {run.devices or DASH}"
        status = "done, not compared" if run.doubt else run.status.replace("_", " ")
        rows.append([Cell(point), Cell(" ".join(run.overrides) or DASH), Cell(status), Cell(shown), _links((run,))])
    more = len(unfinished) - len(rows)
    notes = [f"and {more} more, in report.csv"] if more else []
    return Table(["point", "overrides", "status", "reason", "folder"], rows, notes=notes)


def _notes(group: Group) -> list[str]:
    notes = [f"({p.letter}) {p.options}" for p in {p.letter: p for p in group.points if p.letter}.values()]
    if group.single is None:
        notes.append("No finished run of single on 1 device here: no ratio to it, no efficiency.")
    if any(point.stand_in for point in group.points):
        notes.append(
            "* dp on CPU: threads on CPU stand in for devices. Its speed says nothing about GPUs and is not compared."
        )
    for threads, cores in sorted({point.needless_threads for point in group.points if point.needless_threads}):
        notes.append(f"† {threads} threads on {cores} cores: more threads than cores.")
    if not all(map(group.same_threads, group.points)):
        notes.append("‡ Other threads per device than single: the ratio mixes both effects.")
    runs = [(point, run, run.measure("images_per_sec")) for point in group.points for run in point.runs]
    slow = [(p, run, own) for p, run, own in runs if own and (usual := p.speed) and own < OUTLIER * usual.median]
    notes += [f"Outlier, kept: {r.name} ({p.label}) at {figure(own)} images/s." for p, r, own in slow[:MOST_LINKS]]
    flagged = [f"Flagged: {run.name} ({p.label}): {'; '.join(run.flags)}." for p, run, _ in runs if run.flags]
    notes += flagged[:MOST_LINKS]
    extra = sorted((run for run in group.runs if run.block is None), key=lambda run: run.position or 0)
    speeds = [figure(speed) for run in extra if (speed := run.measure("images_per_sec")) is not None]
    return [*notes, *([f"The baseline, first and last: {' and '.join(speeds)} images/s."] if len(speeds) > 1 else [])]


def _summary(summary: Summary | None, hidden: bool = False, factor: float = 1, middle: bool = False) -> Cell:
    """`middle`: the median alone, for a table of many columns; report.json has the range."""
    if hidden or summary is None:
        return _number(NOT_HERE if hidden else DASH)
    return _number(figure(summary.median * factor) if middle else with_range(summary, factor=factor))


def _memory_unit(group: Group) -> tuple[str, float]:
    largest = max((peak.high for point in group.points for peak in point.peak_bytes), default=0)
    return ("GiB", 2**-30) if largest >= 2**30 else ("MiB", 2**-20)


def _peaks(point: Point, factor: float) -> str:
    peaks = [figure(peak.median * factor) for peak in point.peak_bytes]
    if point.shared_memory:
        return f"{peaks[0]} for all {point.devices}"
    more = f", … ({len(peaks)})" if len(peaks) > MOST_DEVICES else ""
    return ", ".join(peaks[:MOST_DEVICES]) + more or DASH


def _links(runs: Sequence[Run], most: int = MOST_LINKS) -> Cell:
    return Cell("" if runs else DASH, tuple(runs[:most]), more=max(0, len(runs) - most))


def _number(text: str) -> Cell:
    return Cell(text, number=True)

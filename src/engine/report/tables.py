"""Groups and runs as tables of text: what HTML and Markdown both show. A missing figure is a dash, never 0."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import shorten

from src.engine.report.comparison import Group, MeasuredPoint, values
from src.engine.report.measured import RunRecord
from src.engine.report.statistics import Summary
from src.engine.report.wording import doubt, figure, listing, percent, spelled, times, with_range

DASH, NOT_HERE = "—", "n/a"
MOST_LINKS, MOST_NAMED = 12, 12  # folders of a point, outliers and flagged runs of a group
OUTLIER = 0.75  # a run at a smaller share of its point's median speed is named
MOST_DEVICES = 8
MOST_UNFINISHED = 300  # rows: report.html stays small; report.csv has all
LONGEST_REASON = 240  # characters
_OF_ONE_RUN = ("format", "time", "command", "topology")  # of an environment record


@dataclass(frozen=True)
class Table:
    rows: Sequence[dict[str, str]]  # by column, the same in every row
    caption: str = ""
    notes: Sequence[str] = ()
    words: Sequence[str] = ()  # columns that hold words; all others hold numbers
    runs: Sequence[Sequence[RunRecord]] = ()  # of each row: linked to in a last column, the first MOST_LINKS of them


def points_table(group: Group) -> Table:
    """One row per point; columns that no point has a figure for are left out."""
    largest = max((peak.high for point in group.points for peak in point.peak_bytes), default=0)
    unit, factor = ("GiB", 2**-30) if largest >= 2**30 else ("MiB", 2**-20)
    memory = f"{'resident' if group.accelerator == 'cpu' else 'peak'} memory, {unit}, by device"
    rows = [_point_row(group, point) | {memory: _peaks(point, factor)} for point in group.points]
    told = {name for row in rows for name, text in row.items() if text not in (DASH, NOT_HERE)} | {"images/s"}
    shown = [{name: row[name] for name in row if name in told} for row in rows]
    caption = f"{group.batch_words.capitalize()}: medians (smallest–largest) of the repeats"
    return Table(shown, caption, _notes(group), ["point"], [point.runs for point in group.points])


def _point_row(group: Group, point: MeasuredPoint) -> dict[str, str]:
    contrast, efficiency, hidden = group.over_single(point), group.efficiency(point), point.stand_in
    over_single = times(contrast, "") if contrast and contrast.ratio is not None else DASH
    marks = " *" * point.stand_in + " †" * bool(point.needless_threads) + " ‡" * (not group.same_threads(point))
    return {
        "point": point.label + marks,
        "runs": f"{len(point.repeats)}, {point.flagged} flagged" if point.flagged else str(len(point.repeats)),
        "images/s": _summary(point.speed, hidden),
        "over single (95 %)": NOT_HERE if hidden else over_single,
        "efficiency": figure(efficiency) if efficiency else DASH,
        "ms per step": _summary(point.measure("step_ms"), hidden),
        "p95": _summary(point.measure("step_ms_p95"), hidden, middle=True),
        "steps timed": f"{steps.median:,.0f}" if (steps := point.measure("steps_timed")) else DASH,
        "data wait, %": _summary(point.measure("data_wait"), factor=100, middle=True),
        "comm. not hidden, ms": _summary(point.measure("exposed_ms"), hidden, middle=True),
        "CPU s per s": _summary(point.measure("cpu_seconds"), middle=True),
        "to first step, s": _summary(point.measure("first_step_seconds")),
        "val. accuracy, %": _summary(point.measure("accuracy"), factor=100),
    }


def contrasts_table(group: Group) -> Table:
    """Every statement about speed that this report makes or leaves open."""
    rows = [
        {
            "images/s": f"{c.a} over {c.b}",
            "ratio (95 %)": times(c, "") if c.ratio is not None else DASH,
            "is the first faster?": "disturbed: no verdict" if group.disturbed else doubt(c),
            "could have been seen": percent(c.detectable, 1) if c.detectable is not None else DASH,
            "runs of each": str(c.n),
        }
        for c in group.contrasts.get("images_per_sec", ())
    ]
    return Table(rows, "What was compared", words=["images/s", "is the first faster?"])


def parts_table(group: Group) -> Table:
    """What a step is made of, at the points that were profiled; no rows where none was."""
    names = list(dict.fromkeys(name for point in group.points for name in point.parts))
    rows = [
        {"point": point.label + " *" * point.stand_in}
        | {name: _summary(parts.get(name), middle=True) for name in names}
        | {"sum": figure(sum(part.median for part in parts.values()))}
        for point in group.points
        if (parts := point.parts)
    ]
    return Table(rows, "Where a step's time goes (train.profile_steps): ms of rank 0, medians", words=["point"])


def settings_tables(runs: Sequence[RunRecord]) -> list[Table]:
    """What the runs were set to and where they ran: every key with its values, what differs first."""
    config, places = values(run.config for run in runs), values(run.environment for run in runs)
    known = {key: [value for value in seen if value not in (None, "", [], {})] for key, seen in places.items()}
    found = {
        "What varied": {key: seen for key, seen in config.items() if len(seen) > 1},
        "What all points share": {key: seen for key, seen in config.items() if len(seen) == 1},
        "Hardware and versions": {key: seen for key, seen in known.items() if key not in _OF_ONE_RUN},
    }
    tables = []
    for caption, keys in found.items():
        rows = [{"key": key, "values": listing(map(spelled, seen), 12)} for key, seen in sorted(keys.items()) if seen]
        tables.append(Table(rows, caption, words=["key", "values"]))
    return tables


def unfinished_table(runs: Sequence[RunRecord]) -> Table:
    """Jobs without comparable figures, with their reasons."""
    unfinished = [run for run in runs if not run.comparable]
    rows = [
        {
            "point": f"{run.strategy or DASH} × {run.devices or DASH}",
            "overrides": " ".join(run.overrides) or DASH,
            "status": "done, not compared" if run.doubt else run.status.replace("_", " "),
            "reason": shorten(run.doubt or run.reason or DASH, LONGEST_REASON, placeholder="…"),
        }
        for run in unfinished[:MOST_UNFINISHED]
    ]
    notes = [f"and {len(unfinished) - len(rows)} more, in report.csv"] if len(unfinished) > len(rows) else []
    folders = [[run] if run.folder.is_dir() else [] for run in unfinished[:MOST_UNFINISHED]]
    return Table(rows, "", notes, ["point", "overrides", "status", "reason"], folders)


def _notes(group: Group) -> list[str]:
    notes = list(dict.fromkeys(f"({point.letter}) {point.options}" for point in group.points if point.letter))
    if group.single is None:
        notes.append("No run of single on 1 device has finished here, so there is no ratio to it and no efficiency.")
    if any(point.stand_in for point in group.points):
        notes.append("* Its devices are threads on CPU: its speed says nothing about GPUs and is not compared.")
    for threads, cores in sorted({point.needless_threads for point in group.points if point.needless_threads}):
        notes.append(f"† {threads} threads on {cores} cores.")
    if not all(map(group.same_threads, group.points)):
        notes.append("‡ Its devices do not have as many threads as single's: the ratio mixes both effects.")
    speeds = group.speeds
    slow = [
        f"run {run.run} ({run.point}) at {figure(run.images_per_sec)} images/s."
        for run in speeds[speeds["relative"] < OUTLIER].itertuples()
    ]
    flagged = [f"run {r.name} ({p.label}): {'; '.join(r.flags)}." for p in group.points for r in p.runs if r.flags]
    for word, said in (("Outlier, kept", slow), ("Flagged", flagged)):
        notes += [f"{word}: {line}" for line in said[:MOST_NAMED]]
        notes += [f"{word}: {len(said) - MOST_NAMED} more, in report.csv."] if len(said) > MOST_NAMED else []
    for _, baseline in speeds[speeds["block"].isna()].groupby("sweep")["images_per_sec"]:
        notes.append(f"The baseline, first and last: {' and '.join(map(figure, baseline))} images/s.")
    return notes


def _summary(summary: Summary | None, hidden: bool = False, factor: float = 1, middle: bool = False) -> str:
    """`middle`: the median alone, for a table of many columns; report.json has the range."""
    if hidden or summary is None:
        return NOT_HERE if hidden else DASH
    return figure(summary.median * factor) if middle else with_range(summary, factor=factor)


def _peaks(point: MeasuredPoint, factor: float) -> str:
    peaks = [figure(peak.median * factor) for peak in point.peak_bytes]
    if peaks and any(run.shared_memory for run in point.runs):
        return f"{peaks[0]} shared by {point.devices}" if point.devices > 1 else peaks[0]
    more = f", … ({len(peaks)})" if len(peaks) > MOST_DEVICES else ""
    return ", ".join(peaks[:MOST_DEVICES]) + more or DASH

"""Groups, claims and runs as tables of text: what HTML and Markdown both show. A missing figure is a dash, never 0."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from src.engine.report.claims import Claim, Correction
from src.engine.report.comparison import Group, Point
from src.engine.report.measured import Run
from src.engine.report.ranges import FEWEST_REPEATS, Order, Summary, figure, with_range

DASH, NOT_HERE = "—", "n/a"
MOST_LINKS = 12
MOST_DEVICES = 8
LONGEST_REASON = 240  # characters


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


def speed_table(group: Group) -> Table:
    columns = ["point", "runs", "images/s", "speed-up", "efficiency", "ms per step", "data wait, %"]
    columns += ["exposed comm., ms", "to first step, s", "from runs"]
    rows = []
    for point in group.points:
        hidden = point.stand_in
        rows.append(
            [
                Cell(f"{point.label}{_marks(group, point)}"),
                _number(str(len(point.runs))),
                _summary(point.speed, hidden),
                _summary(group.speed_up(point), hidden, suffix="×"),
                _summary(group.efficiency(point), hidden),
                _summary(point.measure("step_ms"), hidden),
                _summary(point.measure("data_wait"), False, 100),
                _exposed(point),
                _summary(point.measure("first_step_seconds"), False),
                _links(point.runs),
            ]
        )
    return Table(columns, rows, f"Speed, {group.batch_words}: median (smallest–largest) of the repeats", _notes(group))


def resource_table(group: Group) -> Table:
    unit, factor = _memory_unit(group)
    what = "resident set per process" if group.accelerator == "cpu" else "allocator peak per device"
    columns = ["point", f"peak memory, {unit}, by device", "largest ÷ mean", "CPU s per s", "val. accuracy"]
    columns += ["minus single", "from runs"]
    rows = []
    for point in group.points:
        rows.append(
            [
                Cell(f"{point.label}{_marks(group, point)}"),
                _number(_peaks(point, factor)),
                _number(NOT_HERE) if point.shared_memory else _summary(point.measure("imbalance"), False),
                _summary(point.measure("cpu_seconds"), False),
                _accuracy(point.measure("accuracy")),
                _difference(group, point),
                _links(point.runs),
            ]
        )
    notes = ["~ ranges of the repeats overlap, or fewer than 3 repeats: no difference from single is shown."]
    shown = notes if any("~" in row[5].text for row in rows) else []
    return Table(columns, rows, f"Memory ({what}), processor and accuracy, {group.batch_words}", shown)


def ranking(group: Group) -> str:
    """Which points may be called faster than which."""
    tiers, few = group.ranked(), group.unranked()
    left_out = f" Not ranked, fewer than {FEWEST_REPEATS} repeats: {_labels(few)}." if few else ""
    if sum(map(len, tiers)) < 2:
        return f"No ranking: fewer than two points with {FEWEST_REPEATS} or more repeats.{left_out}"
    if len(tiers) == 1:
        return f"No ranking: the ranges of {_labels(tiers[0])} overlap.{left_out}"
    steps = [
        f"{_labels(tier)} (ranges overlap: no order among them)" if len(tier) > 1 else _labels(tier) for tier in tiers
    ]
    return f"Fastest first: {'; then '.join(steps)}.{left_out}"


def claims_table(claims: Sequence[Claim]) -> Table:
    rows = [
        [
            _number(str(c.number)),
            Cell(c.text),
            Cell(c.figure),
            Cell(c.verdict),
            Cell(c.reason or DASH),
            _links(c.runs, 6),
        ]
        for c in claims
    ]
    return Table(["no.", "claim", "measured here", "verdict", "reason or rule", "from runs"], rows)


def corrections_table(corrections: Sequence[Correction]) -> Table:
    rows = [[Cell(c.statement), Cell(c.truth), Cell(c.figure)] for c in corrections]
    return Table(["stated in articles", "in truth", "measured here"], rows)


def settings_table(values: dict[str, Any]) -> Table:
    rows = [[Cell(key), Cell(_words(value))] for key, value in sorted(values.items())]
    return Table(["key", "value"], rows)


def varied_table(values: dict[str, list[Any]]) -> Table:
    rows = [[Cell(key), Cell(_listed(seen))] for key, seen in sorted(values.items())]
    return Table(["key", "values"], rows)


def versions_table(runs: Iterable[Run]) -> Table:
    """What the environment records of runs say, each value once."""
    seen: dict[str, dict[str, None]] = {}
    for run in runs:
        for key, value in _environment(run):
            if value not in (None, "", [], {}):
                seen.setdefault(key, {})[str(value)] = None
    return Table(["what", "value"], [[Cell(key), Cell(_listed(list(values)))] for key, values in seen.items()])


def unfinished_table(runs: Iterable[Run]) -> Table:
    """Every job without comparable figures, with its reason."""
    rows = []
    for run in runs:
        reason = run.doubt or run.reason or DASH
        shown = reason if len(reason) <= LONGEST_REASON else reason[: LONGEST_REASON - 1] + "…"
        point = f"{run.strategy or DASH} × {run.devices or DASH}"
        rows.append(
            [_links((run,)), Cell(point), Cell(" ".join(run.overrides) or DASH), Cell(_status(run)), Cell(shown)]
        )
    return Table(["job", "point", "overrides", "status", "reason"], rows)


def _status(run: Run) -> str:
    return "done, not compared" if run.doubt else run.status.replace("_", " ")


def _environment(run: Run) -> Iterable[tuple[str, Any]]:
    record = run.environment
    cpu = record.get("cpu") or {}
    yield "processor", f"{cpu.get('model')}, {cpu.get('cores')} cores" if cpu else None
    memory = cpu.get("memory_bytes")
    yield "main memory", f"{memory / 2**30:.0f} GiB" if isinstance(memory, int | float) else None
    for device in record.get("devices") or []:
        size = device.get("memory_bytes")
        yield f"device {device.get('index')}", f"{device.get('name')}" + (f", {size / 2**30:.0f} GiB" if size else "")
    for key in ("host", "platform", "python", "driver", "cuda", "nccl", "backend", "commit"):
        value = record.get(key)
        yield key, f"{value} (with uncommitted changes)" if key == "commit" and value and record.get("dirty") else value
    yield from (record.get("libraries") or {}).items()


def _marks(group: Group, point: Point) -> str:
    marks = " *" if point.stand_in else ""
    return marks + (" †" if point.needless_threads else "") + ("" if group.same_threads(point) else " ‡")


def _notes(group: Group) -> list[str]:
    notes = [f"({p.letter}) {p.options}" for p in {p.letter: p for p in group.points if p.letter}.values()]
    if group.single is None:
        notes.append("No finished run of single on 1 device here: no speed-up, no efficiency.")
    if any(point.stand_in for point in group.points):
        notes.append(
            "* dp on CPU: threads on CPU stand in for devices. Its speed says nothing about GPUs and is not compared."
        )
    wanting = {point.needless_threads for point in group.points if point.needless_threads}
    for threads, cores in sorted(wanting):
        notes.append(f"† {threads} threads on {cores} cores: more threads than cores.")
    if not all(map(group.same_threads, group.points)):
        notes.append("‡ Other threads per device than single: the speed-up mixes both effects.")
    return notes


def _summary(summary: Summary | None, hidden: bool, factor: float = 1, suffix: str = "") -> Cell:
    if hidden:
        return _number(NOT_HERE)
    if summary is None:
        return _number(DASH)
    scaled = Summary(summary.median * factor, summary.low * factor, summary.high * factor, summary.count)
    return _number(with_range(scaled, suffix))


def _exposed(point: Point) -> Cell:
    exposed = point.measure("exposed_ms")
    if point.strategy == "single" and exposed is None:
        return _number("none")  # by definition: there is no process group
    return _summary(exposed, point.stand_in)


def _accuracy(summary: Summary | None) -> Cell:
    if summary is None:
        return _number(DASH)
    low, high = f"{summary.low:.4f}", f"{summary.high:.4f}"
    return _number(f"{summary.median:.4f}" + (f" ({low}–{high})" if low != high else ""))


def _difference(group: Group, point: Point) -> Cell:
    difference = group.accuracy_difference(point)
    if difference is None:
        return _number(DASH)
    value, order = difference
    return _number(f"{value:+.4f}{' ~' if order in (Order.OVERLAP, Order.TOO_FEW) else ''}")


def _memory_unit(group: Group) -> tuple[str, float]:
    largest = max((peak.high for point in group.points for peak in point.peak_bytes), default=0)
    return ("GiB", 2**-30) if largest >= 2**30 else ("MiB", 2**-20)


def _peaks(point: Point, factor: float) -> str:
    peaks = [
        f"{peak.median * factor:.2f}" if factor == 2**-30 else f"{peak.median * factor:.0f}"
        for peak in point.peak_bytes
    ]
    if point.shared_memory:
        return f"{peaks[0]} for all {point.devices}"
    more = f", … ({len(peaks)})" if len(peaks) > MOST_DEVICES else ""
    return ", ".join(peaks[:MOST_DEVICES]) + more or DASH


def _links(runs: Sequence[Run], most: int = MOST_LINKS) -> Cell:
    return Cell("" if runs else DASH, tuple(runs[:most]), more=max(0, len(runs) - most))


def _number(text: str) -> Cell:
    return Cell(text, number=True)


def _labels(points: Iterable[Point]) -> str:
    return ", ".join(f"{point.label} ({figure(point.speed.median)})" for point in points if point.speed)


def _listed(values: list[Any], most: int = 12) -> str:
    more = f", … ({len(values)} values)" if len(values) > most else ""
    return ", ".join(map(_words, values[:most])) + more


def _words(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value) or "''"

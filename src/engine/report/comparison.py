"""What may be compared: groups of runs alike in hardware, code, model, batch and scaling; in them points, with repeats."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from statistics import median
from typing import Any

import pandas as pd

from src.engine.report.measured import RunRecord, as_number
from src.engine.report.statistics import SMALLEST_DIFFERENCE, Contrast, Summary, summarise
from src.engine.report.wording import percent, words

COMPLEXITY = {"single": 0, "dp": 1, "ddp": 2}  # one of the user's own comes last
STRAGGLES = 1.1  # a rank whose step computes this much longer than the median rank's is named
# Settings that do not change what is trained, or by which points and repeats of one group differ on purpose.
_NOT_A_SETTING = (
    *("parallel.", "paths.", "checkpoint.", "cluster.", "sweep.", "search.", "debug", "experiment", "tags"),
    *("task_name", "seed", "resume", "print_config", "optimized_metric"),
    *("model.name", "data.batch_size"),  # the group's own model and batch
)


@dataclass(frozen=True)
class MeasuredPoint:
    """One strategy on one number of devices and nodes: all its runs."""

    strategy: str
    devices: int
    nodes: int
    options: str  # parallel options by which it differs from other points of this strategy and device count
    runs: tuple[RunRecord, ...]
    letter: str = ""  # stands for `options` in labels; the group's tables say what it means

    @property
    def label(self) -> str:
        return f"{self.strategy} × {self.devices}{self.suffix}"

    @property
    def suffix(self) -> str:
        return (f" on {self.nodes} nodes" if self.nodes > 1 else "") + (f" ({self.letter})" if self.letter else "")

    @property
    def stand_in(self) -> bool:
        return any(run.stand_in for run in self.runs)

    @property
    def needless_threads(self) -> tuple[int, int] | None:
        return next((run.needless_threads for run in self.runs if run.needless_threads), None)

    @property
    def speed(self) -> Summary | None:
        """Images/s, where they mean something: not for dp over CPU threads."""
        return None if self.stand_in else self.measure("images_per_sec")

    @property
    def repeats(self) -> list[RunRecord]:
        """Its runs without the baseline's two extra ones, of which the first warms the machine up."""
        return [run for run in self.runs if run.block is not None]

    def measure(self, name: str) -> Summary | None:
        return summarise(run.measure(name) for run in self.repeats)

    @cached_property
    def parts(self) -> dict[str, Summary]:
        """Milliseconds of the parts of a mean step, by name, where runs were profiled."""
        found = pd.DataFrame([run.profiled_parts for run in self.repeats])
        return {str(name): summary for name in found if (summary := summarise(found[name]))}

    @property
    def flagged(self) -> int:
        return sum(bool(run.flags) for run in self.repeats)

    @cached_property
    def peak_bytes(self) -> list[Summary]:
        """Per device, over the repeats that recorded as many devices as most did."""
        found = pd.DataFrame([run.peak_bytes for run in self.repeats]).dropna()
        return [summary for device in found if (summary := summarise(found[device]))]


@dataclass(frozen=True)
class Group:
    """Points that may stand in one table."""

    hardware: str
    accelerator: str
    model: str
    kind: str  # strong: `batch` is global; weak: `batch` is per device
    batch: int | None
    settings: str  # what else tells this group from others of the report
    points: tuple[MeasuredPoint, ...] = ()
    contrasts: Mapping[str, Sequence[Contrast]] = field(default_factory=dict, compare=False)  # by measure
    smallest_difference: float = SMALLEST_DIFFERENCE  # with which they were decided

    @property
    def title(self) -> str:
        return ", ".join(filter(None, (self.model, self.batch_words, self.settings)))

    @property
    def batch_words(self) -> str:
        """Names the kind of scaling, so that the two are never mistaken for each other."""
        batch = "—" if self.batch is None else str(self.batch)
        weak = f"weak scaling, batch {batch} per device"
        return weak if self.kind == "weak" else f"strong scaling, global batch {batch}"

    @property
    def runs(self) -> list[RunRecord]:
        return [run for point in self.points for run in point.runs]

    @cached_property
    def speeds(self) -> pd.DataFrame:
        """Every run with images/s, in run order; `relative` is over the median of its point."""
        columns = ["point", "run", "sweep", "position", "block", "strategy", "devices", "series"]
        found = [
            [point.label, run.name, run.sweep, run.position, run.block, point.strategy, point.devices]
            + [point.strategy + point.suffix, own, own / speed.median, bool(run.flags)]
            for point in self.points
            if (speed := point.speed) and speed.median > 0
            for run in point.runs
            if (own := run.measure("images_per_sec")) is not None
        ]
        frame = pd.DataFrame(found, columns=[*columns, "images_per_sec", "relative", "flagged"])
        return frame.astype({"position": "Int64", "block": "Int64"}).sort_values(
            ["sweep", "position"], ignore_index=True
        )

    @property
    def disturbed(self) -> bool:
        """Most runs were flagged: their figures are shown and decide nothing."""
        return 2 * sum(bool(run.flags) for run in self.runs) > len(self.runs)

    @property
    def single(self) -> MeasuredPoint | None:
        return self.at("single", 1)

    def named(self, label: str) -> MeasuredPoint:
        return next(point for point in self.points if point.label == label)

    def at(self, strategy: str, devices: int) -> MeasuredPoint | None:
        """The point with the fewest nodes and options set, where these vary."""
        found = [point for point in self.points if (point.strategy, point.devices) == (strategy, devices)]
        return min(
            found, key=lambda p: (p.nodes, p.options.count("=") - p.options.count("=null"), p.options), default=None
        )

    def over_single(self, point: MeasuredPoint) -> Contrast | None:
        """What was tested of its images/s over single's; None where nothing was."""
        pair = (point.label, self.single.label if self.single else None)
        return next((c for c in self.contrasts.get("images_per_sec", ()) if (c.a, c.b) == pair), None)

    def efficiency(self, point: MeasuredPoint) -> float | None:
        """Images/s over single's, per device: 1 is ideal. In strong and in weak scaling alike."""
        contrast = self.over_single(point)
        return contrast.ratio / point.devices if contrast and contrast.ratio and point.devices else None

    def same_threads(self, point: MeasuredPoint) -> bool:
        """False on CPU, where threads decide what a device is, if `point`'s devices have not as many as single's."""
        both = [{run.integer("threads_per_device") for run in p.runs} for p in (point, self.single or point)]
        return self.accelerator != "cpu" or both[0] == both[1]

    @property
    def warnings(self) -> list[str]:
        """What a reader must know before the figures: several hosts, and ranks that hold the others up."""
        hosts = sorted({run.hosts[0] for run in self.runs if run.hosts})
        mixed = [f"Runs on {len(hosts)} hosts ({', '.join(hosts[:4])}): each host is a block of its own."]
        return (mixed if len(hosts) > 1 else []) + [line for point in self.points for line in stragglers(point)]


def stragglers(point: MeasuredPoint) -> list[str]:
    """Ranks that need STRAGGLES times as long to load and compute as the median rank, or longer, in the median run."""
    shares: dict[tuple[str, str], list[float]] = defaultdict(list)
    for run in point.runs:
        times = {
            (str(entry.get("rank")), str(entry.get("host") or "an unknown host")): data + compute
            for entry in run.entries(dict, "ranks")
            if (data := as_number(entry.get("data_ms"))) is not None
            if (compute := as_number(entry.get("compute_ms"))) is not None
        }
        middle = median(times.values() or [0])
        for rank, time in times.items() if middle > 0 else ():
            shares[rank].append(time / middle)
    return [
        f"{point.label}: rank {rank} on {host} needs {percent(share - 1)} longer for its part of a step "
        "(data and computing) than the median rank."
        for (rank, host), of_runs in shares.items()
        if (share := median(of_runs)) >= STRAGGLES
    ]


def group_runs(runs: Iterable[RunRecord]) -> list[Group]:
    """Groups of the finished runs, without contrasts: those with most points first; points by strategy and devices."""
    comparable = [run for run in runs if run.comparable]
    settings = [key for key in varied(comparable) if not key.startswith(_NOT_A_SETTING)]
    workers = {(run.strategy, run.devices, run.config.get("data.workers")) for run in comparable}
    if "data.workers" in settings and len(workers) == len({place[:2] for place in workers}):
        settings.remove("data.workers")  # not swept: `auto` may give each strategy its own number
    commits = {run.commit for run in comparable if run.commit}
    found: dict[Group, list[RunRecord]] = defaultdict(list)
    for run in comparable:
        batch = run.config.get("data.batch_size_per_device")
        kind = "strong" if batch is None else "weak"
        batch = batch or run.integer("batch_size") or run.config.get("data.batch_size")
        named = [words(run, settings)] if run.config and settings else []
        named += [f"code {run.commit or 'unknown'}"] if len(commits) > 1 else []
        model = str(run.result.get("model") or "—")
        found[Group(run.hardware, run.accelerator, model, kind, batch, ", ".join(named))].append(run)
    groups = [replace(empty, points=_points(members)) for empty, members in found.items()]
    return sorted(groups, key=lambda g: (-len(g.points), g.hardware, g.title))


def _points(runs: list[RunRecord]) -> tuple[MeasuredPoint, ...]:
    points = []
    for (_, strategy, devices, nodes), alike in groupby(sorted(runs, key=_place), key=_place):
        members = list(alike)
        options = [key for key in varied(members) if key.startswith("parallel.")]
        members.sort(key=lambda run: [_natural(run.config.get(key)) for key in options])
        for named, repeats in groupby(members, key=lambda run: words(run, options, "parallel.")):
            points.append(MeasuredPoint(strategy, devices, nodes, named, tuple(repeats)))
    seen = list(dict.fromkeys(point.options for point in points if point.options))
    return tuple(replace(p, letter=_letter(seen.index(p.options))) if p.options else p for p in points)


def _place(run: RunRecord) -> tuple[int, str, int, int]:
    return COMPLEXITY.get(run.strategy, len(COMPLEXITY)), run.strategy, run.devices, run.nodes


def _natural(value: Any) -> tuple[int, float, str]:
    """Numbers by size, then all else by its text."""
    return (0, float(value), "") if isinstance(value, int | float) else (1, 0.0, str(value))


def _letter(number: int) -> str:
    """a, b, … z, aa, ab, …"""
    return (_letter(number // 26 - 1) if number >= 26 else "") + "abcdefghijklmnopqrstuvwxyz"[number % 26]


def varied(runs: Iterable[RunRecord]) -> dict[str, list[Any]]:
    """Config keys with more than one value over the `runs` with a config, with these values; a missing key is null."""
    return {key: found for key, found in values(run.config for run in runs).items() if len(found) > 1}


def values(trees: Iterable[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Each key's different values in flat trees, None where one lacks it; empty trees say nothing."""
    known = [tree for tree in trees if tree]
    keys = dict.fromkeys(key for tree in known for key in tree)
    return {key: list({repr(tree.get(key)): tree.get(key) for tree in known}.values()) for key in keys}

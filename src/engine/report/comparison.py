"""What may be compared: groups of runs alike in hardware, code, model, batch and scaling; in them points, with repeats."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from src.engine.report.measured import RunRecord, as_number
from src.engine.report.settings import hardware, varied, words
from src.engine.report.statistics import Contrast, Summary, summarise
from src.engine.report.wording import percent

STRATEGIES = ("single", "dp", "ddp")  # simplest first
STRAGGLES = 1.1  # a rank whose step computes this much longer than the median rank's is named
# Settings that do not change what is trained, or by which points and repeats of one group differ on purpose.
_NOT_A_SETTING = (
    *("parallel.", "paths.", "checkpoint.", "cluster.", "sweep.", "search.", "debug", "experiment", "tags"),
    *("task_name", "seed", "resume", "print_config", "optimized_metric"),
    *("model.name", "data.batch_size"),  # the group's own model and batch
)


@dataclass(frozen=True)
class MeasuredPoint:
    """One strategy on one number of devices and nodes: all its repeats."""

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
    def threads(self) -> set[int | None]:
        """Threads per device; matters on CPU only, where they decide what a device is."""
        return {run.integer("threads_per_device") for run in self.runs if run.accelerator == "cpu"}

    @property
    def speed(self) -> Summary | None:
        """Images/s, where they mean something: not for dp over CPU threads."""
        return None if self.stand_in else self.measure("images_per_sec")

    def measure(self, name: str) -> Summary | None:
        return summarise(run.measure(name) for run in self.runs)

    @property
    def parts(self) -> dict[str, Summary]:
        """Milliseconds of the parts of a mean step, by name, where runs were profiled."""
        of_runs = [run.profiled_parts for run in self.runs]
        names = dict.fromkeys(name for parts in of_runs for name in parts)
        found = ((name, summarise(parts.get(name) for parts in of_runs)) for name in names)
        return {name: summary for name, summary in found if summary}

    @property
    def flagged(self) -> int:
        return sum(bool(run.flags) for run in self.runs)

    @property
    def peak_bytes(self) -> list[Summary]:
        """Per device, over the repeats that recorded as many devices as most did."""
        peaks = [run.peak_bytes for run in self.runs if run.peak_bytes]
        most = max((len(values) for values in peaks), default=0)
        columns = zip(*(values for values in peaks if len(values) == most), strict=True)
        return [summary for summary in map(summarise, columns) if summary is not None]


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
        found.sort(key=lambda p: (p.nodes, p.options.count("=") - p.options.count("=null"), p.options))
        return found[0] if found else None

    def contrast(self, measure: str, a: MeasuredPoint | None, b: MeasuredPoint | None) -> Contrast | None:
        """What was tested of a over b; None where that is no statement of this report."""
        found = (c for c in self.contrasts.get(measure, ()) if a and b and (c.a, c.b) == (a.label, b.label))
        return next(found, None)

    def over_single(self, point: MeasuredPoint) -> Contrast | None:
        return self.contrast("images_per_sec", point, self.single)

    def efficiency(self, point: MeasuredPoint) -> float | None:
        """Images/s over single's, per device: 1 is ideal. In strong and in weak scaling alike."""
        contrast = self.over_single(point)
        return contrast.ratio / point.devices if contrast and contrast.ratio and point.devices else None

    def same_threads(self, point: MeasuredPoint) -> bool:
        """False on CPU where `point`'s devices have another number of threads than the one of single."""
        return self.single is None or point.threads == self.single.threads

    @property
    def warnings(self) -> list[str]:
        """What a reader must know before the figures: several hosts, and ranks that hold the others up."""
        hosts = sorted({run.hosts[0] for run in self.runs if run.hosts})
        mixed = [f"Runs on {len(hosts)} hosts ({', '.join(hosts[:4])}): each host is a block of its own."]
        return (mixed if len(hosts) > 1 else []) + [line for point in self.points for line in stragglers(point)]


def stragglers(point: MeasuredPoint) -> list[str]:
    """Ranks that need STRAGGLES times as long to load and compute as the median rank, or longer, in the median run."""
    shares: dict[tuple[Any, str], list[float]] = defaultdict(list)
    for run in point.runs:
        own = {
            (entry.get("rank"), str(entry.get("host") or "host unknown")): data + compute
            for entry in run.ranks
            if (data := as_number(entry.get("data_ms"))) is not None
            and (compute := as_number(entry.get("compute_ms"))) is not None
        }
        middle = median(own.values()) if own else 0
        for rank, time in own.items() if middle > 0 else ():
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
        found[Group(hardware(run), run.accelerator, model, kind, batch, ", ".join(named))].append(run)
    groups = [replace(empty, points=_points(members)) for empty, members in found.items()]
    return sorted(groups, key=lambda g: (-len(g.points), g.hardware, g.title))


def _points(runs: list[RunRecord]) -> tuple[MeasuredPoint, ...]:
    found: dict[tuple[str, int, int], list[RunRecord]] = defaultdict(list)
    for run in runs:
        found[run.strategy, run.devices, run.nodes].append(run)
    points = []
    for place, members in found.items():
        options = [key for key in varied(members) if key.startswith("parallel.")]
        variants: dict[str, list[RunRecord]] = defaultdict(list)
        for run in sorted(members, key=lambda run: [_natural(run.config.get(key)) for key in options]):
            variants[words(run, options, "parallel.")].append(run)
        points += [MeasuredPoint(*place, named, tuple(repeats)) for named, repeats in variants.items()]
    points.sort(key=lambda p: (complexity(p.strategy), p.strategy, p.devices, p.nodes))
    options_seen = dict.fromkeys(point.options for point in points if point.options)
    letters = {options: _letter(number) for number, options in enumerate(options_seen)}
    return tuple(replace(point, letter=letters.get(point.options, "")) for point in points)


def complexity(strategy: str) -> int:
    return STRATEGIES.index(strategy) if strategy in STRATEGIES else len(STRATEGIES)


def _natural(value: Any) -> tuple[int, float, str]:
    """Numbers by size, then all else by its text."""
    return (0, float(value), "") if isinstance(value, int | float) else (1, 0.0, str(value))


def _letter(number: int) -> str:
    """a, b, … z, aa, ab, …"""
    return (_letter(number // 26 - 1) if number >= 26 else "") + "abcdefghijklmnopqrstuvwxyz"[number % 26]

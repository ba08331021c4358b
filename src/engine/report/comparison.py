"""Runs -> what may be compared: groups of one hardware, model, batch and kind of scaling; points of repeats within."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from src.engine.report.measured import Run
from src.engine.report.ranges import FEWEST_REPEATS, Order, Summary, compare, efficiency, rank, speed_up, summarise

STRATEGIES = ("single", "dp", "ddp")  # simplest first: a tie goes to the simpler one
MEASURES = (
    "images_per_sec",
    "step_ms",
    "data_wait",
    "communication_ms",
    "exposed_ms",
    "bytes_per_step",
    "cpu_seconds",
    "first_step_seconds",
    "imbalance",
    "least_utilisation",
    "accuracy",
)
# Settings that do not change what is trained, or by which points and repeats of one group differ on purpose.
_NOT_A_SETTING = (
    *("parallel.", "paths.", "checkpoint.", "cluster.", "sweep.", "search.", "debug", "experiment", "tags"),
    *("task_name", "seed", "resume", "print_config", "optimized_metric"),
    *("model.name", "data.batch_size", "data.workers"),  # the group's own model and batch; how images are read
)


@dataclass(frozen=True)
class Point:
    """One strategy on one number of devices: all its repeats."""

    strategy: str
    devices: int
    options: str  # parallel options by which it differs from other points of this strategy and device count
    runs: tuple[Run, ...]
    letter: str = ""  # stands for `options` in labels; the group's tables say what it means

    @property
    def label(self) -> str:
        return f"{self.strategy} × {self.devices}{self.suffix}"

    @property
    def suffix(self) -> str:
        return f" ({self.letter})" if self.letter else ""

    @property
    def stand_in(self) -> bool:
        return any(run.stand_in for run in self.runs)

    @property
    def needless_threads(self) -> tuple[int, int] | None:
        return next((run.needless_threads for run in self.runs if run.needless_threads), None)

    @property
    def threads(self) -> set[int | None]:
        """Threads per device; matters on CPU only, where they decide what a device is."""
        return {run.result.threads_per_device for run in self.runs if run.result and run.accelerator == "cpu"}

    @property
    def speed(self) -> Summary | None:
        """Images/s, where they mean something: not for dp over CPU threads."""
        return None if self.stand_in else self.measure("images_per_sec")

    def measure(self, name: str) -> Summary | None:
        return summarise(getattr(run, name) for run in self.runs)

    @property
    def shared_memory(self) -> bool:
        return any(run.shared_memory for run in self.runs)

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
    points: tuple[Point, ...] = ()

    @property
    def title(self) -> str:
        return ", ".join(filter(None, (self.model, self.batch_words, self.settings)))

    @property
    def batch_words(self) -> str:
        """Names the kind of scaling, so that the two are never mistaken for each other."""
        batch = "—" if self.batch is None else str(self.batch)
        strong = self.kind == "strong"
        return f"strong scaling, global batch {batch}" if strong else f"weak scaling, batch {batch} per device"

    def at(self, strategy: str, devices: int) -> Point | None:
        """The point with the fewest options set, where options vary."""
        found = [point for point in self.points if (point.strategy, point.devices) == (strategy, devices)]
        return min(found, key=lambda p: (p.options.count("=") - p.options.count("=null"), p.options), default=None)

    @property
    def single(self) -> Point | None:
        return self.at("single", 1)

    def speed_up(self, point: Point) -> Summary | None:
        if point is self.single and point.speed:
            return Summary(1, 1, 1, point.speed.count)  # the base itself: 1 by definition, without a spread
        return speed_up(point.speed, self.single.speed if self.single else None)

    def efficiency(self, point: Point) -> Summary | None:
        return efficiency(self.speed_up(point), point.devices) if point.devices else None

    def same_threads(self, point: Point) -> bool:
        """False on CPU where `point`'s devices have another number of threads than the one of single."""
        return self.single is None or point.threads == self.single.threads

    def counts(self, *strategies: str) -> list[int]:
        """Device counts from 2 on at which all `strategies` were measured."""
        found = [{point.devices for point in self.points if point.strategy == strategy} for strategy in strategies]
        return sorted(count for count in set.intersection(*found) if count > 1)

    def ranked(self) -> list[list[Point]]:
        """Points with enough repeats in tiers of images/s, fastest first; see `statistics.rank`."""
        speeds = {point.label: point.speed for point in self.points}
        known = {label: speed for label, speed in speeds.items() if speed and speed.count >= FEWEST_REPEATS}
        by_label = {point.label: point for point in self.points}
        return [[by_label[label] for label in tier] for tier in rank(known)]

    def unranked(self) -> list[Point]:
        """Points with a speed, but from too few repeats."""
        return [point for point in self.points if point.speed and point.speed.count < FEWEST_REPEATS]

    def accuracy_difference(self, point: Point) -> tuple[float, Order] | None:
        """Median final accuracy minus that of single on one device."""
        base = self.single and self.single.measure("accuracy")
        own = point.measure("accuracy")
        return (own.median - base.median, compare(own, base)) if own and base and point is not self.single else None


def group(runs: Iterable[Run]) -> list[Group]:
    """Finished runs only. Groups with most points first, then by name; points by strategy and devices."""
    comparable = [run for run in runs if run.comparable]
    differing = varied(run for run in comparable if run.config)
    settings = [key for key in differing if not key.startswith(_NOT_A_SETTING)]
    found: dict[Group, list[Run]] = defaultdict(list)
    for run in comparable:
        assert run.result is not None
        kind, batch = _batch(run)
        words = _words(run, settings) if run.config else ""
        found[Group(hardware(run), run.accelerator, run.result.model or "—", kind, batch, words)].append(run)
    groups = [replace(empty, points=_points(members)) for empty, members in found.items()]
    return sorted(groups, key=lambda g: (-len(g.points), g.hardware, g.title))


def hardware(run: Run) -> str:
    """What must be equal for two runs to be compared: devices, processor, and the versions of torch and CUDA."""
    cpu = run.environment.get("cpu") or {}
    processor = f"{cpu.get('model') or 'unknown processor'}, {cpu.get('cores') or '?'} cores"
    devices = run.environment.get("devices") or []
    # Names only, no count: a run may have been shown only some of the machine's devices.
    names = sorted({str(device.get("name", "")) for device in devices if isinstance(device, dict)})
    parts = [" + ".join(names) or "unknown GPU", processor] if run.accelerator == "cuda" else [f"CPU: {processor}"]
    if run.accelerator == "mps":
        parts = [f"Apple GPU: {processor}"]
    torch = (run.environment.get("libraries") or {}).get("torch")
    cuda = run.environment.get("cuda") if run.accelerator == "cuda" else None
    return "; ".join([*parts, f"torch {torch or '—'}", *([f"CUDA {cuda}"] if cuda else [])])


def varied(runs: Iterable[Run]) -> dict[str, list[Any]]:
    """Config keys with more than one value over `runs`, with these values."""
    values: dict[str, dict[str, Any]] = defaultdict(dict)
    count: dict[str, int] = defaultdict(int)
    total = 0
    for run in runs:
        total += 1
        for key, value in run.config.items():
            values[key][repr(value)] = value
            count[key] += 1
    return {
        key: list(seen.values()) + ([None] if count[key] < total and "None" not in seen else [])
        for key, seen in values.items()
        if len(seen) > 1 or count[key] < total
    }


def shared(runs: Iterable[Run]) -> dict[str, Any]:
    """Config keys that have one value in all `runs` with a config."""
    configured = [run for run in runs if run.config]
    differing = varied(configured)
    return {key: value for key, value in configured[0].config.items() if key not in differing} if configured else {}


def _batch(run: Run) -> tuple[str, int | None]:
    per_device = run.config.get("data.batch_size_per_device")
    if per_device is not None:
        return "weak", per_device
    return "strong", (run.result and run.result.batch_size) or run.config.get("data.batch_size")


def _points(runs: list[Run]) -> tuple[Point, ...]:
    found: dict[tuple[str, int], list[Run]] = defaultdict(list)
    for run in runs:
        found[run.strategy, run.devices].append(run)
    points = []
    for (strategy, devices), members in found.items():
        differing = varied(run for run in members if run.config)
        options = [key for key in differing if key.startswith("parallel.")]
        variants: dict[str, list[Run]] = defaultdict(list)
        for run in sorted(members, key=lambda run: [_natural(run.config.get(key)) for key in options]):
            variants[_words(run, options, "parallel.")].append(run)
        points += [Point(strategy, devices, words, tuple(repeats)) for words, repeats in variants.items()]
    order = {strategy: place for place, strategy in enumerate(STRATEGIES)}
    points.sort(key=lambda p: (order.get(p.strategy, len(order)), p.strategy, p.devices))
    letters: dict[str, str] = {}
    for point in points:
        if point.options:
            letters.setdefault(point.options, _letter(len(letters)))
    return tuple(replace(point, letter=letters.get(point.options, "")) for point in points)


def _natural(value: Any) -> tuple[int, float, str]:
    """Numbers by size, then all else by its text."""
    return (0, float(value), "") if isinstance(value, int | float) else (1, 0.0, str(value))


def _letter(number: int) -> str:
    """a, b, … z, aa, ab, …"""
    return (_letter(number // 26 - 1) if number >= 26 else "") + "abcdefghijklmnopqrstuvwxyz"[number % 26]


def _words(run: Run, keys: Iterable[str], prefix: str = "") -> str:
    def text(value: Any) -> str:
        return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)

    return ", ".join(f"{key.removeprefix(prefix)}={text(run.config.get(key))}" for key in keys)

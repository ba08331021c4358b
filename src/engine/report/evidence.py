"""What the claims are weighed with: the runs and groups of one hardware, and the rule from figures to a verdict."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from src.engine.report.comparison import Group, Point
from src.engine.report.measured import Run
from src.engine.report.ranges import FEWEST_REPEATS, Order, Summary

HOLDS, FAILS, UNMEASURED = "holds", "does not hold", "cannot be measured on this machine"

THREADS = "dp on CPU is threads of one process: its speed, CPU use and memory per device say nothing about GPUs"


@dataclass(frozen=True)
class Finding:
    verdict: str
    figure: str = "—"
    reason: str = ""
    runs: tuple[Run, ...] = ()


@dataclass(frozen=True)
class Evidence:
    """All runs of one hardware, and their groups."""

    groups: Sequence[Group]
    runs: Sequence[Run]

    @property
    def on_cpu(self) -> bool:
        return any(group.accelerator == "cpu" for group in self.groups)

    def finished(self, strategy: str, least_devices: int = 1) -> list[Run]:
        return [r for r in self.runs if r.comparable and r.strategy == strategy and r.devices >= least_devices]

    def points(self, strategy: str, least_devices: int = 2) -> list[tuple[Group, Point]]:
        return [(g, p) for g in self.groups for p in g.points if p.strategy == strategy and p.devices >= least_devices]

    def pairs(self) -> list[tuple[Group, int, Point, Point]]:
        """(group, devices, dp point, ddp point) wherever both were measured on the same 2 or more devices."""
        found = [(g, n, g.at("dp", n), g.at("ddp", n)) for g in self.groups for n in g.counts("dp", "ddp")]
        return [(g, n, dp, ddp) for g, n, dp, ddp in found if dp and ddp]

    def both(self, name: str) -> list[tuple[str, Summary, Summary]]:
        """(place, dp's figure, ddp's figure) of every pair that has both."""
        found = [(self.place(g, n), dp.measure(name), ddp.measure(name)) for g, n, dp, ddp in self.pairs()]
        return [(place, dp, ddp) for place, dp, ddp in found if dp and ddp]

    @property
    def pair_runs(self) -> tuple[Run, ...]:
        return runs_of(*(point for _, _, dp, ddp in self.pairs() for point in (dp, ddp)))

    def place(self, group: Group, point: Point | int) -> str:
        what = f"{point} devices" if isinstance(point, int) else point.label
        return what if len(self.groups) == 1 else f"{what} ({group.title})"


def listing(items: Iterable[str], most: int = 4) -> str:
    found = list(dict.fromkeys(items))
    more = [f"and {len(found) - most} more"] if len(found) > most else []
    return "; ".join(found[:most] + more) or "—"


def runs_of(*points: Point) -> tuple[Run, ...]:
    return tuple(dict.fromkeys(run for point in points for run in point.runs))


BOTH = "parallel=dp,ddp parallel.devices=2"


def missing(what: str, remedy: str) -> Finding:
    return Finding(UNMEASURED, reason=f"no finished run of {what} here; add {remedy}")


def weigh(orders: Iterable[Order]) -> tuple[str, str]:
    """Verdict and reason of a claim that says HIGHER everywhere."""
    found = list(orders)
    if Order.LOWER in found:
        return FAILS, "" if set(found) == {Order.LOWER} else "not everywhere"
    if Order.TOO_FEW in found:
        return UNMEASURED, f"fewer than {FEWEST_REPEATS} repeats"
    if Order.OVERLAP in found:
        return UNMEASURED, "the ranges overlap: more repeats, or a quieter machine, would tell"
    return HOLDS, ""


def gib(point: Point) -> str:
    """Peaks of all devices, first to last."""
    return ", ".join(f"{summary.median / 2**30:.2f}" for summary in point.peak_bytes)

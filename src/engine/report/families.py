"""Which points are held against which: the statements of a page, one family per measure, decided together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from src.engine.report.comparison import STRATEGIES, Group, Point
from src.engine.report.measured import Run
from src.engine.report.statistics import (
    LEVEL,
    SMALLEST_DIFFERENCE,
    UNMEASURED,
    Contrast,
    choose,
    decide,
    estimate,
)

SPEED = "images_per_sec"
# dp against ddp only. Speed is what a sweep is for and has LEVEL; these share a fifth of it, so that a whole page on which
# nothing differs says something wrong in 6 % of cases at most.
OTHERS = ("first_step_seconds", "cpu_seconds", "busy")
OTHERS_LEVEL = LEVEL / 5

Pairs = list[tuple[Point, Point]]


def rows(group: Group, measure: str) -> list[tuple[str, object, float]]:
    """(point, block, value) of every run whose `measure` may be compared.

    A block is one of one sweep, on one host. Runs beside other jobs and the baseline's extra runs belong to none.
    """
    return [
        (point.label, (run.sweep, run.block, run.hosts[:1]), value)
        for point in group.points
        for run in point.runs
        if run.block is not None and (value := _value(run, measure)) is not None
    ]


def _value(run: Run, measure: str) -> float | None:
    timed = measure != "first_step_seconds"
    if run.neighbours or (timed and run.stand_in):
        return None
    return run.measure(measure)


def pairs_of_speed(group: Group) -> Pairs:
    """Each point against single on one device, and ddp against dp on the same devices. Never all pairs."""
    single = group.single
    against_single = [(point, single) for point in group.points if single and point is not single]
    return [(a, b) for a, b in against_single if a.speed] + ddp_over_dp(group)


def ddp_over_dp(group: Group) -> Pairs:
    found = [(point, group.at("dp", point.devices)) for point in group.points if point.strategy == "ddp"]
    return [(ddp, dp) for ddp, dp in found if dp and dp.devices > 1]


def with_contrasts(groups: Sequence[Group], smallest_difference: float = SMALLEST_DIFFERENCE) -> list[Group]:
    """The groups of a page with the contrasts of each measure, decided as one family over all of them.

    A group most of whose runs were flagged keeps its ratios and is given no verdict.
    """
    families: list[tuple[str, Callable[[Group], Pairs], float]] = [(SPEED, pairs_of_speed, LEVEL)]
    families += [(measure, ddp_over_dp, OTHERS_LEVEL / len(OTHERS)) for measure in OTHERS]
    found: list[dict[str, tuple[Contrast, ...]]] = [{} for _ in groups]
    for measure, pairs, level in families:
        estimates = [estimate(rows(group, measure), [(a.label, b.label) for a, b in pairs(group)]) for group in groups]
        decided = iter(decide([e for of_group in estimates for e in of_group], smallest_difference, level))
        for group, of_group, contrasts in zip(groups, estimates, found, strict=True):
            contrasts[measure] = tuple(_silent(next(decided), group) for _ in of_group)
    return [replace(group, contrasts=contrasts) for group, contrasts in zip(groups, found, strict=True)]


def _silent(contrast: Contrast, group: Group) -> Contrast:
    return replace(contrast, verdict=UNMEASURED, blocks_needed=None) if group.disturbed else contrast


def leader(group: Group, smallest_difference: float) -> tuple[Point, Contrast | None] | None:
    """The point to use, and where it leads as the simpler one its contrast with the highest; see `statistics.choose`."""
    simplest_first = [point.label for point in sorted(group.points, key=_complexity)]
    chosen = choose(rows(group, SPEED), simplest_first, smallest_difference)
    if chosen is None:
        return None
    return next(point for point in group.points if point.label == chosen[0]), chosen[1]


def _complexity(point: Point) -> tuple[int, int, int, str]:
    place = STRATEGIES.index(point.strategy) if point.strategy in STRATEGIES else len(STRATEGIES)
    return point.nodes, point.devices, place, point.options

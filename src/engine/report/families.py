"""Which points are held against which: the statements of a page, one family per measure, decided together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from src.engine.report.comparison import Group, Point, complexity
from src.engine.report.statistics import LEVEL, SMALLEST_DIFFERENCE, UNMEASURED, Contrast, choose, decide, estimate

SPEED = "images_per_sec"
# dp against ddp only. Speed is what a sweep is for and has LEVEL; these share a fifth of it, so that a whole page on which
# nothing differs says something wrong in 6 % of cases at most.
OTHERS = ("first_step_seconds", "cpu_seconds", "busy")
OTHERS_LEVEL = LEVEL / 5

Pairs = list[tuple[Point, Point]]


def rows(group: Group, measure: str) -> list[tuple[str, object, float]]:
    """(point, block, value) of every run whose `measure` may be compared.

    A block is one of one sweep, on one host. Runs beside other jobs and the baseline's extra runs belong to none.
    Of dp over CPU threads only the time to the first step may be compared.
    """
    return [
        (point.label, (run.sweep, run.block, run.hosts[:1]), value)
        for point in group.points
        for run in point.runs
        if run.block is not None and not run.neighbours and (measure == "first_step_seconds" or not run.stand_in)
        if (value := run.measure(measure)) is not None
    ]


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
    found: list[dict[str, list[Contrast]]] = [{measure: [] for measure, *_ in families} for _ in groups]
    for measure, pairs, level in families:
        labels = [[(a.label, b.label) for a, b in pairs(group)] for group in groups]
        stated = [(n, e) for n, group in enumerate(groups) for e in estimate(rows(group, measure), labels[n])]
        for (n, _), contrast in zip(stated, decide([e for _, e in stated], smallest_difference, level), strict=True):
            silent = replace(contrast, verdict=UNMEASURED, blocks_needed=None)
            found[n][measure].append(silent if groups[n].disturbed else contrast)
    return [replace(group, contrasts=contrasts) for group, contrasts in zip(groups, found, strict=True)]


def leader(group: Group, smallest_difference: float) -> tuple[Point, Contrast | None] | None:
    """The point to use, and where it leads as the simpler one its contrast with the highest; see `statistics.choose`."""
    simplest_first = sorted(group.points, key=lambda p: (p.nodes, p.devices, complexity(p.strategy), p.options))
    chosen = choose(rows(group, SPEED), [point.label for point in simplest_first], smallest_difference)
    return (group.named(chosen[0]), chosen[1]) if chosen else None

"""Which points are compared with which: the statements of a page, one family per measure, decided together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from src.engine.report.comparison import Group, MeasuredPoint
from src.engine.report.statistics import LEVEL, SMALLEST_DIFFERENCE, UNMEASURED, Contrast, decide, estimate

SPEED = "images_per_sec"
# Compared between ddp and dp only. Speed is what a sweep is for and has LEVEL; these share a fifth of it, so that a page on
# which nothing differs says something wrong in 6 % of cases at most.
OTHERS = ("first_step_seconds", "cpu_seconds", "busy")
OTHERS_LEVEL = LEVEL / 5

Pairs = list[tuple[MeasuredPoint, MeasuredPoint]]


def rows(group: Group, measure: str) -> list[tuple[str, object, float]]:
    """(point, block, value) of every run whose `measure` may be compared.

    A block belongs to one sweep and one host. Left out are runs beside other jobs and the baseline's two extra runs; of
    dp over CPU threads only the time to the first step may be compared.
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
    others = [point for point in group.points if point is not single and point.speed]
    return [(point, single) for point in others if single] + ddp_over_dp(group)


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

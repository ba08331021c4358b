"""What a report states: which points are compared with which, decided together, and the first sentence about a group."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice

from src.engine.report.comparison import Group, MeasuredPoint
from src.engine.report.measured import RunRecord
from src.engine.report.statistics import (
    HOLDS,
    LEVEL,
    SMALLEST_DIFFERENCE,
    UNMEASURED,
    Contrast,
    choose,
    decide,
    estimate,
)
from src.engine.report.wording import doubt, listing, percent, times, with_range
from src.schema import TrainConfig

SPEED = "images_per_sec"
# Speed is what a sweep is for and has LEVEL; the others share a fifth of it, so that a page on which nothing differs says
# something wrong in 6 % of cases at most.
LEVELS = {SPEED: LEVEL} | dict.fromkeys(("first_step_seconds", "cpu_seconds", "busy"), LEVEL / 5 / 3)


def rows(group: Group, measure: str) -> list[tuple[str, object, float]]:
    """(point, block, value) of every run whose `measure` may be compared.

    A block belongs to one sweep and one host. Left out are runs beside other jobs; of dp over CPU threads only the time
    to the first step may be compared.
    """
    return [
        (point.label, (run.sweep, run.block, run.hosts[:1]), value)
        for point in group.points
        for run in point.repeats
        if not run.neighbours and (measure == "first_step_seconds" or not run.stand_in)
        if (value := run.measure(measure)) is not None
    ]


def pairs(group: Group, measure: str) -> list[tuple[str, str]]:
    """ddp against dp on the same devices; of speed also each point against single on one device. Never all pairs."""
    found = [(point, group.at("dp", point.devices)) for point in group.points if point.strategy == "ddp"]
    found = [(ddp, dp) for ddp, dp in found if dp and dp.devices > 1]
    if measure == SPEED:
        found = [(point, group.single) for point in group.points if point is not group.single] + found
        found = [(a, b) for a, b in found if a.speed and b and b.speed]
    return [(a.label, b.label) for a, b in found if b]


def with_contrasts(groups: Sequence[Group], smallest_difference: float = SMALLEST_DIFFERENCE) -> list[Group]:
    """The groups of a page with the contrasts of each measure, decided as one family over all of them.

    A group most of whose runs were flagged keeps its ratios and is given no verdict.
    """
    found: list[dict[str, list[Contrast]]] = [{} for _ in groups]
    for measure, level in LEVELS.items():
        estimates = [estimate(rows(group, measure), pairs(group, measure)) for group in groups]
        decided = iter(decide([e for own in estimates for e in own], smallest_difference, level))
        for group, own, contrasts in zip(groups, estimates, found, strict=True):
            contrasts[measure] = [
                replace(contrast, verdict=UNMEASURED, blocks_needed=None) if group.disturbed else contrast
                for contrast in islice(decided, len(own))
            ]
    return [
        replace(group, contrasts=contrasts, smallest_difference=smallest_difference)
        for group, contrasts in zip(groups, found, strict=True)
    ]


@dataclass(frozen=True)
class Lead:
    """What to use for one group, with the ratio it rests on; no point and no command where the figures cannot tell."""

    group: Group
    sentence: str
    command: str = ""
    point: str | None = None  # its label
    contrast: Contrast | None = None


def lead_of(group: Group) -> Lead:
    if group.disturbed:
        flags = [run.flags for run in group.runs if run.flags]
        [(why, _)] = Counter(flag for of_run in flags for flag in of_run).most_common(1)
        return Lead(
            group,
            f"No verdict: {len(flags)} of {len(group.runs)} runs were disturbed ({why}). "
            "The figures below are what was measured; run the sweep again on a quiet machine.",
        )
    # Points come by strategy: the sort, which is stable, puts fewer devices first and keeps single before dp before ddp.
    simplest_first = sorted(group.points, key=lambda point: (point.nodes, point.devices))
    chosen = choose(rows(group, SPEED), [point.label for point in simplest_first], group.smallest_difference)
    if chosen is None:
        return Lead(group, "No finished run here has images/s that can be compared yet.")
    label, contrast, others = chosen
    point, apart = group.named(label), listing(others)
    if contrast is None:
        contrast, sentence = _against_single(group, point)
    else:
        sentence = (
            f"{spoken(point)} is the simplest that is at most {percent(group.smallest_difference)} slower than the highest "
            f"estimate: it trains {times(contrast)} as fast as {spoken(group.named(contrast.b))}."
        )
    if apart and contrast is None:
        return Lead(group, f"No verdict: no block has run {spoken(point)} on one host with any of these: {apart}.")
    sentence += f" Not compared, for want of a common block: {apart}." if apart else ""
    return Lead(group, sentence, command(point.runs[0]), point.label, contrast)


def _against_single(group: Group, point: MeasuredPoint) -> tuple[Contrast | None, str]:
    """(what the lead rests on, None where there is nothing to hold it against; the lead in words)."""
    assert point.speed is not None
    if point is group.single:
        against = [c for p in group.points if (c := group.over_single(p)) and c.ratio is not None]
        next_one = max(against, key=lambda c: c.ratio or 0, default=None)
        if next_one is None:
            return None, f"{spoken(point)}: {with_range(point.speed)} images/s. Nothing else was measured beside it."
        other = spoken(group.named(next_one.a))
        return next_one, f"Stay with {spoken(point)}: {other} trains {times(next_one)} as fast."
    contrast = group.over_single(point)
    if contrast is None or contrast.ratio is None:
        return None, (
            f"{spoken(point)} has the highest estimate, {with_range(point.speed)} images/s. A run of parallel=single "
            "parallel.devices=1 in each block would tell how many times as fast as one device that is."
        )
    sentence = f"{spoken(point)} trains {times(contrast)} as fast as single."
    return contrast, sentence if contrast.verdict == HOLDS else f"{sentence} That it is faster is {doubt(contrast)}."


def spoken(point: MeasuredPoint) -> str:
    on = f"{point.devices} device{'s' * (point.devices != 1)}" + (f" of {point.nodes} nodes" if point.nodes > 1 else "")
    return f"{point.strategy} on {on}" + (f" with {point.options}" if point.options else "")


def command(run: RunRecord) -> str:
    """The command that trains as this run did, from the project's root, without the cuts of a benchmark."""
    uncut: dict[str, object] = {}
    if run.config.get("train.max_steps") is not None:  # it ended before its epochs did: these too were the benchmark's
        own = TrainConfig()
        uncut = {"train.max_steps": "null", "train.epochs": own.epochs, "train.evaluate_every": own.evaluate_every}
    words = ["--config-path", str(run.folder), "--config-name", "config"]
    if run.overrides:
        given = {override.lstrip("+~").partition("=")[0]: override for override in run.overrides}
        cut = [key for key in given if key.startswith(("hydra.", "hydra/", "sweep."))]
        words = [given[key] for key in given if key not in ("debug", "print_config", *uncut, *cut)]
    return shlex.join(["python", "train.py", *words, *(f"{key}={value}" for key, value in uncut.items())])

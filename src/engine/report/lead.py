"""The first sentence of the report about a group, and the command that trains as it says."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from src.engine.report.comparison import Group, MeasuredPoint, complexity
from src.engine.report.families import SPEED, rows
from src.engine.report.measured import RunRecord
from src.engine.report.statistics import HOLDS, SMALLEST_DIFFERENCE, Contrast, choose, estimate
from src.engine.report.wording import doubt, listing, percent, times, with_range
from src.schema import TrainConfig


@dataclass(frozen=True)
class Lead:
    """What to use for one group, with the ratio it rests on; no point and no command where the figures cannot tell."""

    group: Group
    sentence: str
    command: str = ""
    point: MeasuredPoint | None = None
    contrast: Contrast | None = None


def lead_of(group: Group, smallest_difference: float = SMALLEST_DIFFERENCE) -> Lead:
    if group.disturbed:
        flagged = [run for run in group.runs if run.flags]
        why = max({flag for run in flagged for flag in run.flags}, key=lambda f: sum(f in r.flags for r in flagged))
        return Lead(
            group,
            f"No verdict: {len(flagged)} of {len(group.runs)} runs were disturbed ({why}). "
            "The figures below are what was measured; run the sweep again on a quiet machine.",
        )
    simplest_first = sorted(group.points, key=lambda p: (p.nodes, p.devices, complexity(p.strategy), p.options))
    measured, labels = rows(group, SPEED), [point.label for point in simplest_first]
    chosen = choose(measured, labels, smallest_difference)
    if chosen is None:
        return Lead(group, "No finished run here has images/s that can be compared yet.")
    point, as_simpler = group.named(chosen[0]), chosen[1]
    if as_simpler is not None:
        contrast: Contrast | None = as_simpler
        sentence = (
            f"{spoken(point)} is the simplest that is at most {percent(smallest_difference)} slower than the highest "
            f"estimate: it trains {times(as_simpler)} as fast as {spoken(group.named(as_simpler.b))}."
        )
    else:
        contrast, sentence = _against_single(group, point)
    to_lead = estimate(measured, [(label, point.label) for label in labels])
    apart = [found.a for found in to_lead if found.n and found.difference is None]
    if apart and contrast is None:
        return Lead(group, f"No verdict: on no host did a block run both {spoken(point)} and {listing(apart)}.")
    sentence += f" Not compared, for want of a common block: {listing(apart)}." if apart else ""
    return Lead(group, sentence, command(point.runs[0]), point, contrast)


def _against_single(group: Group, point: MeasuredPoint) -> tuple[Contrast | None, str]:
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
        count, rate = sum(p.speed is not None for p in group.points), with_range(point.speed)
        return None, (
            f"{spoken(point)} has the highest estimate of {count} point{'s' * (count != 1)}, {rate} images/s. A run "
            "of parallel=single parallel.devices=1 beside it would tell how many times as fast as one device that is."
        )
    sentence = f"{spoken(point)} trains {times(contrast)} as fast as single."
    return contrast, sentence if contrast.verdict == HOLDS else f"{sentence} That it is faster is {doubt(contrast)}."


def spoken(point: MeasuredPoint) -> str:
    on = f"{point.devices} device{'s' * (point.devices != 1)}" + (f" of {point.nodes} nodes" if point.nodes > 1 else "")
    return f"{point.strategy} on {on}" + (f" with {point.options}" if point.options else "")


def command(run: RunRecord) -> str:
    """The command that trains as this run did, from the project's root, without the cuts of a benchmark."""
    cut = run.config.get("train.max_steps") is not None
    # It ended before its epochs did: these too were the benchmark's.
    whole = {"max_steps": "null", "epochs": TrainConfig().epochs, "evaluate_every": TrainConfig().evaluate_every}
    uncut = {f"train.{key}": value for key, value in whole.items()} if cut else {}
    words = ["--config-path", str(run.folder), "--config-name", "config"]
    if run.overrides:
        keys = [(override.lstrip("+~").partition("=")[0], override) for override in run.overrides]
        kept = [(key, o) for key, o in keys if not key.startswith(("hydra.", "hydra/", "sweep."))]
        words = [o for key, o in kept if key not in ("debug", "print_config", *uncut)]
    return shlex.join(["python", "train.py", *words, *(f"{key}={value}" for key, value in uncut.items())])

"""What to do with the figures: the first sentence of the report, its command, and the advice at the end."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from dataclasses import dataclass

from src.engine.report.comparison import STRATEGIES, Group, Point
from src.engine.report.measured import Run
from src.engine.report.ranges import FEWEST_REPEATS, figure, with_range


@dataclass(frozen=True)
class Recommendation:
    """One sentence about one group, the command that follows from it, and the runs it rests on."""

    group: Group
    sentence: str
    command: str
    point: Point | None = None


def devices(count: int) -> str:
    return f"{count} device" if count == 1 else f"{count} devices"


def recommend(group: Group) -> Recommendation:
    """Which strategy on how many devices, with the expected images/s and the reason; or why the figures cannot tell."""
    measured = [point for point in group.points if point.speed]
    if not measured:
        return Recommendation(group, "No finished run here has an images/s figure that can be compared yet.", "")
    if not group.ranked() or group.unranked():
        return _too_few(group, measured)
    fastest, *rest = group.ranked()
    best = min(fastest, key=_simplicity)
    assert best.speed is not None
    expected = f"expect {with_range(best.speed)} images/s over {best.speed.count} repeats"
    why = _tied(best, fastest) if len(fastest) > 1 else _ahead(group, best, rest)
    return Recommendation(group, f"Use {_spoken(best)}: {expected}, because {why}.", command(best.runs[0]), best)


def _too_few(group: Group, measured: list[Point]) -> Recommendation:
    first = max(measured, key=lambda point: point.speed.median if point.speed else 0)
    assert first.speed is not None
    few = ", ".join(f"{point.label} has {point.speed.count}" for point in group.unranked() if point.speed)
    sentence = (
        f"Too few repeats to rank (a ranking needs {FEWEST_REPEATS} of every point; {few}). "
        f"The highest median so far is {first.label}: {with_range(first.speed)} images/s. "
        "Repeat with sweep.repeats=5 before relying on it."
    )
    return Recommendation(group, sentence, command(first.runs[0]), first)


def _simplicity(point: Point) -> tuple[int, int, str]:
    return point.devices, STRATEGIES.index(point.strategy) if point.strategy in STRATEGIES else 9, point.options


def _tied(best: Point, fastest: list[Point]) -> str:
    others = " and ".join(_spoken(point) for point in fastest if point is not best)
    return (
        f"its range overlaps with that of {others}: they cannot be ranked, and it needs the fewest devices or processes"
    )


def _ahead(group: Group, best: Point, rest: list[list[Point]]) -> str:
    if not rest:
        return "nothing else was measured here that could be ranked with it"
    runner_up = rest[0][0]
    assert runner_up.speed is not None
    gain, share = group.speed_up(best), group.efficiency(best)
    against = "it is "
    if gain and share and best is not group.single:
        against = f"it is {figure(gain.median)}× single on 1 device (efficiency {figure(share.median)}) and "
    return f"{against}clear of the next, {_spoken(runner_up)}, with {with_range(runner_up.speed)} images/s"


def _spoken(point: Point) -> str:
    return f"{point.strategy} on {devices(point.devices)}" + (f" with {point.options}" if point.options else "")


def command(run: Run) -> str:
    """The command that does this run again, from the project's root."""
    if run.overrides:
        kept = [o for o in run.overrides if not o.lstrip("+").startswith(("hydra.", "hydra/", "sweep."))]
        return shlex.join(["python", "train.py", *kept])
    return shlex.join(["python", "train.py", "--config-path", str(run.folder), "--config-name", "config"])


def advise(groups: Iterable[Group]) -> list[str]:
    """A stage for each strategy (claim 15), as far as the figures carry it. One hardware."""
    groups = list(groups)
    lines = [line for g in groups[:3] for line in (_to_try(g), _to_train(g), _to_grow(g)) if line]
    return list(dict.fromkeys(lines))


def _to_try(group: Group) -> str:
    """What starts soonest, where start-up times of several strategies lie apart."""
    starts = [(point, summary) for point in group.points if (summary := point.measure("first_step_seconds"))]
    if len({point.strategy for point, _ in starts}) < 2:
        return ""
    point, first = min(starts, key=lambda item: item[1].median)
    _, last = max(starts, key=lambda item: item[1].median)
    return (
        f"To try an idea ({group.title}): {point.label} reaches its first step soonest, {with_range(first, ' s')} "
        f"after the command; the slowest to start needs {with_range(last, ' s')}."
    )


def stages(group: Group) -> str:
    """In one phrase: what starts soonest and what is fastest, by medians."""
    starts = {p.label: s.median for p in group.points if (s := p.measure("first_step_seconds"))}
    speeds = {p.label: s.median for p in group.points if (s := p.speed)}
    soonest, fastest = min(starts, key=starts.__getitem__, default=""), max(speeds, key=speeds.__getitem__, default="")
    first = [f"first to start {soonest}, {figure(starts[soonest])} s"] if soonest else []
    return ", ".join(first + ([f"fastest {fastest}, {figure(speeds[fastest])} images/s"] if fastest else []))


def _to_train(group: Group) -> str:
    advice = recommend(group)
    return f"To train ({group.title}): {advice.sentence[0].lower()}{advice.sentence[1:]}" if advice.point else ""


def _to_grow(group: Group) -> str:
    """How much of each further device arrives under ddp, the only one of the three that goes on to several nodes."""
    counts = group.counts("ddp")
    point = group.at("ddp", counts[-1]) if counts else None
    share = group.efficiency(point) if point else None
    if point is None or share is None:
        return ""
    marks = "; more threads than cores, so this says little" if point.needless_threads else ""
    return (
        f"To go on to more devices or nodes ({group.title}): ddp only; on {devices(point.devices)} its efficiency is "
        f"{with_range(share)}{marks}. Over a network between nodes expect less."
    )

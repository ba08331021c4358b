"""Compare the speeds of a sweep's configurations within each group of comparable runs, and
recommend one per group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from timm_parallel.lab.analysis.groups import Group, MeasuredPoint
from timm_parallel.lab.analysis.recommendation import Recommendation, command, disturbed_sentence
from timm_parallel.lab.analysis.selection import choose
from timm_parallel.lab.analysis.statistics import (
    LEVEL,
    NOT_MEASURABLE,
    NOT_SUPPORTED,
    SMALLEST_DIFFERENCE,
    SUPPORTED,
    Contrast,
    decide,
    estimate,
)
from timm_parallel.lab.analysis.wording import (
    interval_text,
    join_short,
    percent,
    times,
    verdict_text,
    with_range,
)
from timm_parallel.machine.text import plural

SPEED = "images_per_sec"
# Chance of a wrong verdict, by measure. Speed, the subject of a sweep, has LEVEL; the other
# measures share a fifth of it. So a page on which nothing differs has a wrong verdict in 6 % of
# cases at most.
LEVELS = {SPEED: LEVEL} | dict.fromkeys(
    ("first_step_seconds", "cpu_seconds", "busy"), LEVEL / 5 / 3
)


def rows(group: Group, measure: str) -> list[tuple[str, object, float]]:
    """Return (configuration, repeat on one host, value of `measure`) of each run whose value may be
    compared.

    Excludes runs with concurrent jobs and, except for the time to the first step, runs of dp over
    CPU threads.
    """
    measured: list[tuple[str, object, float]] = []
    for point in group.points:
        for run in point.runs:
            value = run.measure(measure)
            is_meaningful = measure == "first_step_seconds" or not run.is_simulated
            if value is not None and is_meaningful and not run.neighbours:
                measured.append((point.label, (run.sweep, run.block, run.hosts[:1]), value))
    return measured


def pairs(group: Group, measure: str) -> list[tuple[str, str]]:
    """Return the pairs of configurations to compare: ddp and dp on equally many devices; for speed,
    also each with single.
    """
    # Each additional pair would widen all confidence intervals.
    labels = []
    for a in group.points:
        opponents = [group.single] if measure == SPEED else []
        if a.strategy == "ddp" and a.devices > 1:
            opponents.append(group.at("dp", a.devices))
        for b in opponents:
            if b is not None and b is not a and (measure != SPEED or (a.speed and b.speed)):
                labels.append((a.label, b.label))
    return labels


def with_contrasts(
    groups: Sequence[Group], smallest_difference: float = SMALLEST_DIFFERENCE
) -> list[Group]:
    """Return the groups with a contrast (ratio, interval and verdict) for each pair to compare, by
    measure.
    """
    contrasts: dict[Group, dict[str, list[Contrast]]] = {
        group: {name: [] for name in LEVELS} for group in groups
    }
    for measure, level in LEVELS.items():
        estimates = [
            (group, e)
            for group in groups
            for e in estimate(rows(group, measure), pairs(group, measure))
        ]
        # In one call, because Holm's rule corrects for the number of pairs in all groups.
        decided = decide([e for _, e in estimates], smallest_difference, level)
        for (group, _), contrast in zip(estimates, decided, strict=True):
            if group.disturbed:
                contrast = replace(contrast, verdict=NOT_MEASURABLE, blocks_needed=None)
            contrasts[group][measure].append(contrast)
    return [
        replace(group, contrasts=contrasts[group], smallest_difference=smallest_difference)
        for group in groups
    ]


def recommend(group: Group) -> Recommendation:
    """Recommend the fastest configuration of a group, or a simpler one that is not relevantly
    slower.
    """
    if group.disturbed:
        return Recommendation(group, disturbed_sentence(group.runs))
    # Points are sorted by strategy. The sort, which is stable, puts fewer devices first and keeps
    # single, dp, ddp.
    simplest_first = sorted(group.points, key=lambda point: (point.nodes, point.devices))
    chosen = choose(
        rows(group, SPEED), [point.label for point in simplest_first], group.smallest_difference
    )
    if chosen is None:
        return Recommendation(group, "No finished run here has images/s to compare yet.")
    label, contrast, others = chosen
    point, apart = group.named(label), join_short(others)
    if contrast is None:
        contrast, sentence = _compare_with_single(group, point)
        if apart and contrast is None:
            return Recommendation(
                group,
                f"No verdict: no repeat ran {describe(point)} on the same host as any of these: "
                f"{apart}.",
            )
    else:
        sentence = (
            f"{describe(point)} is the simplest choice at most "
            f"{percent(group.smallest_difference)} slower than the highest estimate: it runs at "
            f"{times(contrast)} the speed of "
            f"{describe(group.named(contrast.b))}{interval_text(contrast)}."
        )
    if apart:
        sentence += f" Not compared, because no repeat ran them on the same host: {apart}."
    return Recommendation(group, sentence, command(point.runs[0]), point.label, contrast)


def _compare_with_single(group: Group, point: MeasuredPoint) -> tuple[Contrast | None, str]:
    """Return the contrast between strategy single and `point`, or its best rival if `point` is
    single, and a sentence.
    """
    assert point.speed is not None
    if point is group.single:
        against = [c for p in group.points if (c := group.over_single(p)) and c.ratio is not None]
        if not against:
            return (
                None,
                f"{describe(point)}: {with_range(point.speed)} images/s. There is nothing to "
                "compare it with.",
            )
        # Prefer several devices to other settings of one device, because the question is if more
        # devices pay.
        second = max(
            against, key=lambda contrast: (group.named(contrast.a).devices > 1, contrast.ratio or 0)
        )
        other = group.named(second.a)
        gain = {1: "from another setting", 2: "from a second device"}.get(
            other.devices, "from more devices"
        )
        ratio = f"runs at {times(second)} the speed of {describe(point)}{interval_text(second)}"
        return second, f"No gain {gain} here: {describe(other)} {ratio}."
    contrast = group.over_single(point)
    if contrast is None or contrast.ratio is None:
        return None, (
            f"{describe(point)} has the highest estimate, {with_range(point.speed)} images/s. To "
            "compare it with one device, add parallel=single parallel.devices=1 to the sweep."
        )
    sentence = f"{describe(point)} is {times(contrast)} as fast as single{interval_text(contrast)}."
    if contrast.verdict != SUPPORTED:
        sentence += f" The claim that it is faster is {verdict_text(contrast)}."
    return contrast, sentence + _second_device(group, point)


def _second_device(group: Group, point: MeasuredPoint) -> str:
    """Return a sentence on the gain from a second device. It is empty if `point` has two, or if the
    gain is unknown.
    """
    pairs = [
        (p, c)
        for p in group.points
        if p.devices == 2 and (c := group.over_single(p)) and c.ratio is not None
    ]
    if point.devices == 2 or not pairs:
        return ""
    other, contrast = max(pairs, key=lambda pair: pair[1].ratio or 0)
    answers = {SUPPORTED: "A second device pays", NOT_SUPPORTED: "A second device does not pay"}
    answer = answers.get(contrast.verdict, "Inconclusive for a second device")
    return (
        f" {answer}: {describe(other)} runs at {times(contrast)} the speed of "
        f"single{interval_text(contrast)}."
    )


def describe(point: MeasuredPoint) -> str:
    if point.strategy == "single" and not point.options:
        return "single"
    text = f"{point.strategy} on {plural(point.devices, 'device')}"
    if point.nodes > 1:
        text += f" of {point.nodes} nodes"
    if point.options:
        text += f" with {point.options}"
    return text

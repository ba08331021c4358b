"""Verdict on a change of the code: better, worse, or no difference shown. Runs of the code before
the change (base) and after it (head) have the same seeds. All functions are pure.

A test that is repeated often enough finds a difference by chance. So all verdicts on one base share
the level LEVEL. Verdict number k may be wrong with a chance of LEVEL / (k (k + 1)), which sums to
LEVEL over all k. This is alpha spending (Foster and Stine, 2008; Tian and Ramdas, 2021), which is
Bonferroni's correction for an unknown number of tests. It holds for dependent verdicts too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from timm_parallel.lab.analysis.groups import Group, with_contrasts
from timm_parallel.lab.analysis.runs import IMAGES_PER_SECOND, RunRecord, parse_overrides
from timm_parallel.lab.analysis.settings import setting_groups
from timm_parallel.lab.analysis.statistics import (
    LEVEL,
    NOT_MEASURABLE,
    SMALLEST_DIFFERENCE,
    Contrast,
    decide,
    estimate,
    summarize,
)
from timm_parallel.lab.analysis.wording import (
    DASH,
    difference_text,
    effect_text,
    figure,
    interval_text,
    join_short,
    level_text,
    percent,
    size_text,
    times,
    value_text,
    with_range,
)
from timm_parallel.machine.text import plural
from timm_parallel.record.jobs import UNFINISHED, Job

# Name and values of the only setting in which the jobs of a verdict differ: the version of the
# code.
CODE, BASE, HEAD = "code", "base", "head"
# Measures by which a verdict compares two versions of the code.
METRIC, SPEED = "metric", "speed"
BETTER, WORSE, NO_DIFFERENCE = "better", "worse", "no difference shown"
FAILED, REFUSED, UNKNOWN = "failed", "refused", "no verdict yet"
# Share of a verdict's level that the deciding measure gets. The other measure gets the rest.
DECIDING_SHARE = 0.8
# Keys of result.json that state how much a run computed -> their names in a report.
COMPUTE = {
    "parameters": "parameters",
    "steps": "steps",
    "samples_seen": "images seen",
    "flops_per_step": "FLOPs per step",
}


@dataclass(frozen=True)
class Record:
    """Base, head and number of a verdict, as written to `verdict.json` in the sweep folder."""

    # Name and commit of the code before the change, such as `main (0123abc)`.
    base: str
    head: str
    # Number of the verdict among all verdicts on the same base, from 1.
    number: int
    # The measure that decides a verdict: metric or speed.
    on: str = METRIC
    overrides: list[str] = field(default_factory=list)
    # Sentences on differences between base and head that a reader of the report must know.
    notes: list[str] = field(default_factory=list)
    format: int = 1

    @property
    def level(self) -> float:
        """Chance that any statement of this verdict is false."""
        return LEVEL / (self.number * (self.number + 1))

    def level_of(self, measure: str) -> float:
        """Return the chance that the statement of this verdict on one measure, metric or speed, is
        false.
        """
        return self.level * (DECIDING_SHARE if measure == self.on else 1 - DECIDING_SHARE)


@dataclass(frozen=True)
class Verdict:
    """Result of the comparison of two versions of the code, base (before a change) and head (after
    it).
    """

    word: str
    sentence: str
    # Sentences that a reader must know to rely on the verdict.
    notes: tuple[str, ...]
    # Table of the results with a row per measure: column -> text.
    rows: list[dict[str, str]]
    # Measure -> comparison of head with base.
    contrasts: Mapping[str, Contrast]
    groups: list[Group]


def judge(
    runs: Sequence[RunRecord], record: Record, smallest: float = SMALLEST_DIFFERENCE
) -> Verdict:
    """Decide if the runs of head, the changed code, are better than those of base. `smallest`:
    relative difference below which a difference does not matter.
    """
    groups = with_contrasts(setting_groups(runs), smallest, {"": record.level_of(METRIC)})
    # Disturbed runs count too. Both versions use equally many devices, so that other load slows
    # both alike.
    timed = [
        (code_of(run), run.block, run.measure("images_per_sec") or 0.0)
        for run in runs
        if _has_speed(run)
    ]
    [contrast] = decide(estimate(timed, [(HEAD, BASE)]), smallest, record.level_of(SPEED))
    contrasts = {SPEED: contrast}
    if groups and groups[0].contrasts:
        contrasts[METRIC] = groups[0].contrasts[0]
    word, sentence = _answer(runs, record, contrasts, groups)
    notes = [*record.notes, *_compute(runs), _share(record)]
    crowded = sum(bool(run.neighbours) for run in runs)
    flagged = sum(bool(run.flags) for run in runs)
    if contrast.effect is None and crowded:
        notes.append(
            f"images/s is not compared: {crowded} of {len(runs)} runs were next to other jobs."
        )
    elif contrast.effect is not None and flagged:
        notes.append(
            f"images/s is that of a busy machine: {flagged} of {len(runs)} runs had other load, "
            "which widens its interval."
        )
    return Verdict(
        word,
        sentence,
        tuple(notes),
        rows=_rows(runs, record, contrasts, groups),
        contrasts=contrasts,
        groups=groups,
    )


def refusal(runs: Iterable[RunRecord]) -> str:
    """Return the reason why base and head cannot be compared: their runs trained or evaluated on
    different images. The text is empty if they can be compared.
    """
    for base, head in pairs(runs):
        split = base.metric.partition("/")[0]
        keys = [key for key in {**base.result, **head.result} if key.startswith("data.")]
        for key in (*keys, f"{split}.samples"):
            old, new = base.result.get(key), head.result.get(key)
            if old != new:
                return (
                    f"{key} of result.json is {old} in base and {new} in head; a verdict needs the "
                    "same images in both: commit the change of the data, and use it as base"
                )
    return ""


def pairs(runs: Iterable[RunRecord]) -> list[tuple[RunRecord, RunRecord]]:
    """Return (run of base, run of head) for each repeat in which both have finished."""
    ended = {(code_of(run), run.block): run for run in runs if run.comparable}
    blocks = [block for code, block in ended if code == BASE and (HEAD, block) in ended]
    return [(ended[BASE, block], ended[HEAD, block]) for block in blocks]


def _has_speed(run: RunRecord) -> bool:
    """Return True if a run has finished and its measured speed can be compared: it ran without
    concurrent jobs of the verdict, and on devices that are not simulated.
    """
    is_measured = run.comparable and bool(run.measure("images_per_sec"))
    return is_measured and not run.neighbours and not run.is_simulated


def code_of(run: RunRecord | Job) -> str:
    """Return the version of the code that a run belongs to: base or head."""
    return parse_overrides(run.overrides)[CODE]


def _answer(
    runs: Sequence[RunRecord],
    record: Record,
    contrasts: Mapping[str, Contrast],
    groups: Sequence[Group],
) -> tuple[str, str]:
    """Return the verdict in one word, and the sentence that states it."""
    if reason := refusal(runs):
        return REFUSED, f"Refused: {reason}."
    waiting = sum(run.status in UNFINISHED for run in runs)
    if waiting:
        return UNKNOWN, f"No verdict yet: {waiting} of {len(runs)} jobs have not ended."
    broken = [f"{run.name}: {run.reason}" for run in runs if run.status == "failed"]
    if broken:
        return FAILED, f"No verdict: {len(broken)} of {len(runs)} jobs failed ({broken[0]})."
    lost, of_base = _lost_alone(runs, HEAD), _lost_alone(runs, BASE)
    if lost and not of_base:
        names = join_short(f"seed {run.seed} ({run.status.replace('_', ' ')})" for run in lost)
        return WORSE, f"Head is worse than base: it has no value where base has one, with {names}."
    contrast, level = contrasts.get(record.on), record.level_of(record.on)
    if contrast is None or contrast.effect is None:
        why = "no images/s without other jobs" if record.on == SPEED else "no metric"
        return NO_DIFFERENCE, f"No difference shown: there is {why} of both versions."
    word = _word(contrast)
    name = IMAGES_PER_SECOND if record.on == SPEED else groups[0].metric
    told = f"{name} is {_difference(contrast, level)}, from {plural(contrast.n, 'seed')}"
    if word != NO_DIFFERENCE:
        return word, f"Head is {word} than base: {told}."
    return word, f"No difference shown: {told}. {_what_would_decide(contrast)}"


def _word(contrast: Contrast) -> str:
    """Return better or worse if the confidence interval excludes equality, else no difference
    shown.
    """
    scale = contrast.scale
    least, most = sorted(scale.sign * (end - scale.none) for end in contrast.interval)
    if most < 0:
        return WORSE
    return BETTER if least > 0 and contrast.verdict != NOT_MEASURABLE else NO_DIFFERENCE


def _difference(contrast: Contrast, level: float) -> str:
    """Format the difference of head, the changed code, from base, for example `1.2 points higher
    (98 % interval 0.4 to 2.0)`.
    """
    interval = f"{level_text(level)} interval "
    if contrast.scale.is_ratio:
        return f"{times(contrast)} that of base{interval_text(contrast, interval)}"
    if contrast.effect == 0:
        return "equal on average"
    return difference_text(contrast, level=interval)


def _what_would_decide(contrast: Contrast) -> str:
    if contrast.detectable is None:
        return "The noise is unknown, because no two seeds have values of both versions."
    text = f"These could have shown {size_text(contrast.scale, contrast.detectable)}"
    return text + (f"; about {n} would decide." if (n := contrast.blocks_needed) else ".")


def _lost_alone(runs: Sequence[RunRecord], code: str) -> list[RunRecord]:
    """Return the runs of one version that ran out of memory or had a value that is not finite,
    while the other version finished the same repeat.

    `code`: the version whose runs are returned, base or head.
    """
    ended = {
        run.block for run in runs if run.comparable and not run.is_lost and code_of(run) != code
    }
    return [r for r in runs if r.lost_by_settings and code_of(r) == code and r.block in ended]


def _compute(runs: Sequence[RunRecord]) -> list[str]:
    """Return a sentence for each measure of computing in which base and head differ. Better results
    may come from more computing.
    """
    notes = []
    for key, name in COMPUTE.items():
        known = [
            (old, new)
            for base, head in pairs(runs)
            if (old := base.number(key)) is not None and (new := head.number(key)) is not None
        ]
        if any(old != new for old, new in known):
            old, new = (median(column) for column in zip(*known, strict=True))
            notes.append(f"Not equal: {new:,.0f} {name} in head, {old:,.0f} in base.")
    return notes


def _share(record: Record) -> str:
    return (
        f"This is verdict {record.number} on this base: its level is {100 * record.level:.2g} % of "
        f"the {percent(LEVEL)} for all verdicts on it, {percent(DECIDING_SHARE)} of that for "
        f"{record.on}."
    )


def _rows(
    runs: Sequence[RunRecord],
    record: Record,
    contrasts: Mapping[str, Contrast],
    groups: Sequence[Group],
) -> list[dict[str, str]]:
    """Return the rows of the table of a verdict on a code change: metric, images/s and memory of
    base and head.
    """
    of = [[r for r in runs if r.comparable and code_of(r) == code] for code in (BASE, HEAD)]
    speeds = [summarize(run.measure("images_per_sec") for run in of_code) for of_code in of]
    peaks = [summarize(max(run.peak_bytes, default=None) for run in of_code) for of_code in of]
    rows = []
    if METRIC in contrasts:
        scale = groups[0].scale
        means = [value_text(scale, groups[0].named(f"{CODE}={code}").mean) for code in (BASE, HEAD)]
        rows.append(_row(groups[0].metric, means, contrasts[METRIC], record.level_of(METRIC)))
    texts = [with_range(speed) if speed else DASH for speed in speeds]
    rows.append(_row(IMAGES_PER_SECOND, texts, contrasts[SPEED], record.level_of(SPEED)))
    texts = [figure(peak.median / 2**20) if peak else DASH for peak in peaks]
    ratio = f"{peaks[1].median / peaks[0].median:.2f} ×" if peaks[0] and peaks[1] else DASH
    return [
        *rows,
        {**dict.fromkeys(rows[0], DASH), **_row("memory, MiB", texts), "difference": ratio},
    ]


def _row(
    name: str, texts: Sequence[str], contrast: Contrast | None = None, level: float = LEVEL
) -> dict[str, str]:
    """Return one row of the table of a verdict on a code change. Without a comparison, it has only
    the values of base and head.
    """
    row = {"measure": name, BASE: texts[0], HEAD: texts[1], "difference": effect_text(contrast)}
    if contrast is None:
        return row
    unit = " points" if contrast.scale.is_proportion and contrast.effect is not None else ""
    least = contrast.detectable
    return {
        **row,
        "difference": effect_text(contrast) + unit,
        "interval": level_text(level),
        "verdict": "not measured" if contrast.effect is None else _word(contrast),
        "could have shown": DASH if least is None else size_text(contrast.scale, least),
        "seeds to decide": str(contrast.blocks_needed or DASH),
    }

"""Verdict on a change of the code: better, worse, or no difference shown, from runs of the code
before (base) and after it (head) with the same seeds. Pure functions.

A question that is asked again and again finds something in the end. So all verdicts on one base
share LEVEL: verdict number k may be wrong with a chance of LEVEL / (k (k + 1)), which sums to LEVEL
over all k. This is alpha spending (Foster and Stine, 2008; Tian and Ramdas, 2021), Bonferroni's
correction for a number of tests that nobody knows. It holds for dependent verdicts too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from timm_parallel.lab.analysis.questions import with_contrasts
from timm_parallel.lab.analysis.runs import IMAGES_PER_SECOND, RunRecord, parse_overrides
from timm_parallel.lab.analysis.settings import SettingGroup, setting_groups
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
from timm_parallel.record.jobs import UNFINISHED

CODE, BASE, HEAD = "code", "base", "head"  # the swept key and its values
METRIC, SPEED = "metric", "speed"  # measures that are tested
BETTER, WORSE, NO_DIFFERENCE = "better", "worse", "no difference shown"
FAILED, REFUSED, UNKNOWN = "failed", "refused", "no verdict yet"
# Of a verdict's level, the share of the measure that decides. The other one has the rest.
DECIDING_SHARE = 0.8
# Keys of result.json that say how much was computed.
COMPUTE = {
    "parameters": "parameters",
    "steps": "steps",
    "samples_seen": "images seen",
    "flops_per_step": "FLOPs per step",
}


@dataclass(frozen=True)
class Record:
    """Base, head and number of a verdict: `verdict.json` in the sweep folder."""

    base: str  # e.g. `main (0123abc)`
    head: str
    number: int  # of the verdicts on this base, from 1
    on: str = METRIC  # the measure that decides
    overrides: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # on the code
    format: int = 1

    @property
    def level(self) -> float:
        """Chance of a false statement of this verdict."""
        return LEVEL / (self.number * (self.number + 1))

    def level_of(self, measure: str) -> float:
        """Return the chance of a false statement on `measure`."""
        return self.level * (DECIDING_SHARE if measure == self.on else 1 - DECIDING_SHARE)


@dataclass(frozen=True)
class Verdict:
    """Answer to the question if head is better than base."""

    word: str
    sentence: str
    notes: tuple[str, ...]  # what a reader must know to rely on the sentence
    rows: list[dict[str, str]]  # of the table, a row per measure
    contrasts: Mapping[str, Contrast]  # by measure
    groups: list[SettingGroup]


def judge(
    runs: Sequence[RunRecord], record: Record, smallest: float = SMALLEST_DIFFERENCE
) -> Verdict:
    """Return the verdict on the runs of base and head. `smallest`: difference of interest."""
    groups = with_contrasts(setting_groups(runs), smallest, {"": record.level_of(METRIC)})
    timed = [
        (code_of(run), run.block, run.measure("images_per_sec") or 0.0) for run in _timed(runs)
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
    rows = _rows(runs, record, contrasts, groups)
    return Verdict(word, sentence, tuple(notes), rows, contrasts, groups)


def refusal(runs: Iterable[RunRecord]) -> str:
    """Return the reason why the versions cannot be compared, because they trained or were evaluated
    on different images; empty if they can.
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
    """Return the finished runs of base and head in the same block."""
    ended = {(code_of(run), run.block): run for run in runs if run.comparable}
    blocks = [block for code, block in ended if code == BASE and (HEAD, block) in ended]
    return [(ended[BASE, block], ended[HEAD, block]) for block in blocks]


def code_of(run: RunRecord) -> str:
    """Return the version that a run is of: base or head."""
    return parse_overrides(run.overrides)[CODE]


def _answer(
    runs: Sequence[RunRecord],
    record: Record,
    contrasts: Mapping[str, Contrast],
    groups: Sequence[SettingGroup],
) -> tuple[str, str]:
    """Return the word and the sentence of a verdict."""
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
    """Return better or worse if the interval excludes equality."""
    scale = contrast.scale
    least, most = sorted(scale.sign * (end - scale.none) for end in contrast.interval)
    if most < 0:
        return WORSE
    return BETTER if least > 0 and contrast.verdict != NOT_MEASURABLE else NO_DIFFERENCE


def _difference(contrast: Contrast, level: float) -> str:
    """Format a difference, e.g. `1.2 points higher (98 % interval 0.4 to 2.0)`."""
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
    """Return the runs of a version that its code ended (not finite, out of memory), in blocks in
    which the other version has a value.
    """
    ended = {
        run.block for run in runs if run.comparable and not run.is_lost and code_of(run) != code
    }
    return [r for r in runs if r.lost_by_settings and code_of(r) == code and r.block in ended]


def _compute(runs: Sequence[RunRecord]) -> list[str]:
    """Return a sentence per measure of compute that differs, because better may mean more."""
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


def _timed(runs: Sequence[RunRecord]) -> list[RunRecord]:
    """Return the runs whose images/s can be compared. Disturbed ones can: unlike two strategies,
    the versions need equally many devices, so other load slows both alike.
    """
    return [
        run
        for run in runs
        if run.comparable
        and run.measure("images_per_sec")
        and not run.neighbours
        and not run.is_simulated
    ]


def _rows(
    runs: Sequence[RunRecord],
    record: Record,
    contrasts: Mapping[str, Contrast],
    groups: Sequence[SettingGroup],
) -> list[dict[str, str]]:
    """Return the rows of the table: metric, images/s and memory of base and head."""
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
    """Return a row of the table; without a contrast, only the values of base and head."""
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

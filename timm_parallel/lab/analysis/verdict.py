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

from timm_parallel.lab.analysis.findings import Finding, finding
from timm_parallel.lab.analysis.groups import SPEED as IMAGES_PER_SEC
from timm_parallel.lab.analysis.groups import Group, with_contrasts
from timm_parallel.lab.analysis.runs import IMAGES_PER_SECOND, RunRecord, parse_overrides
from timm_parallel.lab.analysis.settings import setting_groups
from timm_parallel.lab.analysis.statistics import (
    LEVEL,
    NOT_MEASURABLE,
    SMALLEST_DIFFERENCE,
    Contrast,
    Summary,
    decide,
    estimate,
    summarize,
)
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
# Keys of result.json that state how much a run computed.
COMPUTE = ("parameters", "steps", "samples_seen", "flops_per_step")


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
    record: Record
    # The first says why the verdict is what it is.
    findings: tuple[Finding, ...]
    # Findings that a reader must know to rely on the verdict.
    notes: tuple[Finding, ...]
    # Measure -> comparison of head with base.
    contrasts: Mapping[str, Contrast]
    groups: list[Group]
    # Images/s and peak memory in bytes of base and head.
    speeds: tuple[Summary | None, Summary | None]
    peaks: tuple[Summary | None, Summary | None]


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
        (code_of(run), run.block, run.measure(IMAGES_PER_SEC) or 0.0)
        for run in runs
        if _has_speed(run)
    ]
    [contrast] = decide(estimate(timed, [(HEAD, BASE)]), smallest, record.level_of(SPEED))
    contrasts = {SPEED: contrast}
    if groups and groups[0].contrasts:
        contrasts[METRIC] = groups[0].contrasts[0]
    word, findings = _answer(runs, record, contrasts, groups)
    old, new = ([r for r in runs if r.comparable and code_of(r) == code] for code in (BASE, HEAD))
    return Verdict(
        word,
        record,
        findings,
        tuple(_notes(runs, record, contrast)),
        contrasts,
        groups,
        speeds=(_speed(old), _speed(new)),
        peaks=(_peak(old), _peak(new)),
    )


def _speed(runs: Sequence[RunRecord]) -> Summary | None:
    return summarize(run.measure(IMAGES_PER_SEC) for run in runs)


def _peak(runs: Sequence[RunRecord]) -> Summary | None:
    return summarize(max(run.peak_bytes, default=None) for run in runs)


def _notes(runs: Sequence[RunRecord], record: Record, speed: Contrast) -> Iterable[Finding]:
    yield from (finding("noted", text=text) for text in record.notes)
    yield from _not_equal(runs)
    yield finding(
        "level_of_verdict",
        number=record.number,
        level=record.level,
        of=LEVEL,
        share=DECIDING_SHARE,
        measure=record.on,
    )
    crowded = sum(bool(run.neighbours) for run in runs)
    flagged = sum(bool(run.flags) for run in runs)
    if speed.effect is None and crowded:
        yield finding("speed_next_to_jobs", count=crowded, runs=len(runs))
    elif speed.effect is not None and flagged:
        yield finding("speed_on_busy_machine", count=flagged, runs=len(runs))


def refusal(runs: Iterable[RunRecord]) -> Finding | None:
    """Return the reason why base and head cannot be compared: their runs trained or evaluated on
    different images. Return None if they can be compared.
    """
    for base, head in pairs(runs):
        split = base.metric.partition("/")[0]
        keys = [key for key in {**base.result, **head.result} if key.startswith("data.")]
        for key in (*keys, f"{split}.samples"):
            old, new = base.result.get(key), head.result.get(key)
            if old != new:
                return finding("refused", key=key, base=old, head=new)
    return None


def pairs(runs: Iterable[RunRecord]) -> list[tuple[RunRecord, RunRecord]]:
    """Return (run of base, run of head) for each repeat in which both have finished."""
    ended = {(code_of(run), run.block): run for run in runs if run.comparable}
    blocks = [block for code, block in ended if code == BASE and (HEAD, block) in ended]
    return [(ended[BASE, block], ended[HEAD, block]) for block in blocks]


def _has_speed(run: RunRecord) -> bool:
    """Return True if a run has finished and its measured speed can be compared: it ran without
    concurrent jobs of the verdict, and on devices that are not simulated.
    """
    is_measured = run.comparable and bool(run.measure(IMAGES_PER_SEC))
    return is_measured and not run.neighbours and not run.is_simulated


def code_of(run: RunRecord | Job) -> str:
    """Return the version of the code that a run belongs to: base or head."""
    return parse_overrides(run.overrides)[CODE]


def _answer(
    runs: Sequence[RunRecord],
    record: Record,
    contrasts: Mapping[str, Contrast],
    groups: Sequence[Group],
) -> tuple[str, tuple[Finding, ...]]:
    """Return the verdict in one word, and the findings that state it."""
    if refused := refusal(runs):
        return REFUSED, (refused,)
    waiting = sum(run.status in UNFINISHED for run in runs)
    if waiting:
        return UNKNOWN, (finding("not_ended", count=waiting, jobs=len(runs)),)
    broken = [run for run in runs if run.status == "failed"]
    if broken:
        first = {"run": broken[0].name, "reason": broken[0].reason}
        return FAILED, (finding("failed", count=len(broken), jobs=len(runs), **first),)
    lost, of_base = _lost_alone(runs, HEAD), _lost_alone(runs, BASE)
    if lost and not of_base:
        seeds = [{"seed": run.seed, "status": run.status.replace("_", " ")} for run in lost]
        return WORSE, (finding("loses_runs", runs=seeds),)
    contrast = contrasts.get(record.on)
    if contrast is None or contrast.effect is None:
        return NO_DIFFERENCE, (finding("not_measured", measure=record.on),)
    word = word_of(contrast)
    numbers = {
        "metric": IMAGES_PER_SECOND if record.on == SPEED else groups[0].metric,
        "contrast": contrast.fields,
        "level": record.level_of(record.on),
    }
    if word == NO_DIFFERENCE:
        return word, (finding("no_difference", **numbers),)
    return word, (finding("head_is", word=word, **numbers),)


def word_of(contrast: Contrast) -> str:
    """Return better or worse if the confidence interval excludes equality, else no difference
    shown.
    """
    scale = contrast.scale
    least, most = sorted(scale.sign * (end - scale.none) for end in contrast.interval)
    if most < 0:
        return WORSE
    return BETTER if least > 0 and contrast.verdict != NOT_MEASURABLE else NO_DIFFERENCE


def _lost_alone(runs: Sequence[RunRecord], code: str) -> list[RunRecord]:
    """Return the runs of one version that ran out of memory or had a value that is not finite,
    while the other version finished the same repeat.

    `code`: the version whose runs are returned, base or head.
    """
    ended = {
        run.block for run in runs if run.comparable and not run.is_lost and code_of(run) != code
    }
    return [r for r in runs if r.lost_by_settings and code_of(r) == code and r.block in ended]


def _not_equal(runs: Sequence[RunRecord]) -> Iterable[Finding]:
    """Yield a finding for each measure of computing in which base and head differ. Better results
    may come from more computing.
    """
    for key in COMPUTE:
        known = [
            (old, new)
            for base, head in pairs(runs)
            if (old := base.number(key)) is not None and (new := head.number(key)) is not None
        ]
        if any(old != new for old, new in known):
            old, new = (median(column) for column in zip(*known, strict=True))
            yield finding("not_equal", key=key, base=old, head=new)

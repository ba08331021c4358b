"""Verdict on a change of the code: better, worse, equal, or no difference shown. Runs of the code
before the change (base) and after it (head) have the same seeds. All functions are pure.

Unless the number of seeds is fixed, pairs of runs are added until the test of sequential.py
decides, or is unlikely to.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from timm_parallel.lab.analysis.groups import Configuration, Group, with_contrasts
from timm_parallel.lab.analysis.headline import Finding, finding
from timm_parallel.lab.analysis.runs import IMAGES_PER_SECOND, RunRecord, parse_overrides
from timm_parallel.lab.analysis.sequential import (
    BETTER,
    LEVEL,
    NO_DIFFERENCE,
    WORSE,
    Plan,
)
from timm_parallel.lab.analysis.settings import setting_groups
from timm_parallel.lab.analysis.statistics import (
    SMALLEST_DIFFERENCE,
    Contrast,
    Estimate,
    decide,
    estimate,
)
from timm_parallel.record.result import UNFINISHED, Job

# Name and values of the only setting in which the jobs of a verdict differ: the version of the
# code.
CODE, BASE, HEAD = "code", "base", "head"
# Measures by which a verdict compares two versions of the code.
METRIC, SPEED = "metric", "speed"
FAILED, REFUSED, UNKNOWN = "failed", "refused", "no verdict yet"
# A version is worse if it alone lost its runs in all repeats, or in the first so many of those in
# which one version lost a run. If both lose runs equally often, the chance is 2 % or less.
LOST_ALONE = 6
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
    # Number of repeats. None: as many as the verdict needs, at most `max_repeats`.
    repeats: int | None = None
    max_repeats: int = 12
    # Largest difference between equal versions: in points if the metric is a proportion, else in
    # percent of base. None if equality is not tested.
    smallest: float | None = None
    # True if the verdict was asked for again after it had stopped, so that only the limit ends it.
    persists: bool = False
    # Hash of both versions of the code.
    code: str = ""
    overrides: list[str] = field(default_factory=list)
    # Sentences on differences between base and head that a reader of the report must know.
    notes: list[str] = field(default_factory=list)
    format: int = 2

    @property
    def false_in_100(self) -> int:
        """Number of series with a false verdict, of 100 series of `number` verdicts on equal
        code.
        """
        return round(100 * (1 - (1 - LEVEL) ** self.number))

    @property
    def plan(self) -> Plan:
        return Plan(self.max_repeats, LEVEL, self.smallest, is_fixed=self.repeats is not None)


@dataclass(frozen=True)
class Verdict:
    """Result of the comparison of two versions of the code, base (before a change) and head (after
    it).
    """

    word: str
    record: Record
    # States the verdict.
    finding: Finding
    # Findings that a reader must know to rely on the verdict.
    notes: tuple[Finding, ...]
    # Measure -> comparison of head with base.
    contrasts: Mapping[str, Contrast]
    groups: list[Group]
    # True if another pair of runs may decide.
    is_open: bool
    # The finished runs of base and head.
    versions: tuple[Configuration, Configuration]


def judge(
    runs: Sequence[RunRecord], record: Record, smallest: float = SMALLEST_DIFFERENCE
) -> Verdict:
    """Decide if the runs of head, the changed code, are better than those of base. `smallest`:
    relative difference below which a difference does not matter.
    """
    groups, plan = setting_groups(runs), record.plan
    # Disturbed runs count too. Both versions use equally many devices, so that other load slows
    # both alike. Runs next to other jobs of the verdict do not count.
    timed = [
        (code_of(run), run.block, speed)
        for run in runs
        if run.comparable and not run.neighbours and not run.is_simulated
        if (speed := run.measure("images_per_sec"))
    ]
    estimates = {SPEED: estimate(timed, [(HEAD, BASE)])[0]}
    contrasts = {SPEED: decide([estimates[SPEED]], smallest, plan.level_at(estimates[SPEED].n))[0]}
    if groups and groups[0].pairs[groups[0].metric]:
        groups = [replace(group, level=LEVEL, plan=plan) for group in groups]
        groups = with_contrasts(groups, smallest)
        [estimates[METRIC]] = groups[0].of_pairs(groups[0].metric)
        [contrasts[METRIC]] = groups[0].contrasts
    word, stated, is_open = _answer(runs, record, contrasts, estimates, groups)
    of_base, of_head = (
        tuple(run for run in runs if run.comparable and code_of(run) == code)
        for code in (BASE, HEAD)
    )
    return Verdict(
        word,
        record,
        stated,
        tuple(_notes(runs, record)),
        contrasts,
        groups,
        is_open,
        (Configuration(of_base, BASE), Configuration(of_head, HEAD)),
    )


def _notes(runs: Sequence[RunRecord], record: Record) -> Iterable[Finding]:
    yield from (finding("noted", text=text) for text in record.notes)
    yield from _not_equal(runs)
    yield finding(
        "number_of_verdict",
        number=record.number,
        base=record.base,
        level=LEVEL,
        false_in_100=record.false_in_100,
    )


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


def code_of(run: RunRecord | Job) -> str:
    """Return the version of the code that a run belongs to: base or head."""
    return parse_overrides(run.overrides)[CODE]


def _answer(
    runs: Sequence[RunRecord],
    record: Record,
    contrasts: Mapping[str, Contrast],
    estimates: Mapping[str, Estimate],
    groups: Sequence[Group],
) -> tuple[str, Finding, bool]:
    """Return the verdict in one word, the finding that states it, and True if another pair of runs
    may change it.
    """
    if refused := refusal(runs):
        return REFUSED, refused, False
    waiting = sum(run.status in UNFINISHED for run in runs)
    if waiting:
        return UNKNOWN, finding("not_ended", count=waiting, jobs=len(runs)), False
    broken = [run for run in runs if run.status == "failed"]
    if broken:
        first = {"run": broken[0].name, "reason": broken[0].reason}
        return FAILED, finding("failed", count=len(broken), jobs=len(runs), **first), False
    repeats = len({run.block for run in runs})
    lost = _lost_alone(runs)[:LOST_ALONE]
    codes = {code_of(run) for run in lost}
    if len(codes) == 1 and len(lost) >= min(LOST_ALONE, max(repeats, 3)):
        word = WORSE if HEAD in codes else BETTER
        seeds = [{"seed": run.seed, "status": run.status.replace("_", " ")} for run in lost]
        return word, finding("loses_runs", word=word, code=codes.pop(), runs=seeds), False
    left = 0 if record.repeats is not None else record.max_repeats - repeats
    contrast = contrasts.get(record.on)
    if contrast is None or contrast.effect is None:
        return NO_DIFFERENCE, finding("not_measured", measure=record.on), left > 0
    e = estimates[record.on]
    word = record.plan.answer(e, contrast)
    is_open = word == NO_DIFFERENCE and left > 0
    is_futile = is_open and not record.persists and record.plan.is_futile(e, left)
    head = finding(
        "head_is",
        word=word,
        metric=IMAGES_PER_SECOND if record.on == SPEED else groups[0].metric,
        contrast=contrast.fields,
        level=LEVEL,
        minutes=sum(run.number("seconds.total") or 0.0 for run in runs) / 60,
        smallest=record.smallest,
        is_futile=is_futile,
    )
    return word, head, is_open and not is_futile


def _lost_alone(runs: Sequence[RunRecord]) -> list[RunRecord]:
    """Return the runs that ran out of memory or had a value that is not finite, while the other
    version finished the same repeat, in the order of the repeats.
    """
    ended = {(code_of(run), run.block) for run in runs if run.comparable and not run.is_lost}
    other = {BASE: HEAD, HEAD: BASE}
    lost = [r for r in runs if r.lost_by_settings and (other[code_of(r)], r.block) in ended]
    return sorted(lost, key=lambda run: run.block)


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

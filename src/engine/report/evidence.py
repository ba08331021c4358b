"""What claims are weighed with: the runs and groups of one machine, and the rules that lead from figures to a verdict."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from src.engine.report.comparison import Group, MeasuredPoint
from src.engine.report.measured import RunRecord
from src.engine.report.statistics import FAILS, HOLDS, UNDECIDED, UNMEASURED, Contrast
from src.engine.report.wording import doubt, listing, times


@dataclass(frozen=True)
class Ruling:
    """A verdict on a claim; without a number it is a statement that is wrong whatever a machine measures."""

    verdict: str
    figure: str = ""
    reason: str = ""
    runs: tuple[RunRecord, ...] = ()  # those the figure comes from
    number: int = 0
    text: str = ""

    @property
    def said(self) -> str:
        parts = (self.figure, self.reason) if self.number else (self.reason, self.figure)
        return "; ".join(filter(None, parts))


@dataclass(frozen=True)
class Stated:
    """A contrast, where it was measured, and what it says about a claim."""

    place: str
    group: Group
    a: MeasuredPoint
    b: MeasuredPoint
    contrast: Contrast
    verdict: str


@dataclass(frozen=True)
class Evidence:
    """All runs of one hardware, and their groups with contrasts."""

    groups: Sequence[Group]
    runs: Sequence[RunRecord]

    @property
    def on_cpu(self) -> bool:
        return any(group.accelerator == "cpu" for group in self.groups)

    def finished(self, strategy: str) -> list[RunRecord]:
        """On 2 devices or more."""
        return [r for r in self.runs if r.comparable and r.strategy == strategy and r.devices > 1]

    def refused(self, words: str) -> list[RunRecord]:
        """Runs of dp that were skipped for a reason with these words."""
        return [r for r in self.runs if r.status == "skipped" and r.strategy == "dp" and words in r.reason]

    def points(self, strategy: str) -> list[tuple[Group, MeasuredPoint]]:
        """On 2 devices or more."""
        return [(g, p) for g in self.groups for p in g.points if p.strategy == strategy and p.devices > 1]

    def stated(self, measure: str, strategy: str, over: str) -> list[Stated]:
        """What was tested of `strategy` on 2 devices or more over another, from few devices to many."""
        found = [(g, g.named(c.a), g.named(c.b), c) for g in self.groups for c in g.contrasts.get(measure, ())]
        return [
            Stated(self.place(g, a), g, a, b, c, c.verdict)
            for g, a, b, c in found
            if (a.strategy, b.strategy) == (strategy, over) and a.devices > 1 and c.ratio is not None
        ]

    def place(self, group: Group, point: MeasuredPoint) -> str:
        """Its label, and where there are several groups its group's title."""
        return point.label if len(self.groups) == 1 else f"{point.label} ({group.title})"

    def in_every_run(
        self,
        strategy: str,
        what: str,
        fits: Callable[[RunRecord], bool | None],
        example: Callable[[RunRecord], str] | None = None,
        failed: Sequence[RunRecord] = (),
        figures: str = "",
    ) -> Ruling:
        """Holds if it fits every run of `strategy` that recorded it; what a run counts itself needs no repeats.

        `failed`: runs that ended because it does not fit; `figures`: what is said before the count.
        """
        finished = [(run, fit) for run in self.finished(strategy) if (fit := fits(run)) is not None]
        known = finished + [(run, False) for run in failed]
        if not known:
            what = f"{strategy} on 2 or more devices that recorded this"
            return missing(what, f"parallel={strategy} parallel.devices=2")
        failing = [run.name for run, fit in known if not fit]
        shown = f"{figures}; " if figures else ""
        shown += f"{what}: {len(known) - len(failing)} of {len(known)} runs"
        shown += f" (e.g. {example(finished[0][0])})" if example and finished else ""
        reason = f"not in run {listing(failing, 6)}" if failing else ""
        return Ruling(FAILS if failing else HOLDS, shown, reason, tuple(run for run, _ in known))


def missing(what: str, remedy: str = "parallel=dp,ddp parallel.devices=2") -> Ruling:
    return Ruling(UNMEASURED, reason=f"no finished run of {what} here; add {remedy}")


def weigh(found: Sequence[Stated], what: str, rule: str = "", nothing: Ruling | None = None) -> Ruling:
    """A claim that every contrast must bear out: it fails if one fails, and is undecided if one is.

    `nothing`: the ruling where there is no contrast.
    """
    if not found:
        return nothing or missing("dp and ddp on the same devices in one block")
    verdicts = {stated.verdict for stated in found}
    verdict = next((word for word in (FAILS, UNDECIDED, HOLDS) if word in verdicts), UNMEASURED)
    deciding = [stated for stated in found if stated.verdict == verdict]
    reason = "most runs were disturbed" if verdict == UNMEASURED else ""
    if verdict == FAILS and len(verdicts) > 1:
        reason = f"not for {listing(stated.place for stated in deciding)}"
    elif verdict == UNDECIDED:
        limit = "the interval holds the limit; more blocks would tell"  # one other than 1
        doubts = [doubt(s.contrast) if s.contrast.verdict == UNDECIDED else limit for s in deciding]
        reason = listing(f"{stated.place}: {words}" for stated, words in zip(deciding, doubts, strict=True))
    shown = listing(f"{stated.place}: {times(stated.contrast)} {what}" for stated in found)
    runs = tuple(dict.fromkeys(run for stated in found for run in (*stated.a.runs, *stated.b.runs)))
    return Ruling(verdict, shown, "; ".join(filter(None, (rule, reason))), runs)

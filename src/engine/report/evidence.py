"""What the claims are weighed with: the runs and groups of one hardware, and the rules from figures to a verdict."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from src.engine.report.comparison import Group, Point
from src.engine.report.measured import Run
from src.engine.report.statistics import FAILS, HOLDS, UNDECIDED, UNMEASURED, Contrast
from src.engine.report.wording import doubt, listing, times


@dataclass(frozen=True)
class Finding:
    verdict: str
    figure: str = "—"
    reason: str = ""
    runs: tuple[Run, ...] = ()  # those the figure comes from


@dataclass(frozen=True)
class Stated:
    """A contrast in words: where it was measured, what it says, and whether it may."""

    place: str
    group: Group
    a: Point
    b: Point
    contrast: Contrast


@dataclass(frozen=True)
class Evidence:
    """All runs of one hardware, and their groups with contrasts."""

    groups: Sequence[Group]
    runs: Sequence[Run]

    @property
    def on_cpu(self) -> bool:
        return any(group.accelerator == "cpu" for group in self.groups)

    def finished(self, strategy: str, least_devices: int = 1) -> list[Run]:
        return [r for r in self.runs if r.comparable and r.strategy == strategy and r.devices >= least_devices]

    def refused(self, strategy: str, word: str) -> list[Run]:
        """Skipped for a reason that has `word` in it."""
        return [r for r in self.runs if r.status == "skipped" and r.strategy == strategy and word in r.reason]

    def points(self, strategy: str) -> list[tuple[Group, Point]]:
        """On 2 devices or more."""
        return [(g, p) for g in self.groups for p in g.points if p.strategy == strategy and p.devices > 1]

    def ddp_over_dp(self, measure: str) -> list[Stated]:
        """The contrasts of ddp over dp on the same devices, from few to many of them."""
        return self._stated(measure, [(g, p, g.at("dp", p.devices)) for g, p in self.points("ddp")])

    def over_single(self, strategy: str) -> list[Stated]:
        """Images/s over single's."""
        return self._stated("images_per_sec", [(g, p, g.single) for g, p in self.points(strategy)])

    def _stated(self, measure: str, pairs: list[tuple[Group, Point, Point | None]]) -> list[Stated]:
        found = [(g, a, b, g.contrast(measure, a, b)) for g, a, b in pairs]
        return [Stated(self.place(g, a), g, a, b, c) for g, a, b, c in found if b and c and c.ratio is not None]

    def place(self, group: Group, point: Point) -> str:
        return point.label if len(self.groups) == 1 else f"{point.label} ({group.title})"

    def in_every_run(
        self,
        strategy: str,
        what: str,
        fits: Callable[[Run], bool | None],
        example: Callable[[Run], str] | None = None,
        failed: Sequence[Run] = (),
    ) -> Finding:
        """Holds when it fits every run of `strategy` that recorded it: of what a run counts itself, one run is enough.

        `failed`: runs that ended because it does not fit.
        """
        finished = [(run, fit) for run in self.finished(strategy, 2) if (fit := fits(run)) is not None]
        known = finished + [(run, False) for run in failed]
        if not known:
            return missing(
                f"{strategy} on 2 or more devices that recorded this", f"parallel={strategy} parallel.devices=2"
            )
        failing = [run.name for run, fit in known if not fit]
        shown = f"{what}: {len(known) - len(failing)} of {len(known)} runs"
        shown += f" (e.g. {example(finished[0][0])})" if example and finished else ""
        reason = f"not in {', '.join(failing[:6])}" if failing else ""
        return Finding(FAILS if failing else HOLDS, shown, reason, tuple(run for run, _ in known))


def missing(what: str, remedy: str = "parallel=dp,ddp parallel.devices=2") -> Finding:
    return Finding(UNMEASURED, reason=f"no finished run of {what} here; add {remedy}")


def weigh(
    found: Sequence[Stated],
    what: str,
    rule: str = "",
    verdicts: Sequence[str] | None = None,
    nothing: Finding | None = None,
) -> Finding:
    """Of a claim that each contrast must bear out: fails with one that fails, and is undecided with one that is.

    `verdicts`: of each, where not the contrasts' own; `nothing`: what is said where there is no contrast.
    """
    if not found:
        return nothing or missing("dp and ddp on the same devices")
    words = list(zip(found, verdicts or [s.contrast.verdict for s in found], strict=True))
    runs = tuple(dict.fromkeys(run for stated in found for run in (*stated.a.runs, *stated.b.runs)))
    verdict = next((v for v in (FAILS, UNDECIDED, HOLDS) if v in {word for _, word in words}), UNMEASURED)
    reason = "most runs were disturbed" if verdict == UNMEASURED else ""
    if verdict == FAILS and not all(word == FAILS for _, word in words):
        reason = f"not for {listing(stated.place for stated, word in words if word == FAILS)}"
    elif verdict == UNDECIDED:
        reason = listing(f"{s.place}: {_open(s.contrast)}" for s, word in words if word == UNDECIDED)
    shown = listing(f"{s.place}: {times(s.contrast)} {what}" for s in found)
    return Finding(verdict, shown, "; ".join(filter(None, (rule, reason))), runs)


def _open(contrast: Contrast) -> str:
    """Why a limit other than 1 may be undecided where the contrast itself is not."""
    return doubt(contrast) if contrast.verdict == UNDECIDED else "the interval holds the limit; more blocks would tell"


def gib(point: Point) -> str:
    """Peaks of all devices, first to last."""
    return ", ".join(f"{summary.median / 2**30:.2f}" for summary in point.peak_bytes)

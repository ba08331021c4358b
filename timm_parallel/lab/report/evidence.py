"""Evidence for claims about strategies: the runs on one kind of hardware, and the rules that turn
measurements into a verdict on a claim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from timm_parallel.lab.analysis.findings import finding
from timm_parallel.lab.analysis.groups import Configuration, Group
from timm_parallel.lab.analysis.labels import join_short
from timm_parallel.lab.analysis.runs import RunRecord
from timm_parallel.lab.analysis.statistics import (
    INCONCLUSIVE,
    NOT_MEASURABLE,
    NOT_SUPPORTED,
    SUPPORTED,
    Contrast,
)
from timm_parallel.lab.report.sentences import sentence


@dataclass(frozen=True)
class ClaimResult:
    """Verdict on a claim about strategies. `number` and `text` identify the claim. `runs` are the
    runs that were measured for it.
    """

    verdict: str
    figure: str = ""
    reason: str = ""
    runs: tuple[RunRecord, ...] = ()
    number: int = 0
    text: str = ""

    @property
    def explanation(self) -> str:
        return "; ".join(filter(None, (self.figure, self.reason)))


@dataclass(frozen=True)
class Comparison:
    """Ratio of two configurations, and the verdict on a claim about this ratio."""

    # Name of the first configuration, with the title of its group if there are several groups.
    label: str
    group: Group
    a: Configuration
    b: Configuration
    contrast: Contrast
    verdict: str

    @property
    def doubt(self) -> str:
        if self.contrast.verdict == INCONCLUSIVE:
            return f"{self.label}: {sentence(finding('pair', contrast=self.contrast.fields))}"
        # The ratio is shown to differ from 1, but not from the limit of this claim.
        return (
            f"{self.label}: the interval contains the limit of the claim; more repeats would decide"
        )


@dataclass(frozen=True)
class Evidence:
    """All runs on one kind of hardware, and the groups in which their configurations are compared
    by speed.
    """

    groups: Sequence[Group]
    runs: Sequence[RunRecord]

    @property
    def on_cpu(self) -> bool:
        return any(group.conditions.accelerator == "cpu" for group in self.groups)

    def ran(self, *strategies: str) -> bool:
        """Return True if all `strategies` have a result on 2 devices or more. A skipped job does
        not count.
        """
        return {
            run.strategy
            for run in self.runs
            if run.result and run.status != "skipped" and run.devices > 1
        }.issuperset(strategies)

    def finished(self, strategy: str) -> list[RunRecord]:
        """Return the runs of a strategy on 2 devices or more that have finished and can be
        compared.
        """
        return [
            run
            for run in self.runs
            if run.comparable and run.strategy == strategy and run.devices > 1
        ]

    def points(self, strategy: str) -> list[tuple[Group, Configuration]]:
        return [
            (group, point)
            for group in self.groups
            for point in group.members
            if point.strategy == strategy and point.devices > 1
        ]

    def comparisons(self, measure: str, strategy: str, other: str) -> list[Comparison]:
        """Return the comparisons of two strategies by one measured value.

        `measure`: name of the value, such as `images_per_sec`. `strategy`: the compared strategy,
        on 2 devices or more. `other`: the strategy with which it is compared.
        """
        comparisons = []
        for group in self.groups:
            for contrast in group.by_measure.get(measure, ()):
                a, b = group.named(contrast.a), group.named(contrast.b)
                if (
                    (a.strategy, b.strategy) == (strategy, other)
                    and a.devices > 1
                    and contrast.ratio is not None
                ):
                    comparisons.append(
                        Comparison(self.label(group, a), group, a, b, contrast, contrast.verdict)
                    )
        return comparisons

    def label(self, group: Group, point: Configuration) -> str:
        """Return the label of a configuration. If there are several groups, add the title of its
        group.
        """
        return point.label if len(self.groups) == 1 else f"{point.label} ({group.title})"

    def in_every_run(
        self,
        strategy: str,
        statement: str,
        is_true: Callable[[RunRecord], bool | None],
        failed: Sequence[RunRecord] = (),
        figures: str = "",
    ) -> ClaimResult:
        """Check a statement on each run of `strategy`, and return the verdict. The statement is
        supported unless it is false for a run.

        `is_true`: function that checks the statement on a run. It returns None if the run did not
        record what is needed. `failed`: runs whose failure contradicts the statement.
        """
        answers = {run: is_true(run) for run in self.finished(strategy)} | dict.fromkeys(
            failed, False
        )
        known = {run: answer for run, answer in answers.items() if answer is not None}
        if not known:
            return missing(
                f"{strategy} on 2 or more devices with these records",
                f"parallel={strategy} parallel.devices=2",
            )
        false_in = [run.name for run, answer in known.items() if not answer]
        count = f"{statement}: {len(known) - len(false_in)} of {len(known)} runs"
        figure = "; ".join(filter(None, (figures, count)))
        if false_in:
            return ClaimResult(
                NOT_SUPPORTED, figure, f"not in run {join_short(false_in, 6)}", tuple(known)
            )
        return ClaimResult(SUPPORTED, figure, "", tuple(known))


def missing(runs: str, remedy: str = "parallel=dp,ddp parallel.devices=2") -> ClaimResult:
    return ClaimResult(NOT_MEASURABLE, reason=f"no finished run of {runs} here; add {remedy}")


def evaluate_claim(
    comparisons: Sequence[Comparison],
    unit: str,
    rule: str = "",
    otherwise: ClaimResult | None = None,
) -> ClaimResult:
    """Combine several comparisons into the verdict on a claim. The verdict is "not supported" if
    one of the comparisons has this verdict, else "inconclusive" if one is inconclusive, else
    "supported".

    `unit`: words after each ratio, such as `the images/s of dp`. `rule`: sentence that explains the
    verdict. `otherwise`: result if there are no comparisons.
    """
    if not comparisons:
        return otherwise or missing("dp and ddp on the same devices in one repeat")
    verdicts = {comparison.verdict for comparison in comparisons}
    verdict = next(
        (v for v in (NOT_SUPPORTED, INCONCLUSIVE, SUPPORTED) if v in verdicts), NOT_MEASURABLE
    )
    deciding = [comparison for comparison in comparisons if comparison.verdict == verdict]
    reason = ""
    if verdict == NOT_MEASURABLE:
        reason = "most runs were disturbed"
    elif verdict == NOT_SUPPORTED and len(verdicts) > 1:
        reason = f"not for {join_short(comparison.label for comparison in deciding)}"
    elif verdict == INCONCLUSIVE:
        reason = join_short(comparison.doubt for comparison in deciding)
    figure = join_short(
        sentence(finding("ratio", label=c.label, of=unit, contrast=c.contrast.fields))
        for c in comparisons
    )
    runs = tuple(dict.fromkeys(run for c in comparisons for run in (*c.a.runs, *c.b.runs)))
    return ClaimResult(verdict, figure, "; ".join(filter(None, (rule, reason))), runs)

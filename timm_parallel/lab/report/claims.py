"""Claims of articles about DataParallel (DP) and DistributedDataParallel (DDP), checked with the
runs of one machine. Their texts are in claims.yaml.

Claims 9, 10, 12 to 15 and 17 of the articles cannot fail in this project. They are in
docs/dp_and_ddp.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from timm_parallel.errors import ReplicasDifferError
from timm_parallel.lab.analysis.groups import Configuration, Group, join_short, simplest
from timm_parallel.lab.analysis.headline import finding
from timm_parallel.lab.analysis.runs import RunRecord
from timm_parallel.lab.analysis.statistics import (
    INCONCLUSIVE,
    NOT_MEASURABLE,
    NOT_SUPPORTED,
    SUPPORTED,
    Contrast,
)
from timm_parallel.lab.analysis.strategies import efficiency, same_threads
from timm_parallel.lab.report.sentences import figure, percent, sentence, with_range

# Efficiency that counts as close to linear. The articles call 3.2 × on 4 devices close to linear.
CLOSE_TO_LINEAR = 0.8
# Memory counts as even if the largest peak of a device is at most this many times the mean.
EVEN = 1.1
# Device 0 counts as fuller if its peak memory is at least this many times that of all others.
FULLER = 1.1
# Number of a claim -> its entry of claims.yaml.
CLAIMS: dict[int, dict[str, Any]] = yaml.safe_load(
    Path(__file__).with_name("claims.yaml").read_text(encoding="utf-8")
)["claims"]


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


@dataclass(frozen=True)
class Comparison:
    """Ratio of two configurations, and the verdict on a claim about this ratio."""

    # Name of the first configuration, with the title of its group if there are several groups.
    label: str
    group: Group
    contrast: Contrast
    verdict: str

    @property
    def a(self) -> Configuration:
        return self.group.named(self.contrast.a)

    @property
    def b(self) -> Configuration:
        return self.group.named(self.contrast.b)

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

    def points(self, strategy: str) -> list[tuple[Group, Configuration]]:
        return [
            (group, point)
            for group in self.groups
            for point in group.members
            if point.first.strategy == strategy and point.first.devices > 1
        ]

    def comparisons(self, number: int) -> list[Comparison]:
        """Return the comparisons that a claim is about: those of two strategies by one measured
        value, the first strategy on 2 devices or more.
        """
        claim = CLAIMS[number]
        every = [
            Comparison(self.label(group, contrast.a), group, contrast, contrast.verdict)
            for group in self.groups
            for contrast in group.by_measure.get(claim["measure"], ())
            if contrast.effect is not None
        ]
        return [
            c
            for c in every
            if [c.a.first.strategy, c.b.first.strategy] == claim["strategies"]
            and c.a.first.devices > 1
        ]

    def label(self, group: Group, label: str) -> str:
        """Return the label of a configuration. If there are several groups, add the title of its
        group.
        """
        return label if len(self.groups) == 1 else f"{label} ({group.title})"

    def in_every_run(
        self,
        number: int,
        is_true: Callable[[RunRecord], bool | None],
        failed: Sequence[RunRecord] = (),
        figures: str = "",
        limit: object = "",
    ) -> ClaimResult:
        """Check the statement of a claim on each run of its strategy, and return the verdict. The
        statement is supported unless it is false for a run.

        `is_true`: function that checks the statement on a run. It returns None if the run did not
        record what is needed. `failed`: runs whose failure contradicts the statement. `limit`:
        number in the statement.
        """
        claim = CLAIMS[number]
        [strategy] = claim["strategies"]
        known = {
            run: answer
            for run in self.runs
            if run.comparable and run.strategy == strategy and run.devices > 1
            if (answer := is_true(run)) is not None
        }
        known |= dict.fromkeys(failed, False)
        if not known:
            return missing(claim)
        false_in = [run.name for run, answer in known.items() if not answer]
        statement = claim["statement"].format(limit=limit)
        count = f"{statement}: {len(known) - len(false_in)} of {len(known)} runs"
        return ClaimResult(
            NOT_SUPPORTED if false_in else SUPPORTED,
            "; ".join(filter(None, (figures, count))),
            f"not in run {join_short(false_in, 6)}" if false_in else "",
            tuple(known),
        )


def missing(claim: Mapping[str, Any]) -> ClaimResult:
    """Return the result of a claim for which no finished run has the measurements."""
    reason = f"no finished run of {claim['runs']} here; add {claim['add']}"
    return ClaimResult(NOT_MEASURABLE, reason=reason)


def evaluate_claim(
    comparisons: Sequence[Comparison], number: int, **numbers: object
) -> ClaimResult:
    """Combine several comparisons into the verdict on a claim. The verdict is "not supported" if
    one of the comparisons has this verdict, else "inconclusive" if one is inconclusive, else
    "supported". `numbers`: numbers in the rule of the claim.
    """
    claim = CLAIMS[number]
    if not comparisons:
        return missing(claim)
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
    figures = join_short(
        sentence(finding("ratio", label=c.label, of=claim["of"], contrast=c.contrast.fields))
        for c in comparisons
    )
    runs = tuple(dict.fromkeys(run for c in comparisons for run in (*c.a.runs, *c.b.runs)))
    rule = claim.get("rule", "").format(**numbers)
    return ClaimResult(verdict, figures, "; ".join(filter(None, (rule, reason))), runs)


def ddp_is_faster(e: Evidence) -> ClaimResult:
    """Check the claim that ddp is faster than dp, and that its gain grows with the number of
    devices.
    """
    comparisons = e.comparisons(1)
    result = evaluate_claim(comparisons, 1)
    if result.verdict != SUPPORTED:
        return result
    # For each number of devices, compare only the configuration that sets the fewest options.
    # `comparisons` are in ascending order of the number of devices.
    plain = [c for c in comparisons if c.a is simplest(c.group.members, "ddp", c.a.first.devices)]
    growth = {
        _is_below(of[0].contrast, of[-1].contrast)
        for group in e.groups
        if len(of := [c for c in plain if c.group is group]) > 1
    }
    if growth == {SUPPORTED}:
        return result
    if NOT_SUPPORTED in growth:
        shrinks = "faster, but its lead shrinks with more devices"
        return replace(result, verdict=NOT_SUPPORTED, reason=shrinks)
    return replace(
        result, reason="faster; the figures do not show that its lead grows with the devices"
    )


def _is_below(a: Contrast, b: Contrast) -> str:
    """Return the verdict on the claim that ratio a is smaller than ratio b. The two confidence
    intervals must not overlap.
    """
    if NOT_MEASURABLE in (a.verdict, b.verdict):
        return NOT_MEASURABLE
    if a.interval[1] < b.interval[0]:
        return SUPPORTED
    return NOT_SUPPORTED if a.interval[0] > b.interval[1] else INCONCLUSIVE


def ddp_is_close_to_linear(e: Evidence) -> ClaimResult:
    results = [
        replace(c, verdict=c.contrast.exceeds(CLOSE_TO_LINEAR * c.a.first.devices))
        for c in e.comparisons(2)
        if not c.a.needless_threads and same_threads(c.group, c.a)
    ]
    efficiencies = [
        f"{figure(efficiency(c.group, c.a) or 0)} for {c.label}, {c.a.first.batch[0]} scaling"
        for c in results
    ]
    return evaluate_claim(results, 2, limit=CLOSE_TO_LINEAR, figures=join_short(efficiencies))


def dp_fills_device_0(e: Evidence) -> ClaimResult:
    def is_fullest(run: RunRecord) -> bool | None:
        peaks = run.peak_bytes
        return peaks[0] >= FULLER * max(peaks[1:]) if len(peaks) > 1 else None

    limit = percent(FULLER - 1)
    return e.in_every_run(3, is_fullest, figures=_peaks(e, "dp", "single"), limit=limit)


def ddp_holds_full_replicas(e: Evidence) -> ClaimResult:
    def is_even(run: RunRecord) -> bool | None:
        equal = run.result.get("proof.hashes_equal")
        if equal is None or run.imbalance is None or len(run.peak_bytes) < 2:
            return None
        return bool(equal) and run.imbalance <= EVEN

    return e.in_every_run(4, is_even, figures=_peaks(e, "ddp", "single"), limit=EVEN)


def _peaks(e: Evidence, strategy: str, other: str) -> str:
    """Return the peak memory of a strategy as text, next to that of another one."""
    texts = []
    for group, point in e.points(strategy):
        devices = 1 if other == "single" else point.first.devices
        next_to = simplest(group.members, other, devices)
        of_other = f", {other} {_gib(next_to)}" if next_to and next_to.peak_bytes else ""
        if point.peak_bytes:
            texts.append(f"{e.label(group, point.label)}: {_gib(point)}{of_other}")
    return join_short(texts)


def _gib(point: Configuration) -> str:
    return ", ".join(f"{peak.median / 2**30:.2f}" for peak in point.peak_bytes) + " GiB"


def ddp_uses_the_cores(e: Evidence) -> ClaimResult:
    used = evaluate_claim(e.comparisons(5), 5)
    faster = ddp_is_faster(e).verdict
    if used.verdict == SUPPORTED and faster != SUPPORTED:
        return replace(
            used, verdict=faster, reason=f"{used.reason}; more images/s (claim 1): {faster}"
        )
    return used


def lock_hurts_small_layers(e: Evidence) -> ClaimResult:
    """Check the claim that dp loses more speed on models of many small layers. The ratio of dp to
    single must be lower for deeper models than for the shallowest one.
    """
    with_depth = [c for c in e.comparisons(6) if _depth(c.group)]
    shallowest: dict[tuple[int, str], Comparison] = {}
    results, references = [], []
    for deep in sorted(with_depth, key=lambda c: _depth(c.group)):
        shallow = shallowest.setdefault((deep.a.first.devices, deep.a.first.scaling), deep)
        if _depth(deep.group) > _depth(shallow.group):
            results.append(replace(deep, verdict=_is_below(deep.contrast, shallow.contrast)))
            references.append(
                f"{figure(shallow.contrast.effect or 0)} × at depth {_depth(shallow.group)}"
            )
    return evaluate_claim(results, 6, figures=join_short(references))


def _depth(group: Group) -> int:
    """Return the number of layers of a group's model: `depth` of model.kwargs, or the sum of
    `layers` over its stages. 0 if it is unknown.
    """
    config = group.members[0].runs[0].config
    depth, layers = config.get("model.kwargs.depth"), config.get("model.kwargs.layers")
    if isinstance(layers, list) and all(isinstance(count, int) for count in layers):
        return sum(layers)
    return depth if isinstance(depth, int) else 0


def ddp_hides_communication(e: Evidence) -> ClaimResult:
    """Check the claim that ddp hides a part of its communication time behind the backward pass."""
    figures = [
        f"{e.label(group, point.label)}: {with_range(exposed)} of {with_range(total)} ms exposed"
        for group, point in e.points("ddp")
        if (exposed := point.measure("exposed_ms")) and (total := point.measure("communication_ms"))
    ]

    def is_hidden(run: RunRecord) -> bool | None:
        total, exposed = run.measure("communication_ms"), run.measure("exposed_ms")
        return None if total is None or exposed is None else exposed < total

    return e.in_every_run(7, is_hidden, figures=join_short(figures))


def replicas_stay_equal(e: Evidence) -> ClaimResult:
    """Check the claim that all ranks keep equal parameters. Runs that failed because parameters
    differed count as evidence too.
    """
    name = ReplicasDifferError.__name__
    failed = [run for run in e.runs if run.strategy == "ddp" and run.status == "failed"]
    return e.in_every_run(
        8,
        lambda run: run.result.get("proof.hashes_equal"),
        failed=[run for run in failed if run.result.get("failure.exception") == name],
    )


def fsdp_needs_less_memory(e: Evidence) -> ClaimResult:
    """Check the claim that the peak memory of each device is lower under fsdp than under ddp, on
    equally many devices.
    """
    of_ddp: dict[RunRecord, float] = {}
    for group, point in e.points("fsdp"):
        ddp = simplest(group.members, "ddp", point.first.devices)
        if ddp and ddp.peak_bytes:
            of_ddp |= dict.fromkeys(point.runs, min(peak.low for peak in ddp.peak_bytes))

    def is_less(run: RunRecord) -> bool | None:
        return max(run.peak_bytes) < of_ddp[run] if run in of_ddp and run.peak_bytes else None

    return e.in_every_run(18, is_less, figures=_peaks(e, "fsdp", "ddp"))


# Number of a claim -> the function that checks it. The others only compare two strategies.
_RULES: dict[int, Callable[[Evidence], ClaimResult]] = {
    1: ddp_is_faster,
    2: ddp_is_close_to_linear,
    3: dp_fills_device_0,
    4: ddp_holds_full_replicas,
    5: ddp_uses_the_cores,
    6: lock_hurts_small_layers,
    7: ddp_hides_communication,
    8: replicas_stay_equal,
    18: fsdp_needs_less_memory,
}


def evaluate_claims(e: Evidence) -> list[ClaimResult]:
    """Check every claim about strategies that ran. Claim 18 is about ddp and fsdp, all others about
    dp and ddp.
    """
    results = []
    # A skipped job is no evidence.
    known = [run for run in e.runs if run.result and run.status != "skipped" and run.devices > 1]
    on_cpu = any(group.runs[0].accelerator == "cpu" for group in e.groups)
    for number, claim in CLAIMS.items():
        if not {"ddp", "fsdp" if number == 18 else "dp"} <= {run.strategy for run in known}:
            continue
        if on_cpu and claim["not_on_cpu"]:
            result = ClaimResult(NOT_MEASURABLE, reason=claim["not_on_cpu"])
        elif number in _RULES:
            result = _RULES[number](e)
        else:
            result = evaluate_claim(e.comparisons(number), number)
        results.append(replace(result, number=number, text=claim["text"]))
    return results

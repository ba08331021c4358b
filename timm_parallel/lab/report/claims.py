"""Claims of articles about DataParallel (DP) and DistributedDataParallel (DDP), checked with the
runs of one machine.

Claims 9, 10, 12 to 15 and 17 of the articles cannot fail in this project. They are in
docs/dp_and_ddp.md.
"""

from __future__ import annotations

from dataclasses import replace

from timm_parallel.errors import ReplicasDifferError
from timm_parallel.lab.analysis.groups import SPEED, Configuration, Group
from timm_parallel.lab.analysis.labels import join_short
from timm_parallel.lab.analysis.runs import RunRecord
from timm_parallel.lab.analysis.statistics import (
    INCONCLUSIVE,
    NOT_MEASURABLE,
    NOT_SUPPORTED,
    SUPPORTED,
    Contrast,
)
from timm_parallel.lab.analysis.strategies import efficiency, same_threads
from timm_parallel.lab.report.evidence import (
    ClaimResult,
    Comparison,
    Evidence,
    evaluate_claim,
    missing,
)
from timm_parallel.lab.report.formats import figure, percent, with_range

# Efficiency that counts as close to linear. The articles call 3.2 × on 4 devices close to linear.
CLOSE_TO_LINEAR = 0.8
# Memory counts as even if the largest peak of a device is at most this many times the mean.
EVEN = 1.1
# Device 0 counts as fuller if its peak memory is at least this many times that of all others.
FULLER = 1.1


def ddp_is_faster(e: Evidence) -> ClaimResult:
    """Check the claim that ddp is faster than dp, and that its gain grows with the number of
    devices.
    """
    comparisons = e.comparisons(SPEED, "ddp", "dp")
    result = evaluate_claim(comparisons, "the images/s of dp")
    if result.verdict != SUPPORTED:
        return result
    growth = set()
    for group in e.groups:
        # For each number of devices, keep only the comparison whose configurations set the fewest
        # options. `comparisons` are in ascending order of the number of devices.
        plain = [
            c.contrast
            for c in comparisons
            if c.group is group and c.a is group.at("ddp", c.a.devices)
        ]
        if len(plain) > 1:
            growth.add(_is_below(plain[0], plain[-1]))
    if NOT_SUPPORTED in growth:
        return replace(
            result, verdict=NOT_SUPPORTED, reason="faster, but its lead shrinks with more devices"
        )
    if growth != {SUPPORTED}:
        return replace(
            result, reason="faster; the figures do not show that its lead grows with the devices"
        )
    return result


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
    results, efficiencies = [], []
    for c in e.comparisons(SPEED, "ddp", "single"):
        if not c.a.needless_threads and same_threads(c.group, c.a):
            results.append(replace(c, verdict=c.contrast.exceeds(CLOSE_TO_LINEAR * c.a.devices)))
            share, kind = efficiency(c.group, c.a) or 0, c.group.conditions.kind
            efficiencies.append(f"{figure(share)} for {c.label}, {kind} scaling")
    return evaluate_claim(
        results,
        "the images/s of single",
        rule=f"close to linear is an efficiency of {CLOSE_TO_LINEAR} or more; here "
        f"{join_short(efficiencies)}",
        otherwise=missing(
            "ddp and single with the same threads per device",
            "parallel=single,ddp parallel.devices=1,2",
        ),
    )


def dp_fills_device_0(e: Evidence) -> ClaimResult:
    def is_fullest(run: RunRecord) -> bool | None:
        peaks = run.peak_bytes
        return peaks[0] >= FULLER * max(peaks[1:]) if len(peaks) > 1 else None

    return e.in_every_run(
        "dp",
        f"device 0 above all others by {percent(FULLER - 1)} or more",
        is_fullest,
        figures=_peaks(e, "dp"),
    )


def ddp_holds_full_replicas(e: Evidence) -> ClaimResult:
    def is_even(run: RunRecord) -> bool | None:
        equal = run.result.get("proof.hashes_equal")
        if equal is None or run.imbalance is None or len(run.peak_bytes) < 2:
            return None
        return bool(equal) and run.imbalance <= EVEN

    return e.in_every_run(
        "ddp",
        f"equal parameters on all ranks, and the largest peak at most {EVEN} of the mean",
        is_even,
        figures=_peaks(e, "ddp"),
    )


def _peaks(e: Evidence, strategy: str) -> str:
    texts = []
    for group, point in e.points(strategy):
        if point.peak_bytes:
            text = f"{e.label(group, point)}: {_gib(point)}"
            single = group.at("single", 1)
            if single and single.peak_bytes:
                text += f", single {_gib(single)}"
            texts.append(text)
    return join_short(texts)


def _gib(point: Configuration) -> str:
    return ", ".join(f"{peak.median / 2**30:.2f}" for peak in point.peak_bytes) + " GiB"


def ddp_uses_the_cores(e: Evidence) -> ClaimResult:
    used = evaluate_claim(
        e.comparisons("cpu_seconds", "ddp", "dp"),
        "the CPU seconds per second of dp",
        rule="it must use more processor time and be faster, because waiting in a loop counts as "
        "use",
    )
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
    with_depth = [c for c in e.comparisons(SPEED, "dp", "single") if _depth(c.group)]
    shallowest: dict[tuple[int, str], Comparison] = {}
    results, references = [], []
    for deep in sorted(with_depth, key=lambda c: _depth(c.group)):
        shallow = shallowest.setdefault((deep.a.devices, deep.group.conditions.scaling), deep)
        if _depth(deep.group) > _depth(shallow.group):
            results.append(replace(deep, verdict=_is_below(deep.contrast, shallow.contrast)))
            references.append(
                f"{figure(shallow.contrast.ratio or 0)} × at depth {_depth(shallow.group)}"
            )
    return evaluate_claim(
        results,
        "the images/s of single",
        rule=f"compared with {join_short(references)}; the two intervals must not overlap",
        otherwise=missing(
            "dp on a model of many small layers and on one of few large ones",
            "experiment=small_layers",
        ),
    )


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
    figures = []
    for group, point in e.points("ddp"):
        total, exposed = point.measure("communication_ms"), point.measure("exposed_ms")
        if total and exposed:
            figures.append(
                f"{e.label(group, point)}: {with_range(exposed)} of {with_range(total)} ms exposed"
            )

    def is_hidden(run: RunRecord) -> bool | None:
        total, exposed = run.measure("communication_ms"), run.measure("exposed_ms")
        return None if total is None or exposed is None else exposed < total

    return e.in_every_run(
        "ddp", "part of the communication time hidden", is_hidden, figures=join_short(figures)
    )


def replicas_stay_equal(e: Evidence) -> ClaimResult:
    """Check the claim that all ranks keep equal parameters. Runs that failed because parameters
    differed count as evidence too.
    """
    name = ReplicasDifferError.__name__
    failed = [run for run in e.runs if run.strategy == "ddp" and run.status == "failed"]
    return e.in_every_run(
        "ddp",
        "equal hashes of all parameters over the ranks, at the start and at the end",
        lambda run: run.result.get("proof.hashes_equal"),
        failed=[run for run in failed if run.result.get("failure.exception") == name],
    )


def dp_starts_sooner(e: Evidence) -> ClaimResult:
    return evaluate_claim(
        e.comparisons("first_step_seconds", "ddp", "dp"),
        "the time of dp to the first step",
        rule="here both are one key, parallel=…, so the measure is the time from the command to "
        "the first step",
    )


def devices_idle_under_dp(e: Evidence) -> ClaimResult:
    return evaluate_claim(
        e.comparisons("busy", "ddp", "dp"),
        "as busy as dp",
        rule="utilization of the idlest device, minus ddp's share of waiting in a step, which NVML "
        "counts as use",
        otherwise=missing(
            "dp and ddp on the same devices with their utilization and the parts of ddp's step"
        ),
    )


def fsdp_needs_less_memory(e: Evidence) -> ClaimResult:
    """Check the claim that the peak memory of each device is lower under fsdp than under ddp, on
    equally many devices.
    """
    of_ddp: dict[RunRecord, float] = {}
    figures = []
    for group, point in e.points("fsdp"):
        ddp = group.at("ddp", point.devices)
        if ddp and ddp.peak_bytes and point.peak_bytes:
            of_ddp |= dict.fromkeys(point.runs, min(peak.low for peak in ddp.peak_bytes))
            figures.append(f"{e.label(group, point)}: {_gib(point)}, ddp {_gib(ddp)}")

    def is_less(run: RunRecord) -> bool | None:
        return max(run.peak_bytes) < of_ddp[run] if run in of_ddp and run.peak_bytes else None

    if not figures:
        return missing(
            "ddp and fsdp on the same devices with their memory",
            "parallel=ddp,fsdp parallel.devices=2",
        )
    return e.in_every_run(
        "fsdp", "the largest peak below those of ddp", is_less, figures=join_short(figures)
    )


_THREADS = (
    "dp on CPU is threads of one process: its speed, CPU use and memory say nothing about GPUs"
)
_ONE_MEMORY = (
    "devices on CPU share one memory: the share of each, and the traffic between them, "
    "cannot be measured"
)
_NVIDIA_ONLY = "utilization comes from NVML, which knows NVIDIA devices only"
# Number of a claim, its text, the function that checks it, and the reason if it cannot be measured
# on a CPU.
_CLAIMS = (
    (
        1,
        "DDP is faster than DP on the same devices, more so with more of them",
        ddp_is_faster,
        _THREADS,
    ),
    (2, "DDP's speed-up is close to linear", ddp_is_close_to_linear, ""),
    (3, "DP loads device 0 most; the others hold little", dp_fills_device_0, _THREADS),
    (
        4,
        "Under DDP every device holds a full replica; memory is even",
        ddp_holds_full_replicas,
        _ONE_MEMORY,
    ),
    (
        5,
        "DDP uses the CPU cores better; DP is one process under the GIL",
        ddp_uses_the_cores,
        _THREADS,
    ),
    (
        6,
        "The GIL hurts DP most if a model consists of many small operations",
        lock_hurts_small_layers,
        _THREADS,
    ),
    (
        7,
        "DDP hides part of its communication behind the backward pass",
        ddp_hides_communication,
        _ONE_MEMORY,
    ),
    (8, "Replicas under DDP start equal and stay equal", replicas_stay_equal, ""),
    (11, "DP is one line and starts easily; DDP needs set-up", dp_starts_sooner, ""),
    (16, "Devices idle under DP", devices_idle_under_dp, _NVIDIA_ONLY),
    (18, "FSDP needs less memory per device than DDP", fsdp_needs_less_memory, _ONE_MEMORY),
)


def evaluate_claims(e: Evidence) -> list[ClaimResult]:
    """Check every claim about strategies that ran. Claim 18 is about ddp and fsdp, all others about
    dp and ddp.
    """
    results = []
    for number, text, rule, not_on_cpu in _CLAIMS:
        if not e.ran("ddp", "fsdp" if number == 18 else "dp"):
            continue
        is_hidden = e.on_cpu and not_on_cpu
        result = ClaimResult(NOT_MEASURABLE, reason=not_on_cpu) if is_hidden else rule(e)
        results.append(replace(result, number=number, text=text))
    return results

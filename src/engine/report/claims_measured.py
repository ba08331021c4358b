"""Claims about speed, memory and communication: timed or weighed, so their figures have a spread."""

from __future__ import annotations

from dataclasses import replace

from src.engine.report.comparison import Group, MeasuredPoint
from src.engine.report.decisions import SPEED
from src.engine.report.evidence import Evidence, Ruling, Stated, missing, weigh
from src.engine.report.measured import RunRecord
from src.engine.report.statistics import FAILS, HOLDS, UNDECIDED, UNMEASURED, Contrast
from src.engine.report.wording import figure, listing, percent, with_range

CLOSE_TO_LINEAR = 0.8  # efficiency; the articles call 3.2× on 4 devices close to linear
EVEN = 1.1  # largest peak over the mean of the devices
LINK = "bytes_busiest_link"
FULLER = 1.1  # device 0's peak over the largest of the others


def ddp_is_faster(e: Evidence) -> Ruling:
    """Its lead grows, or shrinks, with the devices where the intervals for fewest and most of a group lie wholly apart."""
    found = e.stated(SPEED, "ddp", "dp")
    ruling = weigh(found, "the images/s of dp")
    if ruling.verdict != HOLDS:
        return ruling
    # From few to many devices, and of several options on as many devices the plainest.
    plain = [[s.contrast for s in found if s.group is g and s.a is g.at("ddp", s.a.devices)] for g in e.groups]
    growth = {_is_below(contrasts[0], contrasts[-1]) for contrasts in plain if len(contrasts) > 1}
    if FAILS in growth:
        return replace(ruling, verdict=FAILS, reason="faster, but its lead shrinks with more devices")
    shown = growth == {HOLDS}
    return ruling if shown else replace(ruling, reason="faster; that the lead grows with the devices is not shown")


def _is_below(a: Contrast, b: Contrast) -> str:
    """The verdict on "ratio a is below ratio b", for which their intervals must lie wholly apart."""
    if UNMEASURED in (a.verdict, b.verdict):
        return UNMEASURED
    return HOLDS if a.interval[1] < b.interval[0] else FAILS if a.interval[0] > b.interval[1] else UNDECIDED


def ddp_is_close_to_linear(e: Evidence) -> Ruling:
    what = "ddp on 2 or more devices beside single on 1, with as many threads per device and no more than cores,"
    nothing = missing(what, "parallel=single,ddp parallel.devices=1,2")
    found = e.stated(SPEED, "ddp", "single")
    fair = [s for s in found if not s.a.needless_threads and s.group.same_threads(s.a)]
    shares = listing(f"{figure(s.group.efficiency(s.a) or 0)} for {s.place}, {s.group.kind} scaling" for s in fair)
    rule = f"close to linear is an efficiency of {CLOSE_TO_LINEAR} or more; here {shares}"
    weighed = [replace(s, verdict=s.contrast.exceeds(CLOSE_TO_LINEAR * s.a.devices)) for s in fair]
    return weigh(weighed, "the images/s of single", rule, nothing)


def dp_fills_device_0(e: Evidence) -> Ruling:
    def first_is_fullest(run: RunRecord) -> bool | None:
        peaks = run.peak_bytes
        return peaks[0] >= FULLER * max(peaks[1:]) if len(peaks) > 1 else None

    what = f"device 0 above all others by {percent(FULLER - 1)} or more"
    return e.in_every_run("dp", what, first_is_fullest, figures=peaks(e, "dp"))


def ddp_holds_full_replicas(e: Evidence) -> Ruling:
    def whole_and_even(run: RunRecord) -> bool | None:
        equal, uneven = run.result.get("proof.hashes_equal"), run.imbalance
        return None if equal is None or uneven is None or len(run.peak_bytes) < 2 else bool(equal) and uneven <= EVEN

    what = f"equal parameters on all ranks, and the largest peak at most {EVEN} of the mean"
    return e.in_every_run("ddp", what, whole_and_even, figures=peaks(e, "ddp"))


def peaks(e: Evidence, strategy: str) -> str:
    """Peak memory of every device, first to last, beside single's."""

    def gib(said: str, point: MeasuredPoint | None) -> str:
        peaks = ", ".join(f"{peak.median / 2**30:.2f}" for peak in point.peak_bytes) if point else ""
        return peaks and f"{said} {peaks} GiB"

    return listing(
        gib(f"{e.place(g, p)}:", p) + gib(", single", g.single) for g, p in e.points(strategy) if p.peak_bytes
    )


def ddp_uses_the_cores(e: Evidence) -> Ruling:
    rule = "it must use more processor time and be faster, because waiting in a loop counts as use"
    used = weigh(e.stated("cpu_seconds", "ddp", "dp"), "the CPU seconds per second of dp", rule)
    faster = ddp_is_faster(e).verdict
    if used.verdict == HOLDS and faster != HOLDS:
        return replace(used, verdict=faster, reason=f"{used.reason}; more images/s (claim 1): {faster}")
    return used


def lock_hurts_small_layers(e: Evidence) -> Ruling:
    """Each deeper model is held against the one of fewest layers on as many devices."""
    known = [(depth, s) for s in e.stated(SPEED, "dp", "single") if (depth := _depth(s.group)) is not None]
    known.sort(key=lambda entry: entry[0])
    fewest: dict[tuple[int, str], tuple[int, Stated]] = {}
    pairs = []
    for depth, stated in known:
        layers, few = fewest.setdefault((stated.a.devices, stated.group.batch_words), (depth, stated))
        if depth > layers:
            pairs.append((stated, few))
    against = listing(f"{figure(few.contrast.ratio or 0)} × at depth {_depth(few.group)}" for _, few in pairs)
    weighed = [replace(many, verdict=_is_below(many.contrast, few.contrast)) for many, few in pairs]
    nothing = missing("dp on a model of many small layers and on one of few large ones", "experiment=small_layers")
    rule = f"against {against}; the two intervals must lie apart"
    return weigh(weighed, "the images/s of single", rule, nothing)


def ddp_moves_less(e: Evidence) -> Ruling:
    """On the busiest link, because dp's device 0 sends and receives for all; and with part of the time hidden."""
    found = [(g, p, p.measure(LINK), dp.measure(LINK)) for g, p in e.points("ddp") if (dp := g.at("dp", p.devices))]
    known = [(g, p, own, dp) for g, p, own, dp in found if own and dp]
    if not known:
        return missing("dp and ddp on the same devices with the bytes over their busiest link")
    least = {run: dp.low for _, p, _, dp in known for run in p.runs}

    def less_and_hidden(run: RunRecord) -> bool | None:
        own, total, exposed = (run.measure(name) for name in (LINK, "communication_ms", "exposed_ms"))
        if own is None or total is None or exposed is None or run not in least:
            return None
        return own < least[run] and exposed < total

    shown = listing(
        f"{e.place(g, p)}: {figure(own.median / 1e6)} MB per step over the busiest link, {figure(dp.median / 1e6)} MB "
        f"under dp; {with_range(exposed, ' ms') if (exposed := p.measure('exposed_ms')) else 'unknown time'} not hidden"
        for g, p, own, dp in known
    )
    return e.in_every_run("ddp", "fewer bytes than dp, part of their time hidden", less_and_hidden, figures=shown)


def devices_idle_under_dp(e: Evidence) -> Ruling:
    nothing = missing("dp and ddp on the same devices with their utilisation and the parts of ddp's step")
    rule = "utilisation of the idlest device, less the share of a step in which ddp waits: NVML counts that as use"
    return weigh(e.stated("busy", "ddp", "dp"), "as busy as dp", rule, nothing)


def _depth(group: Group) -> int | None:
    """Layers of the model, as given to timm in model.kwargs: `depth`, or `layers` of each stage."""
    config = group.points[0].runs[0].config
    depth, layers = config.get("model.kwargs.depth"), config.get("model.kwargs.layers")
    if isinstance(layers, list) and all(isinstance(count, int) for count in layers):
        return sum(layers)
    return depth if isinstance(depth, int) else None

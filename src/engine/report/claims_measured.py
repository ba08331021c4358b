"""Claims about speed, memory and communication: timed or weighed, so their figures have a spread."""

from __future__ import annotations

from src.engine.report.comparison import Group
from src.engine.report.evidence import (
    BOTH,
    FAILS,
    HOLDS,
    THREADS,
    UNMEASURED,
    Evidence,
    Finding,
    gib,
    listing,
    missing,
    runs_of,
    weigh,
)
from src.engine.report.ranges import Order, compare, compare_with, figure, ratio, with_range

CLOSE_TO_LINEAR = 0.8  # efficiency; the articles call 3.2× on 4 devices close to linear
EVEN = 1.1  # largest peak over the mean of the devices
FULLER = 1.1  # device 0's peak over the largest of the others


def ddp_is_faster(e: Evidence) -> Finding:
    if e.on_cpu:
        return Finding(UNMEASURED, "n/a", THREADS)
    found = [(g, e.place(g, n), r) for g, n, dp, ddp in e.pairs() if (r := ratio(ddp.speed, dp.speed))]
    if not found:
        return missing("dp and ddp on the same devices", BOTH)
    verdict, reason = weigh(compare_with(r, 1.0) for *_, r in found)
    if verdict == HOLDS:
        by_group = [[r for other, _, r in found if other is group] for group in e.groups]
        growth = {compare(ratios[-1], ratios[0]) for ratios in by_group if len(ratios) > 1}
        if Order.LOWER in growth:
            verdict, reason = FAILS, "faster, but its lead shrinks with more devices"
        elif growth != {Order.HIGHER}:
            reason = "faster; that the lead grows with the devices is not shown"
    shown = listing(f"{place}: ddp {with_range(r, '×')} the images/s of dp" for _, place, r in found)
    return Finding(verdict, shown, reason, e.pair_runs)


def ddp_is_close_to_linear(e: Evidence) -> Finding:
    found = [(g, p, share) for g, p in e.points("ddp") if (share := g.efficiency(p))]
    if not found:
        return missing("ddp on 2 or more devices beside single on 1", "parallel=single,ddp parallel.devices=1,2")
    fair = [(g, p, share) for g, p, share in found if not p.needless_threads and g.same_threads(p)]
    shown = listing(
        f"{e.place(g, p)}: {figure(up.median)}×, efficiency {with_range(share)}{'' if len(e.groups) > 1 else f', {g.kind} scaling'}"
        for g, p, share in fair or found
        if (up := g.speed_up(p))
    )
    if not fair:
        return Finding(
            UNMEASURED, shown, "all points have more threads than cores, or other threads per device than single"
        )
    verdict, reason = weigh(compare_with(share, CLOSE_TO_LINEAR) for *_, share in fair)
    limit = f"close to linear: efficiency of at least {CLOSE_TO_LINEAR}"
    runs = runs_of(*(p for _, p, _ in fair), *(g.single for g, *_ in fair if g.single))
    return Finding(verdict, shown, f"{limit}; {reason}" if reason else limit, runs)


def dp_fills_device_0(e: Evidence) -> Finding:
    if e.on_cpu:
        return Finding(UNMEASURED, "n/a", THREADS)
    found = [run for run in e.finished("dp", 2) if len(run.peak_bytes) > 1]
    if not found:
        return missing("dp on 2 or more devices with the memory of each", "parallel=dp parallel.devices=2")
    fuller = [run.peak_bytes[0] >= FULLER * max(run.peak_bytes[1:]) for run in found]
    shown = listing(f"{e.place(g, p)}: {gib(p)} GiB on devices 0, 1, …" for g, p in e.points("dp") if p.peak_bytes)
    rule = f"device 0 above all others by {FULLER - 1:.0%} or more in {sum(fuller)} of {len(found)} runs"
    return Finding(HOLDS if all(fuller) else FAILS, shown, rule, tuple(found))


def ddp_holds_full_replicas(e: Evidence) -> Finding:
    found = [run for run in e.finished("ddp", 2) if run.imbalance is not None and len(run.peak_bytes) > 1]
    if not found:
        return missing("ddp on 2 or more devices with the memory of each", "parallel=ddp parallel.devices=2")
    even = [run.imbalance is not None and run.imbalance <= EVEN for run in found]
    equal = [run.proof("hashes_equal") for run in found]
    shown = listing(
        f"{e.place(g, p)}: largest over mean {figure(uneven.median)} ({gib(p)} GiB per device"
        + (f", single {gib(g.single)} GiB)" if g.single and g.single.peak_bytes else ")")
        for g, p in e.points("ddp")
        if (uneven := p.measure("imbalance"))
    )
    rule = f"largest over mean at most {EVEN} in {sum(even)} of {len(found)} runs"
    rule += f"; all parameters equal on all ranks in {equal.count(True)}"
    if not all(even) or False in equal:
        return Finding(FAILS, shown, rule, tuple(found))
    return Finding(UNMEASURED if None in equal else HOLDS, shown, rule, tuple(found))


def ddp_uses_the_cores(e: Evidence) -> Finding:
    if e.on_cpu:
        return Finding(UNMEASURED, "n/a", THREADS)
    found = e.both("cpu_seconds")
    if not found:
        return missing("dp and ddp on the same devices with their CPU time", BOTH)
    verdict, reason = weigh(compare(ddp, dp) for _, dp, ddp in found)
    shown = listing(
        f"{place}: {with_range(dp)} CPU seconds per second under dp, {with_range(ddp)} under ddp"
        for place, dp, ddp in found
    )
    return Finding(verdict, shown, reason, e.pair_runs)


def lock_hurts_small_layers(e: Evidence) -> Finding:
    if e.on_cpu:
        return Finding(UNMEASURED, "n/a", THREADS)
    shares = [
        (depth, (p.devices, g.kind, g.batch), p, share)
        for g, p in e.points("dp")
        if (depth := _depth(g)) is not None and (share := g.efficiency(p))
    ]
    found = [(many, few) for many in shares for few in shares if many[0] > few[0] and many[1] == few[1]]
    if not found:
        return missing("dp on a model of many small layers and on one of few large ones", "experiment=small_layers")
    verdict, reason = weigh(compare(few[3], many[3]) for many, few in found)
    shown = listing(
        f"{many[2].label}: efficiency {with_range(many[3])} at depth {many[0]}, {with_range(few[3])} at depth {few[0]}"
        for many, few in found
    )
    return Finding(verdict, shown, reason, runs_of(*(side[2] for pair in found for side in pair)))


def ddp_moves_less(e: Evidence) -> Finding:
    if e.on_cpu:
        return Finding(UNMEASURED, "n/a", "dp on CPU is threads with one memory: nothing moves between devices")
    found = e.both("bytes_per_step")
    if not found:
        return missing("dp and ddp on the same devices with their bytes per step", BOTH)
    shares = [ratio(p.measure("exposed_ms"), p.measure("communication_ms")) for _, p in e.points("ddp")]
    hidden = min((1 - share.median for share in shares if share), default=None)
    shown = listing(
        f"{place}: {figure(dp.median / 1e6)} MB per step under dp, {figure(ddp.median / 1e6)} MB under ddp"
        for place, dp, ddp in found
    )
    overlap = (
        "overlap not measured" if hidden is None else f"at least {hidden:.0%} of ddp's communication time is hidden"
    )
    holds = all(ddp.high < dp.low for _, dp, ddp in found) and (hidden is None or hidden > 0)
    return Finding(HOLDS if holds else FAILS, shown, overlap, e.pair_runs)


def devices_idle_under_dp(e: Evidence) -> Finding:
    if e.on_cpu:
        return Finding(UNMEASURED, "n/a", "utilisation comes from NVML, which knows NVIDIA devices only")
    found = e.both("least_utilisation")
    if not found:
        return missing("dp and ddp on the same devices with their utilisation", BOTH)
    verdict, reason = weigh(compare(ddp, dp) for _, dp, ddp in found)
    shown = listing(
        f"{place}: idlest device {with_range(dp)} under dp, {with_range(ddp)} under ddp" for place, dp, ddp in found
    )
    return Finding(verdict, shown, reason, e.pair_runs)


def _depth(group: Group) -> int | None:
    """Layers of the model, as given to timm in model.kwargs.depth."""
    depth = group.points[0].runs[0].config.get("model.kwargs.depth")
    return depth if isinstance(depth, int) else None

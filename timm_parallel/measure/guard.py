"""Detect disturbances of a speed measurement.

They are other programs, a hypervisor, too little processor time, heat, and drift of the speed.
"""

from __future__ import annotations

from typing import Any

from timm_parallel.machine import hardware

# Limits beyond which a speed measurement counts as disturbed. In this order: processors that other
# programs use, share of time that a hypervisor takes, share of time that threads get, and relative
# change of the speed.
OTHERS, STEAL, STARVED, DRIFT = 0.25, 0.05, 0.8, 0.1
# The two halves of a run are compared only if it has at least so many timed steps.
FEWEST_STEPS = 20


def guard(
    throughput: dict[str, Any], ranks: list[dict[str, Any]], gpus: list[dict[str, Any]]
) -> dict[str, Any]:
    """Compute the entry `guard` of result.json: processor load, change of speed, and GPU clocks.

    `throughput`: the entry of result.json. `ranks`: host and processor time of each rank. `gpus`:
    state of each GPU.
    """
    first, halves = ranks[0], throughput["halves"]
    wall, own = first["wall"], sum(rank["own"] for rank in ranks if rank["host"] == first["host"])
    shares = [rank["ran"] / (rank["ran"] + rank["queued"]) for rank in ranks if rank["ran"]]
    return {
        "load": max(0.0, first["busy"] - own) / wall if wall else None,
        "own": own / wall if wall else None,
        "cores": hardware.cores(),
        "steal": first["stolen"] / first["all"] if first["all"] else None,
        "cpu_per_thread": min(shares, default=None),
        "halves_ratio": halves[1] / halves[0] if halves[0] and halves[1] else None,
        "temperature": [gpu["celsius"] for gpu in gpus] or None,
        "clocks": [{key: gpu[key] for key in ("sm_mhz", "sm_mhz_max", "slowed_by")} for gpu in gpus]
        or None,
    }


def flags(measured: dict[str, Any], steps_timed: int) -> list[str]:
    """Return the reasons to distrust the measured speed of a run, one short sentence each.

    `measured`: the entry `guard` of result.json. `steps_timed`: number of timed steps.
    """
    load, own, cores, steal, share = (
        measured[key] for key in ("load", "own", "cores", "steal", "cpu_per_thread")
    )
    reasons = []
    is_crowded = load is not None and load >= OTHERS and load + own >= 0.9 * cores
    if is_crowded:
        reasons.append(f"other programs kept {load:.1f} of {cores} processors busy")
    if steal is not None and steal >= STEAL:
        reasons.append(f"the hypervisor gave {steal:.0%} of the processors' time to others")
    # Report no disturbance if the run itself uses all cores, because its threads then wait for each
    # other.
    is_own_load = own is not None and own >= 0.9 * cores and not is_crowded
    if share is not None and share < STARVED and not is_own_load:
        reasons.append(
            f"its threads got {share:.0%} of the processor time that they were ready to use"
        )
    ratio = measured["halves_ratio"]
    if (
        ratio is not None
        and steps_timed >= FEWEST_STEPS
        and not 1 / (1 + DRIFT) <= ratio <= 1 + DRIFT
    ):
        reasons.append(
            f"the second half of its steps ran at {ratio:.2f} times the speed of the first"
        )
    for number, clock in enumerate(measured["clocks"] or []):
        if clock["slowed_by"]:
            reasons.append(f"GPU {number} was slowed down: {', '.join(clock['slowed_by'])}")
    return reasons

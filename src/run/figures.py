"""What the timed steps of a run cost, over all ranks, as result.json has it."""

from __future__ import annotations

import dataclasses
from typing import Any

from src.engine.machine.ranks import host_name
from src.engine.record.guard import flags, guard
from src.engine.record.meter import Meter
from src.run.build import Run


def figures(run: Run) -> dict[str, Any]:
    """Fields of the result. Collective."""
    meter, strategy = run.moments.meter, run.strategy
    seconds = strategy.communication_seconds(run.state.wrapped)
    own = {
        "host": host_name(),
        "device": str(strategy.device),
        "parts": _parts(meter, seconds[1] if seconds else 0.0),
        "usage": dataclasses.asdict(meter.usage),
        "communication": seconds,
    }
    ranks = strategy.gather(own)
    throughput = meter.throughput()
    found = guard(throughput, [rank["usage"] | {"host": rank["host"]} for rank in ranks], strategy.gpu_states())
    wall = ranks[0]["usage"]["wall"]
    return {
        "throughput": throughput,
        "step": ranks[0]["parts"],
        "ranks": [_rank(number, **rank) for number, rank in enumerate(ranks)],
        "cpu": {"seconds_per_second": sum(rank["usage"]["own"] for rank in ranks) / wall if wall else None},
        "data_wait": meter.data_wait(),
        "communication": _communication(run, [rank["communication"] for rank in ranks if rank["communication"]]),
        "guard": found,
        "flags": flags(found, meter.steps_timed),
    }


def _parts(meter: Meter, exposed_seconds: float) -> dict[str, float | None]:
    """Milliseconds of a mean step of this rank; they add up to all of it. None where no step was timed."""
    steps = meter.steps_timed
    if not steps:
        return dict.fromkeys(("data_ms", "compute_ms", "communication_ms", "other_ms"))
    data, other = 1000 * meter.data_seconds / steps, 1000 * meter.other_seconds / steps
    busy = 1000 * meter.seconds_timed / steps - data - other
    exposed = min(1000 * exposed_seconds, busy)
    return {"data_ms": data, "compute_ms": busy - exposed, "communication_ms": exposed, "other_ms": other}


def _rank(number: int, host: str, device: str, parts: dict[str, Any], **_: Any) -> dict[str, Any]:
    step_ms = None if parts["data_ms"] is None else sum(parts.values())
    own = {"data_ms": parts["data_ms"], "compute_ms": parts["compute_ms"], "step_ms": step_ms}
    return {"rank": number, "host": host, "device": device, **own}


def _communication(run: Run, seconds: list[list[float]]) -> dict[str, Any]:
    """`seconds` are those of the ranks that know them: all, exposed.

    The rank that waited least is taken: what others wait beyond it, they wait for a slower rank.
    """
    strategy, config = run.strategy, run.config
    total, link = strategy.communication_bytes(run.state.model, run.state.wrapped, config.train.accumulate)
    whole, exposed = (min((1000 * each[part] for each in seconds), default=None) for part in (0, 1))
    return {
        "bytes_per_step": total,
        "bytes_busiest_link": link,
        "ms_per_step": whole,
        "exposed_ms_per_step": exposed,
        "method": strategy.communication_method if seconds else None,
    }

"""What the timed steps of a run cost, over all ranks, as result.json has it."""

from __future__ import annotations

import dataclasses
from typing import Any

from src.engine.machine.ranks import host_name
from src.engine.record.guard import flags, guard
from src.run.build import Run


def figures(run: Run) -> dict[str, Any]:
    """Fields of the result. Collective."""
    meter, strategy = run.moments.meter, run.strategy
    ranks = strategy.gather(_own(run))
    throughput = meter.throughput()
    found = guard(throughput, [rank["usage"] | {"host": rank["host"]} for rank in ranks], strategy.gpu_states())
    walls = [rank["usage"]["wall"] for rank in ranks]
    own = ranks[0]["parts"]
    return {
        "throughput": throughput,
        "step": own,
        "ranks": [_rank(number, rank) for number, rank in enumerate(ranks)],
        "cpu": {
            "seconds_per_second": sum(rank["usage"]["own"] for rank in ranks) / walls[0] if walls[0] else None,
        },
        "data_wait": meter.data_wait(),
        "communication": _communication(run, [rank["communication"] for rank in ranks]),
        "guard": found,
        "flags": flags(found, meter.steps_timed),
    }


def _own(run: Run) -> dict[str, Any]:
    meter, strategy = run.moments.meter, run.strategy
    found, steps = strategy.communication_seconds(run.state.wrapped), max(1, meter.steps_timed)
    whole, data, other = (
        1000 * seconds / steps for seconds in (meter.seconds_timed, meter.data_seconds, meter.other_seconds)
    )
    exposed = min(1000 * found[1] if found else 0.0, whole - data - other)
    parts = {
        "data_ms": data,
        "compute_ms": whole - data - other - exposed,
        "communication_ms": exposed,
        "other_ms": other,
    }
    return {
        "host": host_name(),
        "device": str(strategy.device),
        "parts": parts if meter.steps_timed else dict.fromkeys(parts),
        "communication": None if found is None else [1000 * seconds for seconds in found],
        "usage": dataclasses.asdict(meter.usage),
    }


def _rank(number: int, rank: dict[str, Any]) -> dict[str, Any]:
    parts = rank["parts"]
    known = parts["data_ms"] is not None
    return {
        "rank": number,
        "host": rank["host"],
        "device": rank["device"],
        "data_ms": parts["data_ms"],
        "compute_ms": parts["compute_ms"],
        "step_ms": sum(parts.values()) if known else None,
    }


def _communication(run: Run, ranks: list[list[float] | None]) -> dict[str, Any]:
    """Times are those of the rank that waited least: what others wait beyond it, they wait for a slower rank."""
    strategy, config = run.strategy, run.config
    total, link = strategy.communication_bytes(run.state.model, run.state.wrapped, config.train.accumulate)
    known = [times for times in ranks if times is not None]
    return {
        "bytes_per_step": total,
        "bytes_busiest_link": link,
        "ms_per_step": min((times[0] for times in known), default=None),
        "exposed_ms_per_step": min((times[1] for times in known), default=None),
        "method": strategy.communication_method if known else None,
    }

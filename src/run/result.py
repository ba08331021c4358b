"""What a run writes into result.json: what it was, how good, and what its timed steps cost over all ranks."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import time
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from src.engine.machine.process import process_started_at
from src.engine.machine.ranks import host_name
from src.engine.record.guard import flags, guard
from src.engine.record.meter import Meter
from src.engine.record.result import Result
from src.models.build import count_parameters
from src.run.build import Run
from src.run.proof import counted

log = logging.getLogger(__name__)


def make_result(run: Run, folder: Path, start: tuple[int, str], end: tuple[str, list[str]]) -> Result:
    """The result of a finished run; `start` and `end` are those of proof.py. Collective."""
    config, strategy, step = run.config, run.strategy, run.state.progress.step
    (world_size, hash_at_start), (digest, drifted) = start, end
    started, first_step_at = _started(), run.moments.meter.first_step_at
    result = Result(
        status="done",
        strategy=strategy.kind,
        accelerator=config.parallel.accelerator,
        devices=config.parallel.devices,
        threads_per_device=config.parallel.threads_per_device,
        world_size=world_size,
        processes=strategy.world_size,
        nodes=config.cluster.nodes,
        hosts=list(dict(strategy.gather([strategy.node, host_name()])).values()),
        backend=strategy.backend,
        tags=config.tags,
        model=config.model.name,
        parameters=count_parameters(run.state.model),
        batch_size=config.global_batch,
        steps=step,
        epochs=step / run.steps_per_epoch,
        samples_seen=step * config.global_batch * config.train.accumulate,
        dropped_per_epoch=run.train.requests.dropped,
        skipped=_skipped(run),
        train={"loss": run.state.progress.epoch_loss},
        val=run.numbers["val"],
        test=run.numbers.get("test", {}),
        **_figures(run, drifted),
        memory=strategy.memory(),
        started=datetime.fromtimestamp(started).astimezone().isoformat(timespec="seconds"),
        commit=_commit(folder),
        profile=[own for own in strategy.gather(run.moments.profile(folder)) if own],
        seconds={
            "start_to_first_step": None if first_step_at is None else first_step_at - started,
            "total": time.time() - started,
        },
        parameters_hash=digest,
        checkpoint=f"checkpoints/{'best' if (folder / 'checkpoints' / 'best.pt').exists() else 'last'}.pt",
        proof={"parameters_hash_start": hash_at_start, "hashes_equal": not drifted, **counted(run, folder)},
    )
    result.objective = _objective(result, config.optimized_metric)
    return result


def _objective(result: Result, name: str) -> float | None:
    """The value of `optimized_metric`."""
    if name == "images_per_sec":
        return result.throughput.get("images_per_sec")
    split, _, metric = name.partition("/")
    return getattr(result, split).get(metric)  # type: ignore[no-any-return]


def _skipped(run: Run) -> dict[str, int]:
    """How many images of each split could not be read, by any rank; says so where there are any. Collective."""
    counts, first = {}, ""
    for name, loader in {"train": run.train, **run.evaluation}.items():
        indices = sorted({index for own in run.strategy.gather(sorted(loader.unreadable)) for index in own})
        if indices:
            counts[name] = len(indices)
            files = getattr(loader.reader.split, "files", None)
            first = first or (str(files[indices[0]][0]) if files else f"number {indices[0]}")
    if counts and run.strategy.is_first:
        each = ", ".join(f"{split} {count}" for split, count in counts.items())
        log.info("skipped      unreadable images: %s; the first: %s", each, first)
    return counts


def _started() -> float:
    """When the command began, as time.time() counts."""
    started = float(os.environ.get("RUN_STARTED_AT", 0))
    return started or process_started_at(os.getppid())  # torchrun: its start is the parent's


def _commit(folder: Path) -> str | None:
    """The code's, as the run's environment.json has it; ranks of other nodes may not see that file."""
    with suppress(OSError, ValueError, KeyError):
        return json.loads((folder / "environment.json").read_text(encoding="utf-8"))["commit"]  # type: ignore[no-any-return]
    return None


def _figures(run: Run, drifted: list[str]) -> dict[str, Any]:
    """Fields of the result, `drifted` among its flags. Collective."""
    meter, strategy = run.moments.meter, run.strategy
    seconds = strategy.communication_seconds(run.state.wrapped)
    step = _parts(meter, seconds[1] if seconds else 0.0)
    step_ms = sum(step.values()) if meter.steps_timed else None
    own: dict[str, Any] = {"rank": strategy.rank, "host": host_name(), "device": str(strategy.device)}
    own |= {"data_ms": step["data_ms"], "compute_ms": step["compute_ms"], "step_ms": step_ms}
    usage = {"host": host_name(), **dataclasses.asdict(meter.usage)}
    ranks, usages, communicated = zip(*strategy.gather([own, usage, seconds]), strict=True)
    throughput, wall = meter.throughput(), meter.usage.wall
    found = guard(throughput, list(usages), strategy.gpu_states())
    return {
        "throughput": throughput,
        "step": step,
        "ranks": list(ranks),
        "cpu": {"seconds_per_second": sum(each["own"] for each in usages) / wall if wall else None},
        "data_wait": meter.data_wait(),
        "communication": _communication(run, [each for each in communicated if each]),
        "guard": found,
        "flags": flags(found, meter.steps_timed) + drifted,
    }


def _parts(meter: Meter, exposed_seconds: float) -> dict[str, Any]:
    """Milliseconds of a mean step of this rank; they add up to all of it. None where no step was timed."""
    steps = meter.steps_timed
    if not steps:
        return dict.fromkeys(("data_ms", "compute_ms", "communication_ms", "other_ms"))
    data, other = 1000 * meter.data_seconds / steps, 1000 * meter.other_seconds / steps
    busy = 1000 * meter.seconds_timed / steps - data - other
    exposed = min(1000 * exposed_seconds, busy)
    return {"data_ms": data, "compute_ms": busy - exposed, "communication_ms": exposed, "other_ms": other}


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

"""Build result.json from the settings, the metrics, the segments of the run (its start and each
resume), and the measurements of timed steps on all ranks.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from timm_parallel.data.dataset import data_fingerprints
from timm_parallel.machine import hardware
from timm_parallel.machine.process import start_clock, started_at
from timm_parallel.machine.ranks import host_name
from timm_parallel.metric import LOSS
from timm_parallel.parallel.strategy import chunk_sizes
from timm_parallel.record.environment import read_environment, run_seconds
from timm_parallel.record.result import Result
from timm_parallel.run.meter import Meter
from timm_parallel.run.parts import RunParts, count_parameters

log = logging.getLogger(__name__)
# Limits beyond which a speed measurement counts as disturbed. In this order: processors that other
# programs use, share of time that a hypervisor takes, share of time that threads get, and relative
# change of the speed.
OTHERS, STEAL, STARVED, DRIFT = 0.25, 0.05, 0.8, 0.1
# The two halves of a run are compared only if it has at least so many timed steps.
FEWEST_STEPS = 20


def make_result(
    parts: RunParts,
    folder: Path,
    metrics: dict[str, dict[str, Any]],
    segments: list[dict[str, Any]],
    start: tuple[int, str],
    end: tuple[str, list[str]],
) -> Result:
    """Build the contents of result.json for a finished run. All ranks must call this function.

    `metrics`: dictionary from split to its metrics. `start`, `end`: results of the comparisons of
    parameters at the start and at the end of the run.
    """
    height, width = parts.image_size
    config, strategy, step = parts.config, parts.strategy, parts.progress.step
    (world_size, hash_at_start), (digest, drift_flags) = start, end
    started, meter = started_at(), parts.hooks.meter
    # The FLOPs are known on rank 0 only.
    first_step_at, flops = meter.first_step_at, parts.state.flops
    has_best = (folder / "checkpoints" / "best.pt").exists()
    known = {"loss": LOSS, **parts.task.metrics}
    wall = run_seconds(folder, time.time())
    result = Result(
        status="done",
        strategy=config.parallel.strategy,
        accelerator=config.parallel.accelerator,
        devices=config.parallel.devices,
        threads_per_device=config.parallel.threads_per_device,
        world_size=world_size,
        processes=strategy.group.world_size,
        nodes=config.cluster.nodes,
        hosts=list(dict(strategy.group.gather([strategy.group.node, host_name()])).values()),
        backend=strategy.group.backend,
        tags=config.tags,
        model=config.model.name,
        parameters=count_parameters(parts.state.model),
        image_size=height if height == width else [height, width],
        batch_size=config.global_batch,
        accumulate=config.train.accumulate,
        flops_per_step=None if flops is None else flops * config.train.accumulate,
        steps=step,
        epochs=parts.progress.epochs_done(parts.steps_per_epoch),
        samples_seen=step * config.global_batch * config.train.accumulate,
        dropped_per_epoch=parts.train_loader.sampler.dropped,
        skipped=_skipped(parts),
        data=data_fingerprints(parts.dataset),
        metrics={
            name: {"lower_is_better": of.lower_is_better, "is_proportion": of.is_proportion}
            for name, of in known.items()
        },
        train=parts.progress.epoch_means,
        val=metrics.get("val", {}),
        test=metrics.get("test", {}),
        **_measurements(parts, drift_flags),
        memory=parts.telemetry.memory(),
        started=segments[0]["started"],
        segments=segments,
        commit=read_environment(folder).get("commit"),
        profile=[
            profile for profile in strategy.group.gather(parts.hooks.profile(folder)) if profile
        ],
        seconds={
            "start_to_first_step": None if first_step_at is None else first_step_at - started,
            "start": {}
            if first_step_at is None
            else start_clock.until_first_step(meter.first_fetch, first_step_at),
            "training": parts.progress.seconds,
            "total": time.perf_counter() - started,
        },
        goodput=parts.progress.seconds / wall if wall else None,
        parameters_hash=digest,
        checkpoint=None
        if parts.train_loader.replay is not None
        else f"checkpoints/{'best' if has_best else 'last'}.pt",
        proof={
            "parameters_hash_start": hash_at_start,
            "hashes_equal": not drift_flags,
            "chunk_sizes": chunk_sizes(config.global_batch, config.parallel.devices),
        },
    )
    # The objective is `images_per_sec`, which is an entry of `throughput`, or a metric
    # `<split>/<name>`.
    split, _, name = config.objective.rpartition("/")
    result.objective = (getattr(result, split) if split else result.throughput).get(name)
    return result


def _skipped(parts: RunParts) -> dict[str, int]:
    """Count the images of each split that could not be read on any rank, and log these numbers.

    Returns a dictionary from split to number. All ranks must call this function.
    """
    counts, first = {}, ""
    for name, loader in {"train": parts.train_loader, **parts.eval_loaders}.items():
        by_rank = parts.strategy.group.gather(sorted(loader.unreadable))
        indices = sorted(set().union(*by_rank))
        if indices:
            counts[name] = len(indices)
            files = getattr(loader.fetcher.split, "files", None)
            first = first or (str(files[indices[0]][0]) if files else f"number {indices[0]}")
    if counts and parts.strategy.group.is_first:
        per_split = ", ".join(f"{split} {count}" for split, count in counts.items())
        log.info("skipped      unreadable images: %s; the first: %s", per_split, first)
    return counts


def _measurements(parts: RunParts, drift_flags: list[str]) -> dict[str, Any]:
    """Gather the fields of result.json that are measured in timed steps, such as speed and waiting.

    All ranks must call this function.
    """
    meter, strategy, host = parts.hooks.meter, parts.strategy, host_name()
    seconds = _communicated(parts)
    step = _mean_step(meter, seconds[1] if seconds else 0.0)
    rank = {
        "rank": strategy.group.rank,
        "host": host,
        "device": str(strategy.device),
        "data_ms": step["data_ms"],
        "compute_ms": step["compute_ms"],
        "step_ms": sum(step.values()) if meter.steps_timed else None,
    }
    usage = {"host": host, **dataclasses.asdict(meter.usage)}
    ranks, usages, communicated = zip(*strategy.group.gather([rank, usage, seconds]), strict=True)
    throughput, wall = meter.throughput(), meter.usage.wall
    replay = parts.train_loader.replay
    replayed = [] if replay is None else [f"it replays batches (data.replay_batches={replay})"]
    disturbance = guard(throughput, list(usages), parts.telemetry.gpu_states())
    return {
        "throughput": throughput,
        "step": step,
        "ranks": list(ranks),
        "cpu": {
            "seconds_per_second": sum(usage["own"] for usage in usages) / wall if wall else None,
            "capability": torch.backends.cpu.get_cpu_capability(),
        },
        "data_wait": meter.data_wait(),
        "images_per_sec_without_wait": speed_without_wait(throughput["images_per_sec"], ranks),
        "communication": _communication(parts, [pair for pair in communicated if pair]),
        "energy": _energy(parts),
        "guard": disturbance,
        "flags": flags(disturbance, meter.steps_timed) + drift_flags + replayed,
    }


def speed_without_wait(speed: float | None, ranks: Iterable[dict[str, Any]]) -> float | None:
    """Compute the images per second if no rank had waited for data.

    `speed`: measured images per second. `ranks`: the entry of result.json. All ranks wait for the
    rank that waits most for data. Returns None if nothing was measured.
    """
    if speed is None:
        return None
    busy = min(1 - rank["data_ms"] / rank["step_ms"] for rank in ranks)
    return speed / busy if busy > 0 else None


def _mean_step(meter: Meter, exposed_seconds: float) -> dict[str, Any]:
    """Compute the mean milliseconds per step that this rank spent on each of four activities.

    They are waiting for data, computing, waiting for communication, and the rest.
    """
    steps = meter.steps_timed
    if not steps:
        return dict.fromkeys(("data_ms", "compute_ms", "communication_ms", "other_ms"))
    data, other = 1000 * meter.data_seconds / steps, 1000 * meter.other_seconds / steps
    busy = 1000 * meter.seconds_timed / steps - data - other
    exposed = min(1000 * exposed_seconds, busy)
    return {
        "data_ms": data,
        "compute_ms": busy - exposed,
        "communication_ms": exposed,
        "other_ms": other,
    }


def _energy(parts: RunParts) -> dict[str, float | None]:
    """Return the joules per image in timed steps, and the kWh since data and model were built.

    A value is NaN if it is unknown. All ranks must call this function.
    """
    meter = parts.hooks.meter
    images = meter.steps_timed * meter.images_per_step
    window, total = parts.telemetry.joules()
    return {"joules_per_image": window / images if images else None, "kwh": total / 3.6e6}


def _communicated(parts: RunParts) -> tuple[float, float] | None:
    """Return the seconds of communication in a step of this rank, and the part of them that does
    not overlap with computing, over all phases. None if a strategy cannot measure them.
    """
    phases = parts.state.phases
    pairs = [pair for phase in phases if (pair := phase.communication.seconds()) is not None]
    if len(pairs) < len(phases):
        return None
    return sum(whole for whole, _ in pairs), sum(exposed for _, exposed in pairs)


def _communication(parts: RunParts, seconds: list[list[float]]) -> dict[str, Any]:
    """Return the bytes and milliseconds of communication per step.

    `seconds`: one pair per rank: seconds of all communication, and the part of them that does not
    overlap with computing.
    """
    sent = [phase.communication.bytes(phase.parameters.values()) for phase in parts.state.phases]
    # Take the minimum over the ranks, because the time of each other rank includes waiting for the
    # slowest rank.
    return {
        "bytes_per_step": None if None in sent else sum(size for size in sent if size),
        "ms_per_step": min((1000 * whole for whole, _ in seconds), default=None),
        "exposed_ms_per_step": min((1000 * exposed for _, exposed in seconds), default=None),
    }


def new_segment(parts: RunParts, folder: Path, changed: dict[str, list[Any]]) -> dict[str, Any]:
    """Build the entry in result.json for the segment of the run that starts now.

    `changed`: dictionary from each setting that a resume changed to its values before and now.
    """
    began = time.time() - (time.perf_counter() - started_at())
    return {
        "first_step": parts.progress.step,
        "command": read_environment(folder).get("command"),
        "changed": changed,
        "started": datetime.fromtimestamp(began).astimezone().isoformat(timespec="seconds"),
        "devices": parts.config.parallel.devices,
    }


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

"""Devices for jobs: lists this machine's devices, the devices that a job needs, and the number of concurrent jobs."""

from __future__ import annotations

import os
from collections.abc import Sequence

from src.engine.jobs.scheduler import DeviceScheduler, Requirement
from src.engine.machine import hardware
from src.schema import Config


def devices_here() -> dict[str, list[str]]:
    """Return this machine's devices, kind -> names: core numbers, names for CUDA_VISIBLE_DEVICES, Apple's GPU."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(hardware.cores())
    cuda = [device.uuid for device in hardware.visible_cuda_devices()]
    return {"cpu": [str(core) for core in cores], "cuda": cuda, "mps": ["mps"]}


def need_of(config: Config) -> Requirement:
    """Return the devices that a job needs. A config with device numbers means all devices, so the job runs alone."""
    if config.cluster.scheduler == "slurm":
        return Requirement("slurm", 1)
    parallel = config.parallel
    alone = parallel.device_ids is not None or parallel.output_device is not None
    threads = int(parallel.threads_per_device) if parallel.accelerator == "cpu" else 1
    return Requirement(parallel.accelerator, int(parallel.devices) * threads, alone)


def share_of(need: Requirement, names: Sequence[str]) -> tuple[dict[str, str], list[int]]:
    """Return the environment variables and the cores that limit a job to devices `names`. No cores: all."""
    variables = {"CUDA_VISIBLE_DEVICES": ",".join(names)} if need.kind == "cuda" else {}
    return variables, [int(name) for name in names] if need.kind == "cpu" else []


def jobs_at_a_time(key: str, jobs: int | str, config: Config) -> int | None:
    """Check sweep.jobs or search.n_jobs. Return the number of concurrent jobs; None: limited by devices only."""
    if jobs == 1:
        return 1
    if config.sweep.timed:
        raise ValueError(f"{key}={jobs}: sweep.timed=true, and concurrent jobs slow each other down; use {key}=1")
    if key == "search.n_jobs" and config.optimized_metric == "images_per_sec":
        raise ValueError(f"{key}={jobs}: optimized_metric=images_per_sec is a speed, so trials run alone; use {key}=1")
    if jobs != "auto":
        return int(jobs)
    if key == "search.n_jobs" and config.cluster.scheduler != "local":
        raise ValueError(f"{key}=auto: a cluster has no limit; set the number of trials to submit at a time")
    return None


def why_alone(scheduler: DeviceScheduler, needs: set[Requirement]) -> str:
    """Return the reason why jobs with these needs cannot run concurrently; an empty string if they can."""
    if not needs or any(scheduler.concurrent_jobs(need) > 1 for need in needs):
        return ""
    need = max(needs, key=lambda need: need.count)
    present = len(scheduler.devices[need.kind])
    share = f"a job takes {min(need.count, present)} of {present}"
    if need.kind == "cpu":
        return f"{share} cores, so jobs run one at a time; parallel.threads_per_device=1 lets more run"
    return f"{share} {need.kind} devices, so jobs run one at a time"

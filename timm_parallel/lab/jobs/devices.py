"""Devices of this machine for concurrent jobs: which exist, which a job needs, and how a job is
limited to its own.
"""

from __future__ import annotations

from collections.abc import Sequence

from timm_parallel.keys import Config
from timm_parallel.lab.jobs.scheduler import DeviceScheduler, Requirement
from timm_parallel.machine import hardware


def devices_here() -> dict[str, list[str]]:
    """Return the devices of this machine by kind: cpu -> core numbers, cuda -> UUIDs,
    mps -> `mps`.
    """
    cuda = [device.uuid for device in hardware.visible_cuda_devices()]
    return {"cpu": [str(core) for core in hardware.core_numbers()], "cuda": cuda, "mps": ["mps"]}


def need_of(config: Config) -> Requirement:
    """Return the devices that a job needs: all, without a concurrent job, if its config gives
    device numbers.
    """
    if config.cluster.scheduler == "slurm":
        return Requirement("slurm", 1)
    parallel = config.parallel
    alone = parallel.device_ids is not None or parallel.output_device is not None
    threads = int(parallel.threads_per_device) if parallel.accelerator == "cpu" else 1
    return Requirement(parallel.accelerator, int(parallel.devices) * threads, alone)


def share_of(need: Requirement, names: Sequence[str]) -> tuple[dict[str, str], list[int]]:
    """Return (environment variables, cores) that limit a job to the devices `names`; none of both
    if `names` is empty.
    """
    # An empty CUDA_VISIBLE_DEVICES would hide every GPU.
    variables = {"CUDA_VISIBLE_DEVICES": ",".join(names)} if need.kind == "cuda" and names else {}
    return variables, [int(name) for name in names] if need.kind == "cpu" else []


def jobs_at_a_time(key: str, jobs: int | str, config: Config) -> int | None:
    """Return the limit that `key` (sweep.jobs or search.n_jobs) with value `jobs` sets to
    concurrent jobs; None: no limit.
    """
    if jobs == 1:
        return 1
    if config.sweep.timed:
        raise ValueError(
            f"{key}={jobs}: sweep.timed=true times the jobs, so each runs alone; use {key}=1"
        )
    if key == "search.n_jobs" and config.objective == "images_per_sec":
        raise ValueError(
            f"{key}={jobs}: optimized_metric=images_per_sec times the trials, so each runs alone; "
            f"use {key}=1"
        )
    if jobs != "auto":
        return int(jobs)
    if key == "search.n_jobs" and config.cluster.scheduler != "local":
        raise ValueError(
            f"{key}=auto: only for trials on this machine; on a cluster, give a number of "
            "concurrent trials"
        )
    return None


def why_alone(scheduler: DeviceScheduler, needs: set[Requirement]) -> str:
    """Return the reason why no two jobs that need these devices can run concurrently; an empty
    string if some can.
    """
    if not needs or any(scheduler.concurrent_jobs(need) > 1 for need in needs):
        return ""
    need = max(needs, key=lambda need: need.count)
    present = len(scheduler.devices[need.kind])
    share = f"a job takes {min(need.count, present)} of {present}"
    if need.kind == "cpu":
        return (
            f"{share} cores, so jobs run one at a time; parallel.threads_per_device=1 lets more run"
        )
    return f"{share} {need.kind} devices, so jobs run one at a time"

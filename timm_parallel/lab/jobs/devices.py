"""Devices of this machine for concurrent jobs: list the devices, compute the number that a job
needs, and limit a job to the devices that it was given.
"""

from __future__ import annotations

from collections.abc import Sequence

from timm_parallel.keys import Config
from timm_parallel.lab.jobs.scheduler import Requirement
from timm_parallel.machine import hardware


def devices_here() -> dict[str, list[str]]:
    """Return the devices of this machine as a dictionary from device type to names: core numbers
    for cpu, UUIDs for cuda, and `mps` for mps.
    """
    cuda = [device.uuid for device in hardware.visible_cuda_devices()]
    return {"cpu": [str(core) for core in hardware.core_numbers()], "cuda": cuda, "mps": ["mps"]}


def need_of(config: Config) -> Requirement:
    """Return the devices that a job needs according to its config. A job that chooses devices by
    number gets all devices of the machine, because it must not share them.
    """
    if config.cluster.scheduler == "slurm":
        return Requirement("slurm", 1)
    parallel = config.parallel
    alone = parallel.device_ids is not None or parallel.output_device is not None
    threads = int(parallel.threads_per_device) if parallel.accelerator == "cpu" else 1
    return Requirement(parallel.accelerator, int(parallel.devices) * threads, alone)


def share_of(need: Requirement, names: Sequence[str]) -> tuple[dict[str, str], list[int]]:
    """Return (environment variables, core numbers) that limit a job to the devices `names`. Both
    are empty if `names` is empty, so that the job may use every device.
    """
    # Set CUDA_VISIBLE_DEVICES only to a non-empty list, because an empty value would hide every
    # GPU.
    variables = {"CUDA_VISIBLE_DEVICES": ",".join(names)} if need.kind == "cuda" and names else {}
    return variables, [int(name) for name in names] if need.kind == "cpu" else []


def jobs_at_a_time(key: str, jobs: int | str, config: Config) -> int | None:
    """Return the largest number of concurrent jobs that the config allows. None means that only the
    number of devices limits it.

    `key`: sweep.jobs or search.n_jobs. `jobs`: value of that key. Raises ValueError if speed is
    measured, because concurrent jobs would disturb each other. Also raises ValueError for
    search.n_jobs=auto on a cluster, because this machine cannot count the devices there.
    """
    if jobs == 1:
        return 1
    if config.sweep.timed:
        raise ValueError(
            f"{key}={jobs}: sweep.timed=true measures the speed of each job, so jobs must run one "
            f"at a time; use {key}=1"
        )
    if key == "search.n_jobs" and config.objective == "images_per_sec":
        raise ValueError(
            f"{key}={jobs}: optimized_metric=images_per_sec measures the speed of each trial, so "
            f"trials must run one at a time; use {key}=1"
        )
    if jobs != "auto":
        return int(jobs)
    if key == "search.n_jobs" and config.cluster.scheduler != "local":
        raise ValueError(
            f"{key}=auto: counts the devices of this machine, but the trials run on a cluster; set "
            f"{key} to the number of concurrent trials"
        )
    return None

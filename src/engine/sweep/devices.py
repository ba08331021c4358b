"""Which devices of this machine there are to hand out, what a job needs of them, and how it is kept to its share."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from src.engine.machine import hardware
from src.engine.machine.process import die_with_parent
from src.engine.sweep.packing import Need, Packing
from src.schema import Config

LEAST_BYTES = 256 * 2**20  # of a process that has imported torch and timm and holds a tiny model


def devices_here() -> dict[str, list[str]]:
    """Names by kind: cores by number, CUDA devices as CUDA_VISIBLE_DEVICES takes them, Apple's GPU."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(hardware.cores())
    cuda = [device.uuid for device in hardware.visible_cuda_devices()]  # which mean the same in every process
    return {"cpu": [str(core) for core in cores], "cuda": cuda, "mps": ["mps"]}


def need_of(config: Config) -> Need:
    """What a job of this resolved config takes. One that names its devices by number is given all of them, and so runs alone."""
    if config.cluster.scheduler == "slurm":
        return Need("slurm", 1)
    parallel = config.parallel
    alone = parallel.device_ids is not None or parallel.output_device is not None
    threads = int(parallel.threads_per_device) if parallel.accelerator == "cpu" else 1
    return Need(parallel.accelerator, int(parallel.devices) * threads, alone)


def least_bytes(config: Config) -> int:
    """Memory of this host that a job surely needs: what torch takes, in each of its processes."""
    if config.cluster.scheduler != "local":
        return 0
    return LEAST_BYTES * (int(config.parallel.devices) if config.parallel.has_ranks else 1)


def share_of(need: Need, names: Sequence[str]) -> tuple[dict[str, str], Callable[[], None]]:
    """(environment variables of the job, a function for its process to call before it becomes the job).

    On CPU the function sets an affinity mask, which ranks, loader workers and thread pools inherit; macOS has none.
    """
    cores = {int(name) for name in names} if need.kind == "cpu" else set()

    def prepare() -> None:
        die_with_parent()  # not from the job's own code: a kill -9 of ours may come before that runs
        if cores and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, cores)

    return ({"CUDA_VISIBLE_DEVICES": ",".join(names)} if need.kind == "cuda" else {}), prepare


def jobs_at_a_time(key: str, asked: int | str, configs: Sequence[Config], all_jobs: Config) -> int | None:
    """`sweep.jobs` or `search.n_jobs` as a number; None for auto: as many as there are devices for.

    `key` names it in refusals; `configs` are the jobs' resolved ones, as far as they are known; `all_jobs` holds what the
    sweep or search says of all of them. Refused where jobs are timed, or memory holds fewer.
    """
    if asked == 1:
        return 1
    if all_jobs.sweep.timed:
        raise ValueError(
            f"{key}={asked}: this experiment times its jobs (sweep.timed=true), which slow each other down; leave {key} at 1"
        )
    if key.startswith("search") and all_jobs.optimized_metric == "images_per_sec":
        raise ValueError(
            f"{key}={asked}: optimized_metric=images_per_sec is a speed, so its trials run alone; leave it at 1"
        )
    if asked == "auto" and key.startswith("search") and all_jobs.cluster.scheduler != "local":
        raise ValueError(f"{key}=auto: the cluster holds any number of trials; say how many are submitted at a time")
    if asked == "auto":
        return None
    if all_jobs.cluster.scheduler != "local":  # the nodes' memory is the scheduler's to give
        return int(asked)
    free = hardware.available_memory()
    least = min(map(least_bytes, configs), default=LEAST_BYTES)
    fit = max(1, free // least)
    if int(asked) > fit:
        raise ValueError(
            f"{key}={asked}: {free / 2**30:.1f} GiB of memory are free, and a job takes {least / 2**30:.2f} GiB or more; "
            f"{fit} fit"
        )
    return int(asked)


def why_alone(packing: Packing, needs: set[Need]) -> str:
    """What keeps jobs of these needs from running side by side, for people who asked for it; empty if nothing does."""
    if not needs or any(packing.beside(need) > 1 for need in needs):
        return ""
    need = max(needs, key=lambda need: need.count)
    there_are = len(packing.devices[need.kind])
    took = f"a job takes {min(need.count, there_are)} of {there_are}"
    if need.kind == "cpu":
        return f"{took} cores, so they run one at a time; parallel.threads_per_device=1 lets more run"
    return f"{took} {need.kind} devices, so they run one at a time"

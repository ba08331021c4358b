"""Devices of a machine for the jobs of a sweep, and the scheduler that assigns them. The scheduler
uses no processes and no clock, so that tests can simulate sweeps.

Jobs that need more devices start first. If too few devices are free for a job, smaller jobs on the
same type of device wait too. Otherwise small jobs could delay a large one forever.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from timm_parallel.keys import Config
from timm_parallel.machine import hardware


@dataclass(frozen=True)
class Requirement:
    """Devices that a job needs: `count` devices of type `kind`. The devices of type cpu are cores.
    With `alone`, the job gets all devices and no other job runs at the same time.
    """

    kind: str
    count: int
    alone: bool = False


class DeviceScheduler:
    """Assigns the devices of a machine to jobs, and chooses the job that starts next."""

    def __init__(self, devices: Mapping[str, Sequence[str]], max_jobs: int | None = None) -> None:
        """Create a scheduler without running jobs.

        `devices`: dictionary from device type to the names of the devices. `max_jobs`: largest
        number of concurrent jobs, or None if only the devices limit it.
        """
        self.devices, self.max_jobs = devices, max_jobs
        self.held: dict[int, tuple[Requirement, Sequence[str]]] = {}

    def free(self, kind: str) -> list[str]:
        """Return the names of the devices of type `kind` that are not assigned to a running job."""
        taken = {name for need, names in self.held.values() if need.kind == kind for name in names}
        return [name for name in self.devices[kind] if name not in taken]

    def start_next(
        self,
        waiting: Sequence[tuple[int, Requirement]],
        has_memory: Callable[[], bool] = lambda: True,
    ) -> tuple[int, list[str]] | None:
        """Choose the job that starts next, and assign devices to it. Return (number of the job,
        names of its devices), or None if no job can start before a running job ends.

        `waiting`: (number, requirement) of each waiting job, in the order of the sweep.
        `has_memory`: function that returns True if the free memory is enough for one more job. It
        is called only while other jobs run.
        """
        if len(self.held) == self.max_jobs:
            return None
        if self.max_jobs != 1:
            waiting = sorted(waiting, key=lambda entry: (entry[1].alone, -self._count(entry[1])))
        reserved: set[str] = set()
        for job, need in waiting:
            if need.alone or any(other.alone for other, _ in self.held.values()):
                return None if self.held else (job, self._take(job, need))
            if need.kind in reserved:
                continue
            # If no job runs, waiting would not free a device. So start a job even if the machine
            # does not have enough devices for it. The job itself then reports the error.
            if not self.held or (self._count(need) <= len(self.free(need.kind)) and has_memory()):
                return job, self._take(job, need)
            reserved.add(need.kind)
        return None

    def release(self, job: int) -> None:
        """Free the devices of a job that has ended."""
        del self.held[job]

    @property
    def is_full(self) -> bool:
        """Return True if no further job can start: all devices of the types in use are assigned, or
        the limit of concurrent jobs is reached.
        """
        none_free = bool(self.held) and not any(
            self.free(need.kind) for need, _ in self.held.values()
        )
        return none_free or len(self.held) == self.max_jobs

    def _count(self, need: Requirement) -> int:
        """Return the number of devices to assign to a job. A job that needs more devices than the
        machine has gets all of them, for example 4 CPU ranks on 2 cores.
        """
        return max(1, min(need.count, len(self.devices[need.kind])))

    def _take(self, job: int, need: Requirement) -> list[str]:
        free = self.free(need.kind)
        names = free if need.alone else free[: self._count(need)]
        self.held[job] = (need, names)
        return names


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

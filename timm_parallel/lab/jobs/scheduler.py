"""Scheduler that assigns devices to the jobs of a sweep. It uses no processes and no clock, so
tests can simulate sweeps.

Jobs that need many devices start first, and small jobs fill the gaps. If a job does not fit, no
smaller job of the same kind starts before it, because small jobs could delay it forever.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Requirement:
    """Devices that a job needs: `count` devices of `kind` (cpu: cores). `alone`: all devices, and
    no concurrent job.
    """

    kind: str
    count: int
    alone: bool = False


class DeviceScheduler:
    """Assigns the devices of a machine to jobs, and chooses the job that starts next."""

    def __init__(self, devices: Mapping[str, Sequence[str]], max_jobs: int | None = None) -> None:
        """`devices`: names by kind. `max_jobs`: limit of concurrent jobs; None: limited by devices
        only.
        """
        self.devices, self.max_jobs = devices, max_jobs
        self.held: dict[int, tuple[Requirement, Sequence[str]]] = {}

    def free(self, kind: str) -> list[str]:
        """Return the devices of this kind that are not assigned to a job."""
        taken = {name for need, names in self.held.values() if need.kind == kind for name in names}
        return [name for name in self.devices[kind] if name not in taken]

    def start_next(
        self,
        waiting: Sequence[tuple[int, Requirement]],
        has_memory: Callable[[], bool] = lambda: True,
    ) -> tuple[int, list[str]] | None:
        """Return (number of the job to start now, its devices), or None if the caller must wait
        until a job ends.

        `waiting`: (number, requirement) of each job in order. `has_memory`: returns True if the
        memory is enough for one more job; called only while other jobs run.
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
            # If no job runs, no device will become free: a job without its devices starts too, and
            # reports the error.
            if not self.held or (self._count(need) <= len(self.free(need.kind)) and has_memory()):
                return job, self._take(job, need)
            reserved.add(need.kind)
        return None

    def release(self, job: int) -> None:
        """Free the devices of a job that has ended."""
        del self.held[job]

    @property
    def is_full(self) -> bool:
        """Return True if no device of the kinds in use is free, or the limit of concurrent jobs is
        reached.
        """
        none_free = bool(self.held) and not any(
            self.free(need.kind) for need, _ in self.held.values()
        )
        return none_free or len(self.held) == self.max_jobs

    def concurrent_jobs(self, need: Requirement) -> int:
        """Return the number of jobs that can run concurrently if each needs `need`."""
        fit = 1 if need.alone else len(self.devices[need.kind]) // self._count(need)
        return fit if self.max_jobs is None else min(fit, self.max_jobs)

    def _count(self, need: Requirement) -> int:
        """Return the number of devices to assign: all if the job needs more than exist, e.g. 4 CPU
        ranks on 2 cores.
        """
        return max(1, min(need.count, len(self.devices[need.kind])))

    def _take(self, job: int, need: Requirement) -> list[str]:
        free = self.free(need.kind)
        names = free if need.alone else free[: self._count(need)]
        self.held[job] = (need, names)
        return names

"""Processor time of this process and of the machine, and energy of GPUs, summed over the measured
periods of a run.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil

from timm_parallel.machine.nvidia import Gpu
from timm_parallel.machine.process import scheduled_seconds


@dataclass
class Usage:
    """Processor seconds of this process and of the machine, summed over all periods from `begin` to
    `end`. A value is 0 if the kernel does not report it.
    """

    wall: float = 0.0
    # Processor seconds of this process and its children, such as loader workers.
    own: float = 0.0
    # Processor seconds of all processes on the machine.
    busy: float = 0.0
    # Processor seconds that a hypervisor gave to other virtual machines.
    stolen: float = 0.0
    # Seconds of all processors, idle or not.
    all: float = 0.0
    # Seconds that the threads of this process spent on a processor.
    ran: float = 0.0
    # Seconds that the threads of this process were ready to run and waited for a processor.
    queued: float = 0.0

    def begin(self) -> None:
        self._at = _now()

    def end(self) -> None:
        now = _now()
        for entry in dataclasses.fields(self):
            passed = getattr(now, entry.name) - getattr(self._at, entry.name)
            setattr(self, entry.name, getattr(self, entry.name) + max(0.0, passed))


class Energy:
    """Energy meter of GPUs, in joules. It measures two values per GPU: the energy since this object
    was built, and the sum over all periods from `begin` to `end`.

    The counter of a GPU includes other programs that use the GPU. An unknown energy is NaN, and so
    is a sum that includes it.
    """

    def __init__(self, gpus: Sequence[Gpu] = ()) -> None:
        self._gpus, self._window = gpus, np.zeros(len(gpus))
        self._at_start = self._at = self._read()

    def begin(self) -> None:
        self._at = self._read()

    def end(self) -> None:
        self._window += self._read() - self._at

    def by_gpu(self) -> dict[str, list[float]]:
        """Return a dictionary from the UUID of each GPU to two energies in joules. The first is the
        sum over all periods from `begin` to `end`. The second is the energy since this object was
        built.
        """
        values = np.stack([self._window, self._read() - self._at_start], axis=1).tolist()
        return {str(gpu.uuid): joules for gpu, joules in zip(self._gpus, values, strict=True)}

    def _read(self) -> Any:
        return np.array([gpu.joules() for gpu in self._gpus], dtype=float)


def _now() -> Usage:
    machine = psutil.cpu_times()
    idle = machine.idle + getattr(machine, "iowait", 0.0)
    stolen = getattr(machine, "steal", 0.0)
    # Subtract the time of guest systems, which is also contained in user and nice.
    guests = getattr(machine, "guest", 0.0) + getattr(machine, "guest_nice", 0.0)
    total = sum(machine) - guests
    own = 0.0
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        # Skip a process that has ended since the processes were listed.
        with suppress(psutil.Error):
            user, system = process.cpu_times()[:2]
            own += user + system
    ran, queued = scheduled_seconds()
    return Usage(time.perf_counter(), own, total - idle - stolen, stolen, total, ran, queued)

"""Processor time of this process and of the machine, and energy of GPUs, summed over the measured
parts of a run.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from timm_parallel.machine.nvidia import Gpu


@dataclass
class Usage:
    """Processor seconds between calls of `begin` and `end`, summed over all pairs; 0 if the kernel
    does not report them.
    """

    wall: float = 0.0
    own: float = 0.0  # processor seconds of this process and its children (loader workers)
    busy: float = 0.0  # processor seconds of all processes of the machine
    stolen: float = 0.0  # processor seconds that a hypervisor gave to other machines
    all: float = 0.0  # of all processors, idle or not
    ran: float = 0.0  # this process's threads on a processor
    queued: float = 0.0  # this process's threads ready to run, and waiting for a processor

    def begin(self) -> None:
        self._at = _now()

    def end(self) -> None:
        now = _now()
        for entry in dataclasses.fields(self):
            passed = getattr(now, entry.name) - getattr(self._at, entry.name)
            setattr(self, entry.name, getattr(self, entry.name) + max(0.0, passed))


class Energy:
    """Energy of GPUs in joules: since this object was built, and between calls of `begin` and
    `end`.

    The counter of a device includes other programs that use the device. An unknown value is NaN,
    and so is a sum with it.
    """

    def __init__(self, gpus: Sequence[Gpu] = ()) -> None:
        self._gpus, self._window = gpus, np.zeros(len(gpus))
        self._at_start = self._at = self._read()

    def begin(self) -> None:
        self._at = self._read()

    def end(self) -> None:
        self._window += self._read() - self._at

    def by_gpu(self) -> dict[str, list[float]]:
        """Map the UUID of each device to its joules [between `begin` and `end`,
        since the start].
        """
        values = np.stack([self._window, self._read() - self._at_start], axis=1).tolist()
        return {str(gpu.uuid): joules for gpu, joules in zip(self._gpus, values, strict=True)}

    def _read(self) -> Any:
        return np.array([gpu.joules() for gpu in self._gpus], dtype=float)


def _now() -> Usage:
    machine = psutil.cpu_times()
    idle = machine.idle + getattr(machine, "iowait", 0.0)
    stolen = getattr(machine, "steal", 0.0)
    # The time of guests is also contained in user and nice.
    guests = getattr(machine, "guest", 0.0) + getattr(machine, "guest_nice", 0.0)
    total = sum(machine) - guests
    own = 0.0
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        # Without the processes that end meanwhile.
        with suppress(psutil.Error):
            user, system = process.cpu_times()[:2]
            own += user + system
    ran, queued = scheduled_seconds()
    return Usage(time.perf_counter(), own, total - idle - stolen, stolen, total, ran, queued)


def scheduled_seconds() -> tuple[float, float]:
    """Return (seconds on a processor, seconds waiting for one) of this process's threads; 0 if they
    are unknown.
    """
    ran = queued = 0
    for path in Path("/proc/self/task").glob("*/schedstat"):
        try:
            # Nanoseconds on a processor, nanoseconds in its queue, time slices.
            on, waiting, _ = path.read_text(encoding="ascii").split()
        except (OSError, ValueError):  # the thread has ended, or the kernel lacks schedstat
            continue
        ran, queued = ran + int(on), queued + int(waiting)
    return ran / 1e9, queued / 1e9

"""What processes take of this machine: memory now, and processor time over a stretch of a run."""

from __future__ import annotations

import dataclasses
import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass
class Usage:
    """Seconds, added up over the stretches between `begin` and `end`. What the kernel does not tell stays 0."""

    wall: float = 0.0
    own: float = 0.0  # processor seconds of this process and its children (loader workers)
    busy: float = 0.0  # processor seconds of all processes of the machine
    stolen: float = 0.0  # processor seconds that a hypervisor gave to somebody else
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


def _now() -> Usage:
    machine = psutil.cpu_times()
    idle = machine.idle + getattr(machine, "iowait", 0.0)
    stolen = getattr(machine, "steal", 0.0)
    guests = getattr(machine, "guest", 0.0) + getattr(machine, "guest_nice", 0.0)  # are in user and nice too
    total = sum(machine) - guests
    own = _with_children(os.getpid(), lambda process: sum(process.cpu_times()[:2]))  # user and system
    ran, queued = _scheduled()
    return Usage(time.perf_counter(), own, total - idle - stolen, stolen, total, ran, queued)


def held_by(pid: int) -> int:
    """Bytes that a process and all below it hold, without the libraries that they share; 0 when it has ended."""
    return int(_with_children(pid, _own_bytes))


def _own_bytes(process: psutil.Process) -> int:
    try:
        text = Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8")
    except FileNotFoundError:  # no Linux, or it has just ended
        return int(process.memory_info().rss)
    return 1024 * sum(int(size) for size in re.findall(r"^(?:RssAnon|RssShmem):\s+(\d+) kB$", text, re.MULTILINE))


def _with_children(pid: int, measure: Callable[[psutil.Process], float]) -> float:
    """The sum over a process and all below it; one that ends meanwhile does not count."""
    total = 0.0
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        for one in (process, *process.children(recursive=True)):
            with suppress(psutil.Error, OSError):
                total += measure(one)
    return total


def _scheduled() -> tuple[float, float]:
    """Seconds that this process's threads ran, and waited for a processor; (0, 0) where the kernel does not count them.

    /proc/<task>/schedstat: nanoseconds on a processor, nanoseconds in its queue, time slices.
    """
    ran = queued = 0
    for path in Path("/proc/self/task").glob("*/schedstat"):
        try:
            on, waiting, _ = path.read_text(encoding="ascii").split()
        except (OSError, ValueError):  # the thread has ended, or this kernel was built without
            continue
        ran, queued = ran + int(on), queued + int(waiting)
    return ran / 1e9, queued / 1e9

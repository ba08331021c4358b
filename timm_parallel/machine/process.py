"""Processes of a run: let a process die with its parent, read its start time and how its threads
were scheduled, end its descendants, and time the parts of its start.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

# Python option for child processes. Without it, `python -m` imports from the current folder first,
# which may contain a foreign json.py.
SAFE_PATH = ("-P",)
# Environment variable of a rank with the process id of its launcher.
LAUNCHER = "RUN_LAUNCHER"


def kill_on_parent_exit(parent: int | None = None) -> None:
    """Ask the kernel to kill this process when its parent dies, e.g. after `kill -9` of a launcher.
    `parent`: process id of the parent. None: use the id in the variable that the launcher sets, or
    else the current parent.
    """
    if sys.platform != "linux":
        return
    # Value of this constant in linux/prctl.h.
    PR_SET_PDEATHSIG = 1
    # Remove the variable with the id of the launcher, because processes that a rank starts have
    # another parent.
    parent = parent or int(os.environ.pop(LAUNCHER, os.getppid()))
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # The parent died before the call of prctl, so the kernel will not kill this process.
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def limit_job(parent: int, cores: Collection[int]) -> None:
    """Let this process die with the process `parent`, and restrict it to some CPU cores. An empty
    list of cores means no restriction.
    """
    kill_on_parent_exit(parent)
    if cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)


def process_start_time(pid: int) -> float:
    """Return the start time of a process on the clock of time.perf_counter(), which all processes
    share. Unlike the clock of time.time(), it is never set. psutil's value can be off by a second.
    """
    if sys.platform != "linux":
        return time.perf_counter() - (time.time() - psutil.Process(pid).create_time())
    # Split after the last parenthesis, because the name of the process may have spaces (proc(5)).
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    since_boot = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.perf_counter() - (time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot)


def started_at() -> float:
    """Return the time at which the command of this run started, on the clock of
    time.perf_counter(): the variable RUN_STARTED_AT or, under torchrun, the start time of the
    parent process.
    """
    return float(os.environ.get("RUN_STARTED_AT", 0)) or process_start_time(os.getppid())


def scheduled_seconds() -> tuple[float, float]:
    """Read how the threads of this process were scheduled. Return (seconds on a processor, seconds
    waiting for a processor). Both are 0 if the kernel does not report them.
    """
    ran = queued = 0
    for path in Path("/proc/self/task").glob("*/schedstat"):
        try:
            # The fields are nanoseconds on a processor, nanoseconds in its queue, and the number of
            # time slices.
            on, waiting, _ = path.read_text(encoding="ascii").split()
        # The thread has ended, or the kernel does not report its schedule.
        except (OSError, ValueError):
            continue
        ran, queued = ran + int(on), queued + int(waiting)
    return ran / 1e9, queued / 1e9


@contextmanager
def terminate_descendants(seconds: float = 1.0) -> Iterator[None]:
    """End all processes that were started in the `with` block. At the end of the block they receive
    SIGTERM, and after `seconds` SIGKILL.
    """
    if sys.platform == "linux":
        # Make orphaned descendants children of this process (linux/prctl.h), so that they are found
        # too.
        PR_SET_CHILD_SUBREAPER = 36
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    before = set(psutil.Process().children(recursive=True))
    try:
        yield
    finally:
        started = [
            child for child in psutil.Process().children(recursive=True) if child not in before
        ]
        for child in started:
            with suppress(psutil.NoSuchProcess):
                child.terminate()
        for child in psutil.wait_procs(started, timeout=seconds)[1]:
            with suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.wait_procs(started, timeout=seconds)


class StartClock:
    """Seconds of the parts of a start that have ended, by name, in order.

    The parts are `launch` (the command reads the config and starts this process), `imports`,
    `devices` (with the process group), `data` (the lists of images), `model` (with optimizer,
    loaders and downloads) and `setup` (checks, banner and trackers).
    """

    def __init__(self) -> None:
        self.parts: dict[str, float] = {}

    def end(self, part: str) -> None:
        """End a part of the start, in which the time since the previous part was spent.

        Only the first call for a part counts. Later ones belong to another epoch or dataset.
        """
        if part not in self.parts:
            self.parts[part] = time.perf_counter() - started_at() - sum(self.parts.values())

    def until_first_step(self, first_fetch: float, first_step_at: float) -> dict[str, float]:
        """Return the seconds of all parts, including `first_batch` and `first_step`.

        `first_fetch`: seconds for which the first step waited for its data. `first_step_at`: time
        of time.perf_counter() at its end.
        """
        parts = {**self.parts, "first_batch": first_fetch}
        return {**parts, "first_step": first_step_at - started_at() - sum(parts.values())}


start_clock = StartClock()


def describe_start(parts: dict[str, float]) -> str:
    """Format the seconds of the parts of a start for the console."""
    shares = [f"{name.replace('_', ' ')} {seconds:.1f}" for name, seconds in parts.items()]
    return f"{sum(parts.values()):.1f} s to the end of the first step: {', '.join(shares)}"

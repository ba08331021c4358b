"""Manners of the processes that a run starts: they die with their parent and leave signals to it."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

import psutil

ECHO_SECONDS = 0.5  # one Ctrl-C may arrive twice: from the terminal and from the agent
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent dies, so that `kill -9` of a launcher leaves nothing behind."""
    if sys.platform != "linux":
        return
    import ctypes

    PR_SET_PDEATHSIG = 1  # linux/prctl.h
    parent = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the request
        os.kill(os.getpid(), signal.SIGKILL)


def process_started_at(pid: int) -> float:
    """`time.time()` of a process's start. psutil's is up to a second off: the kernel tells its boot in whole seconds."""
    if sys.platform != "linux":
        return psutil.Process(pid).create_time()
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()  # proc(5): the name may have spaces
    since_boot = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot)


@contextmanager
def imports_without_collector() -> Iterator[None]:
    """Importing torch and timm makes a million objects that stay, and Python's collector goes through them again and again.

    A fifth of the time of `import timm`. Afterwards they count as permanent, so that no later collection looks at them.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def keep_freed_memory() -> None:
    """Let glibc keep what tensors free: it returns large blocks to the kernel, and every step faults the same pages in anew.

    On a CPU a resnet18 step gains 6 to 13 %, under ddp 25 % (docs/benchmarks.md). MALLOC_* in the environment wins;
    other C libraries are left alone.
    """
    if sys.platform != "linux" or any(name.startswith("MALLOC_") for name in os.environ):
        return
    import ctypes

    M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, 16 * 2**20)  # larger ones leave holes that nothing fits into
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


@contextmanager
def no_survivors(seconds: float = 1.0) -> Iterator[None]:
    """Whatever the block starts, and whatever that starts in turn, is gone afterwards: TERM, `seconds` to leave, KILL."""
    if sys.platform == "linux":
        import ctypes

        PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h: orphans below this process become its children, so they are found
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    before = set(psutil.Process().children(recursive=True))
    try:
        yield
    finally:
        left = [child for child in psutil.Process().children(recursive=True) if child not in before]
        for child in left:
            with suppress(psutil.NoSuchProcess):
                child.terminate()
        for child in psutil.wait_procs(left, timeout=seconds)[1]:
            with suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.wait_procs(left, timeout=seconds)


class Stopped(BaseException):
    """A signal asks this rank to leave. Not an Exception, so that no `except Exception` on the way keeps it."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class StopHandler:
    """The first stop signal is handed to `request`, to stop at the next step; without one, or a second time, leave at once."""

    def __init__(self) -> None:
        self.request: Callable[[int], None] | None = None
        self.heard_at: float | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        first, now = self.heard_at is None, time.monotonic()
        self.heard_at = self.heard_at or now
        if first and self.request is not None:
            self.request(number)
        elif first or now - self.heard_at > ECHO_SECONDS:
            ignore_stop_signals()
            raise Stopped(number)


stop_handler = StopHandler()


def exit_after_stop_signal(seconds: float) -> None:
    """Leave `seconds` after a stop signal with exit code 128 + signal, unless `stop_handler` has heard of it by then.

    Python's own handlers run between bytecodes of the main thread, so a rank that waits in a collective would never
    see the signal; the C-level handler writes to this pipe at once.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)

    def watch() -> None:
        while True:
            for number in os.read(reading, 64):
                if number in STOP_SIGNALS:
                    time.sleep(seconds)
                    if stop_handler.heard_at is None:
                        os._exit(128 + number)

    threading.Thread(target=watch, name="stop-signal", daemon=True).start()


def ignore_stop_signals() -> None:
    """For loader workers: a signal to the whole process group must not kill them before their rank has saved."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)

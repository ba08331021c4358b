"""Tune the C libraries with which torch computes on a CPU: the memory allocator of glibc, and
OpenMP.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import torch

from timm_parallel.machine import hardware
from timm_parallel.machine.process import scheduled_seconds

LOOK_SECONDS = 1.0
# Limits of the time, in seconds per second, for which the threads of this process wait for a core.
# Above the first limit the cores are crowded, and below the second one they are free.
CROWDED, CALM = 0.5, 0.3
# Number of consecutive measurements of crowded cores before the threads sleep, and of free cores
# before they spin again.
CROWDED_LOOKS, CALM_LOOKS = 2, 3
USER_SETTINGS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


def keep_freed_memory() -> None:
    """Let glibc keep freed memory for the next tensors. This saves 6 to 25 % of a training step on
    a CPU (docs/dev/benchmarks.md).
    """
    # By default glibc returns large freed blocks to the kernel, so each step has to map their pages
    # again. Settings of the user (MALLOC_…) have priority.
    if sys.platform != "linux" or any(name.startswith("MALLOC_") for name in os.environ):
        return
    # Option numbers of the function mallopt, from malloc.h.
    M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        # Keep the default for blocks above 16 MiB, because they would fragment the heap.
        mallopt(M_MMAP_THRESHOLD, 16 * 2**20)
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


@cache
def watch_openmp_oversubscription(threads: int) -> OversubscriptionWatcher | None:
    """Start a thread that makes OpenMP threads sleep at barriers while other programs use the
    cores.

    Returns None, without starting it, if torch uses one thread, if the user configured OpenMP, or
    outside of Linux.
    """
    is_set = any(name in os.environ for name in USER_SETTINGS)
    if threads < 2 or is_set or not Path("/proc/self/schedstat").exists():
        return None
    watcher = OversubscriptionWatcher(threads)
    watcher.start()
    atexit.register(watcher.close)
    return watcher


class OversubscriptionWatcher(threading.Thread):
    """Thread that starts idle OpenMP teams while this process waits for cores.

    libgomp lets waiting threads sleep instead of spin if the process has more threads than the
    machine has cores. The idle teams raise the number of threads above this limit.
    """

    # On Linux, torch computes with OpenMP threads of libgomp. These threads spin for
    # milliseconds at every barrier before they sleep, which makes a run on free cores a quarter
    # faster. If another program takes a core, two threads often share one core, and each spins
    # while the other should work. In a measurement, a run then had 4 % of its speed. libgomp
    # spins only briefly if all thread teams of the process together have more threads than the
    # machine has cores. So this thread starts idle thread teams while threads of this process
    # wait for a core. The number of computing threads stays the same, so results stay equal bit
    # for bit.

    def __init__(
        self,
        threads: int,
        scheduled: Callable[[], tuple[float, float]] = scheduled_seconds,
        look_seconds: float = LOOK_SECONDS,
    ) -> None:
        """Configure the thread, without starting it. `threads`: number of threads per OpenMP team,
        as given to torch.set_num_threads.
        """
        super().__init__(name="crowding", daemon=True)
        # The smallest number of idle teams with which all teams together have more threads than the
        # machine has cores.
        self.teams_wanted = (hardware.cores() - threads) // (threads - 1) + 1
        self.idle: list[ThreadPoolExecutor] = []
        self._scheduled, self._look_seconds = scheduled, look_seconds
        self._closed = threading.Event()

    def close(self) -> None:
        """End the thread of the watcher and all idle thread teams that it has started.

        A thread that still runs torch while the interpreter shuts down would abort the process.
        """
        self._closed.set()
        self.join()
        self._end_teams()

    def run(self) -> None:
        crowded, calm, before, looked_at = 0, 0, self._scheduled()[1], time.monotonic()
        while not self._closed.wait(self._look_seconds):
            waited, now = self._scheduled()[1], time.monotonic()
            share = (waited - before) / (now - looked_at)
            before, looked_at = waited, now
            crowded = crowded + 1 if share > CROWDED else 0
            calm = calm + 1 if share < CALM else 0
            if crowded >= CROWDED_LOOKS and not self.idle:
                self._start_teams()
            elif calm >= CALM_LOOKS:
                self._end_teams()

    def _start_teams(self) -> None:
        self.idle = [ThreadPoolExecutor(1, "idle team") for _ in range(self.teams_wanted)]
        for thread in self.idle:
            # Add two tensors that are large enough for torch to use several threads. The calling
            # thread then keeps its own OpenMP team until it ends.
            thread.submit(lambda: torch.ones(2**20).add_(1))

    def _end_teams(self) -> None:
        while self.idle:
            self.idle.pop().shutdown()

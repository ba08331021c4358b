"""Let OpenMP threads sleep at barriers instead of spinning while other programs use cores of this
machine.
"""

# libgomp, with which torch computes on Linux, spins for milliseconds at every barrier before it
# sleeps. On free cores a run is a quarter faster by that. If another program takes a core, two
# threads of a team often share one, and each spins while the other would work: 4 % of the speed
# were left. libgomp spins only briefly if it has more threads than the machine has cores, counted
# over all teams of the process. So while threads of this process wait for a core, it keeps teams
# that do nothing. The number of threads that compute stays the same, and so do the bits.

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import torch

from timm_parallel.machine import hardware
from timm_parallel.machine.usage import scheduled_seconds

LOOK_SECONDS = 1.0
CROWDED, CALM = 0.5, 0.3  # seconds per second that the threads of this process wait for a core
CROWDED_LOOKS, CALM_LOOKS = 2, 3  # in a row, before the threads sleep, and before they spin again
USER_SETTINGS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


@cache
def watch_openmp_oversubscription(threads: int) -> OversubscriptionWatcher | None:
    """Start an OversubscriptionWatcher; None with one thread, if the user configured OpenMP, or
    outside Linux.
    """
    is_set = any(name in os.environ for name in USER_SETTINGS)
    if threads < 2 or is_set or not Path("/proc/self/schedstat").exists():
        return None
    watcher = OversubscriptionWatcher(threads)
    watcher.start()
    atexit.register(watcher.close)
    return watcher


class OversubscriptionWatcher(threading.Thread):
    """Thread that starts idle OpenMP teams while this process waits for cores, which lets its
    threads sleep at barriers.
    """

    def __init__(
        self,
        threads: int,
        scheduled: Callable[[], tuple[float, float]] = scheduled_seconds,
        look_seconds: float = LOOK_SECONDS,
    ) -> None:
        """`threads`: of a team, as given to torch.set_num_threads."""
        super().__init__(name="crowding", daemon=True)
        # With the computing team, more threads than cores.
        self.teams_wanted = (hardware.cores() - threads) // (threads - 1) + 1
        self.idle: list[ThreadPoolExecutor] = []
        self._scheduled, self._look_seconds = scheduled, look_seconds
        self._closed = threading.Event()

    def close(self) -> None:
        """End all threads, which would abort the process if they ran torch while the interpreter
        shuts down.
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
            # Large enough that torch computes it in parallel. From then on the thread has a team,
            # until it ends.
            thread.submit(lambda: torch.ones(2**20).add_(1))

    def _end_teams(self) -> None:
        while self.idle:
            self.idle.pop().shutdown()

"""Beside a busy neighbour, OpenMP's threads sleep at their barriers instead of spinning there.

libgomp, whose threads torch computes with on Linux, spins for milliseconds at every barrier before it sleeps. On cores of
its own a run gains a quarter by that. Where another program takes one, two threads of a team often share a core, and each
spins while the other would work: 4 % of the speed were left. libgomp spins only briefly where it has more threads than the
machine has cores, and it counts all teams of the process: so, while this process's threads have to wait for a core, a
team that does nothing is kept beside its own. The threads that compute are as many as before, and so the bits the same.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch

from src.engine.machine import hardware

LOOK_SECONDS = 1.0
CROWDED, CALM = 0.5, 0.3  # seconds per second that the threads of this process wait for a core
CROWDED_LOOKS, CALM_LOOKS = 2, 3  # one after the other, before the threads sleep, and before they spin again
USERS_OWN = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


def seconds_waited() -> float:
    """How long the threads of this process were ready to run while other threads had the cores; Linux tells it."""
    total = 0
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it has ended meanwhile
            total += int((task / "schedstat").read_text().split()[1])
    return total / 1e9


@cache
def give_way(threads: int) -> Crowding | None:
    """Watch from now on; None where there is nothing to watch: one thread, the user's own setting, another system."""
    known = sys.platform == "linux" and Path("/proc/self/schedstat").exists()
    if threads < 2 or not known or any(name in os.environ for name in USERS_OWN):
        return None
    crowding = Crowding(threads)
    crowding.start()
    atexit.register(crowding.close)
    return crowding


class Crowding(threading.Thread):
    """Keeps the idle teams while threads have to wait for a core."""

    def __init__(
        self, threads: int, waited: Callable[[], float] = seconds_waited, look_seconds: float = LOOK_SECONDS
    ) -> None:
        """`threads`: of a team, as given to torch.set_num_threads."""
        super().__init__(name="crowding", daemon=True)
        self.teams_wanted = (hardware.cores() - threads) // (threads - 1) + 1  # more threads than cores, with our own
        self.idle: list[ThreadPoolExecutor] = []
        self._waited, self._look_seconds = waited, look_seconds
        self._over = threading.Event()

    def close(self) -> None:
        """End all threads of this: one inside torch while the interpreter shuts down would abort the process."""
        self._over.set()
        self.join()
        self._end_teams()

    def run(self) -> None:
        crowded, calm, before, looked_at = 0, 0, self._waited(), time.monotonic()
        while not self._over.wait(self._look_seconds):
            waited, now = self._waited(), time.monotonic()
            share = (waited - before) / (now - looked_at)
            before, looked_at = waited, now
            crowded, calm = crowded + 1 if share > CROWDED else 0, calm + 1 if share < CALM else 0
            if crowded >= CROWDED_LOOKS and not self.idle:
                self.idle = [idle_team() for _ in range(self.teams_wanted)]
            elif calm >= CALM_LOOKS:
                self._end_teams()

    def _end_teams(self) -> None:
        while self.idle:
            self.idle.pop().shutdown()


def idle_team() -> ThreadPoolExecutor:
    """A thread that has once computed in parallel, and with that has a team of its own, which lives as long as it does."""
    team = ThreadPoolExecutor(1, "idle team")
    team.submit(lambda: torch.ones(2**20).add_(1))  # large enough to be shared out
    return team

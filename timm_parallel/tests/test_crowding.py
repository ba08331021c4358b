"""Tests of the OpenMP watcher. OpenMP threads sleep at barriers while another program uses one of
their cores, and otherwise spin, which is faster.
"""

from __future__ import annotations

import atexit
import sys
import threading
import time
from collections.abc import Callable

import pytest

from timm_parallel.machine import hardware
from timm_parallel.machine.process import scheduled_seconds
from timm_parallel.parallel.cpu_tuning import OversubscriptionWatcher, watch_openmp_oversubscription

linux = pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux reports how long threads wait"
)


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def idle_teams() -> int:
    return sum(thread.name.startswith("idle team") for thread in threading.enumerate())


def test_openmp_watcher_adds_idle_openmp_threads_when_training_threads_wait_for_a_cpu_core(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hardware, "cores", lambda: 8)
    # Simulated time that the OpenMP threads wait for a core, in seconds per second.
    pace = 0.0
    waited, moved_at = 0.0, time.monotonic()

    def scheduled() -> tuple[float, float]:
        nonlocal waited, moved_at
        now = time.monotonic()
        waited, moved_at = waited + pace * (now - moved_at), now
        return 0.0, waited

    watcher = OversubscriptionWatcher(4, scheduled, look_seconds=0.02)
    assert 4 + 3 * watcher.teams_wanted > 8 >= 4 + 3 * (watcher.teams_wanted - 1), (
        "expected the fewest idle teams that have more threads than cores"
    )
    watcher.start()
    time.sleep(0.2)
    assert not watcher.idle
    pace = 1.0
    wait_for(lambda: len(watcher.idle) == watcher.teams_wanted == idle_teams())
    # Simulate a waiting time between the two thresholds of the watcher. The watcher must keep its
    # idle thread teams.
    pace = 0.4
    time.sleep(0.3)
    assert len(watcher.idle) == watcher.teams_wanted
    pace = 0.0
    wait_for(lambda: not watcher.idle and not idle_teams())
    pace = 1.0
    wait_for(lambda: bool(watcher.idle))
    watcher.close()
    assert not watcher.is_alive() and not idle_teams()


@linux
def test_openmp_watcher_thread_is_ended_by_an_atexit_handler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A thread that runs torch code during interpreter shutdown aborts the process."""
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    at_exit: list[Callable[[], None]] = []
    monkeypatch.setattr(atexit, "register", at_exit.append)
    watch_openmp_oversubscription.cache_clear()
    watcher = watch_openmp_oversubscription(2)
    watch_openmp_oversubscription.cache_clear()
    assert watcher is not None and watcher.is_alive()
    used, waited = scheduled_seconds()
    assert used > 0 and waited >= 0
    for close in at_exit:
        close()
    assert not watcher.is_alive()


def test_openmp_watcher_does_not_start_for_one_thread_or_when_the_user_sets_how_threads_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert watch_openmp_oversubscription(1) is None
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        with monkeypatch.context() as patch:
            patch.setenv(name, "1")
            watch_openmp_oversubscription.cache_clear()
            assert watch_openmp_oversubscription(2) is None
    watch_openmp_oversubscription.cache_clear()

"""Concurrent jobs share a machine. The device scheduler must never assign a device twice, never
starve a large job, and leave no usable device idle. OpenMP threads sleep at barriers while another
program uses one of their cores, and otherwise spin, which is faster.
"""

from __future__ import annotations

import atexit
import random
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from timm_parallel.lab.jobs.scheduler import DeviceScheduler, Requirement
from timm_parallel.machine import hardware
from timm_parallel.machine.process import scheduled_seconds
from timm_parallel.parallel.cpu_tuning import OversubscriptionWatcher, watch_openmp_oversubscription

EIGHT = {"cuda": [f"GPU-{number}" for number in range(8)]}


def cuda(count: int, alone: bool = False) -> Requirement:
    return Requirement("cuda", count, alone)


def play(
    needs: list[Requirement],
    seconds: list[float],
    machine: dict[str, list[str]],
    max_jobs: int | None = None,
) -> list[Any]:
    """Simulate the scheduler with jobs of the given durations, and check it whenever a job
    starts or ends. Return (start, end, job, devices) of every job.
    """
    scheduler, now, waiting = DeviceScheduler(machine, max_jobs), 0.0, dict(enumerate(needs))
    running: dict[int, tuple[float, list[str]]] = {}
    schedule: list[Any] = []
    first_refused: dict[int, float] = {}
    while waiting or running:
        while chosen := scheduler.start_next(list(waiting.items())):
            job, names = chosen
            assert len(names) == min(waiting.pop(job).count, len(machine["cuda"]))
            running[job] = (now + seconds[job], names)
            schedule.append((now, now + seconds[job], job, names))
        assert max_jobs is None or len(running) <= max_jobs
        held = [name for _, names in running.values() for name in names]
        assert len(held) == len(set(held)), "a device was assigned twice"
        idle = len(machine["cuda"]) - len(held)
        # A device may be idle only if it is reserved for the largest waiting job.
        if idle and waiting and max_jobs is None:
            largest = max(need.count for need in waiting.values())
            assert largest > idle, f"{idle} devices idle at {now} though a job of {largest} waits"
            first_refused.setdefault(
                next(job for job, need in waiting.items() if need.count == largest), now
            )
        now = min(end for end, _ in running.values())
        for job in [job for job, (end, _) in running.items() if end == now]:
            del running[job]
            scheduler.release(job)
    assert {kind: scheduler.free(kind) for kind in machine} == {
        kind: list(names) for kind, names in machine.items()
    }
    # A job with reserved devices may wait only for the jobs that ran when the devices were
    # reserved.
    for job, refused in first_refused.items():
        start = next(entry[0] for entry in schedule if entry[2] == job)
        assert start <= max(entry[1] for entry in schedule if entry[0] <= refused), (
            "another job took the reserved devices"
        )
    return schedule


def test_device_scheduler_never_shares_a_gpu_or_starves_a_large_job() -> None:
    draw = random.Random(0)
    for _ in range(200):
        needs = [cuda(draw.choice((1, 1, 1, 2, 3, 4, 8))) for _ in range(draw.randint(1, 20))]
        play(needs, [draw.uniform(1, 9) for _ in needs], EIGHT, draw.choice((None, None, 1, 3)))


def test_device_scheduler_runs_cpu_jobs_next_to_gpu_jobs_but_an_exclusive_job_alone() -> None:
    scheduler, cpu = DeviceScheduler({"cuda": ["a", "b"], "cpu": ["0", "1"]}), Requirement("cpu", 1)
    assert scheduler.start_next([(0, cuda(1))]) == (0, ["a"])
    assert scheduler.start_next([(1, cuda(2)), (2, cpu), (3, cuda(1))]) == (2, ["0"])
    # The remaining device is reserved for job 1.
    assert scheduler.start_next([(1, cuda(2)), (3, cuda(1))]) is None
    alone = (4, cuda(1, alone=True))
    assert scheduler.start_next([alone]) is None
    scheduler.release(0)
    scheduler.release(2)
    assert scheduler.start_next([(1, cuda(2))]) == (1, ["a", "b"])
    # A job on the CPU starts although all GPUs are in use.
    assert scheduler.start_next([(3, cuda(1)), (2, cpu)]) == (2, ["0"])
    scheduler.release(1)
    scheduler.release(2)
    assert scheduler.start_next([alone]) == (4, ["a", "b"])
    assert scheduler.start_next([(2, cpu)]) is None


def test_device_scheduler_starts_jobs_in_order_when_max_jobs_is_1() -> None:
    scheduler, all_cores = DeviceScheduler({"cpu": ["0", "1"]}, max_jobs=1), Requirement("cpu", 4)
    assert scheduler.start_next([(0, Requirement("cpu", 1)), (1, all_cores)]) == (0, ["0"])
    assert scheduler.start_next([(1, all_cores)]) is None
    scheduler.release(0)
    assert scheduler.start_next([(1, all_cores)]) == (1, ["0", "1"])


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

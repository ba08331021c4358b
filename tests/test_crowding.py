"""Where another program takes a core, a run's threads sleep at their barriers; on cores of its own they spin there."""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest

from src.engine.machine import hardware
from src.parallel.crowding import Crowding, give_way, seconds_waited

linux = pytest.mark.skipif(sys.platform != "linux", reason="Linux tells how long threads wait")


def wait_for(what: Callable[[], bool], seconds: float = 10) -> None:
    until = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < until
        time.sleep(0.01)


def idle_teams() -> int:
    return sum(thread.name.startswith("idle team") for thread in threading.enumerate())


def test_teams_come_while_threads_wait_and_go_when_they_do_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "cores", lambda: 8)
    pace = 0.0  # seconds waited per second
    waited, moved_at = 0.0, time.monotonic()

    def clock() -> float:
        nonlocal waited, moved_at
        now = time.monotonic()
        waited, moved_at = waited + pace * (now - moved_at), now
        return waited

    crowding = Crowding(4, clock, look_seconds=0.02)
    assert 4 + 3 * crowding.teams_wanted > 8 >= 4 + 3 * (crowding.teams_wanted - 1), "more threads than cores, just"
    crowding.start()
    time.sleep(0.2)
    assert not crowding.idle
    pace = 1.0
    wait_for(lambda: len(crowding.idle) == crowding.teams_wanted == idle_teams())
    pace = 0.4  # neither crowded nor calm
    time.sleep(0.3)
    assert len(crowding.idle) == crowding.teams_wanted
    pace = 0.0
    wait_for(lambda: not crowding.idle and not idle_teams())
    pace = 1.0
    wait_for(lambda: bool(crowding.idle))
    crowding.close()
    assert not crowding.is_alive() and not idle_teams()


@linux
def test_its_threads_end_before_the_interpreter_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is inside torch while the interpreter shuts down aborts the process."""
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    at_exit: list[Callable[[], None]] = []
    monkeypatch.setattr(atexit, "register", at_exit.append)
    give_way.cache_clear()
    crowding = give_way(2)
    give_way.cache_clear()
    assert crowding is not None and crowding.is_alive()
    for close in at_exit:
        close()
    assert not crowding.is_alive()


@pytest.mark.parametrize("name", ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT"])
def test_the_users_own_setting_stays(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "1")
    give_way.cache_clear()
    assert give_way(2) is None
    give_way.cache_clear()


def test_one_thread_has_nobody_to_wait_for() -> None:
    assert give_way(1) is None


@linux
def test_a_thread_that_waits_for_a_core_is_counted() -> None:
    """As many busy processes as it takes, on one core with this one."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        waited, until = seconds_waited(), time.monotonic() + 1
        while time.monotonic() < until:
            pass
        assert 0.2 < seconds_waited() - waited < 2.0
    finally:
        os.sched_setaffinity(0, before)
        for process in busy:
            process.kill()
            process.wait()


ON_ONE_CORE = """
import os, sys, time, torch
from src.parallel import crowding
torch.set_num_threads(2)
numbers = torch.zeros(2**17)
def steps(seconds):
    count, until = 0, time.monotonic() + seconds
    while time.monotonic() < until:
        numbers.add_(1)
        count += 1
    return count / seconds
steps(0.1)
core = min(os.sched_getaffinity(0))
for task in os.listdir("/proc/self/task"):
    os.sched_setaffinity(int(task), {core})  # after OpenMP has counted the cores: as if a neighbour had the other one
spinning = steps(1.5)
crowding.LOOK_SECONDS = 0.2
watch = crowding.Crowding(2, look_seconds=0.2)
watch.teams_wanted = os.cpu_count()  # OpenMP has counted them all
watch.start()
until = time.monotonic() + 20
while not watch.idle and time.monotonic() < until:
    steps(0.1)
assert watch.idle, "it has not noticed"
time.sleep(0.2)
print(spinning, steps(1.5))
"""


@pytest.mark.slow
@linux
@pytest.mark.processes
@pytest.mark.skipif(hardware.cores() < 2, reason="one core")
def test_two_threads_on_one_core_no_longer_spin_against_each_other() -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_"))}
    command = [sys.executable, "-c", ON_ONE_CORE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    spinning, sleeping = map(float, done.stdout.split())
    assert sleeping > 3 * spinning, f"{spinning:.0f} steps per second, then {sleeping:.0f}"

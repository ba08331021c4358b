"""Which job starts next, and on which devices: none is given twice, large jobs are not starved, the rest is put to use."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from src.engine.sweep.packing import Need, Packing

EIGHT = {"cuda": [f"GPU-{number}" for number in range(8)]}


def cuda(count: int, alone: bool = False) -> Need:
    return Need("cuda", count, alone)


def play(needs: list[Need], seconds: list[float], machine: dict[str, list[str]], most: int | None = None) -> list[Any]:
    """(start, end, job, devices) of every job on a mocked machine; looks at the machine at every moment of change."""
    packing, now, waiting = Packing(machine, most), 0.0, dict(enumerate(needs))
    running: dict[int, tuple[float, list[str]]] = {}
    schedule: list[Any] = []
    first_refused: dict[int, float] = {}
    while waiting or running:
        while chosen := packing.start_next(list(waiting.items())):
            job, names = chosen
            assert len(names) == min(waiting.pop(job).count, len(machine["cuda"]))
            running[job] = (now + seconds[job], names)
            schedule.append((now, now + seconds[job], job, names))
        held = [name for _, names in running.values() for name in names]
        assert len(held) == len(set(held)), "a device was given twice"
        idle = len(machine["cuda"]) - len(held)
        if idle and waiting and most is None:  # then the largest that waits is reserved, and all that fit wait for it
            largest = max(need.count for need in waiting.values())
            assert largest > idle, f"{idle} devices idle at {now} though a job of {largest} waits"
            first_refused.setdefault(next(job for job, need in waiting.items() if need.count == largest), now)
        now = min(end for end, _ in running.values())
        for job in [job for job, (end, _) in running.items() if end == now]:
            del running[job]
            packing.release(job)
    assert {kind: packing.free(kind) for kind in machine} == {kind: list(names) for kind, names in machine.items()}
    for job, refused in first_refused.items():  # what ran when it was reserved ends, and then it starts
        start = next(entry[0] for entry in schedule if entry[2] == job)
        assert start <= max(entry[1] for entry in schedule if entry[0] <= refused), "a reserved job was passed by"
    return schedule


def test_eight_devices_are_packed(capsys: pytest.CaptureFixture[str]) -> None:
    needs = [cuda(count) for count in (1, 1, 2, 4, 1, 4, 2, 1, 1, 4, 2, 1)]
    seconds = [3.0, 2, 4, 5, 1, 3, 2, 4, 2, 4, 3, 1]
    schedule = play(needs, seconds, EIGHT)
    for start, end, job, names in schedule:
        print(f"{start:5.1f} to {end:5.1f} s: job {job:2d} on {', '.join(names)}")
    assert len(schedule) == 12
    busy = sum((end - start) * len(names) for start, end, _, names in schedule)
    assert busy / (8 * max(end for _, end, _, _ in schedule)) > 0.8
    assert [job for _, _, job, _ in schedule][:2] == [3, 5], "the largest first"


def test_no_schedule_gives_a_device_twice_or_starves_a_large_job() -> None:
    draw = random.Random(0)
    for _ in range(200):
        needs = [cuda(draw.choice((1, 1, 1, 2, 3, 4, 8))) for _ in range(draw.randint(1, 20))]
        play(needs, [draw.uniform(1, 9) for _ in needs], EIGHT, draw.choice((None, None, 1, 3)))


def test_a_large_job_is_not_starved_by_small_ones_that_come_later() -> None:
    packing = Packing(EIGHT)
    for job in range(6):
        assert packing.start_next([(job, cuda(1))])
    waiting = [(10, cuda(4)), *((job, cuda(1)) for job in range(11, 99))]
    assert packing.start_next(waiting) is None, "2 devices are free, and reserved"
    for job in (0, 1):
        packing.release(job)
    assert packing.start_next(waiting) == (10, ["GPU-0", "GPU-1", "GPU-6", "GPU-7"])


def test_kinds_do_not_wait_for_each_other_and_alone_means_alone() -> None:
    packing = Packing({"cuda": ["a", "b"], "cpu": ["0", "1"]})
    assert packing.start_next([(0, cuda(1))]) == (0, ["a"])
    assert packing.start_next([(1, cuda(2)), (2, Need("cpu", 1)), (3, cuda(1))]) == (2, ["0"])
    assert packing.start_next([(1, cuda(2)), (3, cuda(1))]) is None, "reserved for 1"
    assert packing.start_next([(4, cuda(1, alone=True))]) is None
    packing.release(0)
    packing.release(2)
    assert packing.start_next([(1, cuda(2))]) == (1, ["a", "b"])
    assert packing.start_next([(3, cuda(1)), (2, Need("cpu", 1))]) == (2, ["0"]), (
        "the GPUs are taken, the cores are not"
    )
    packing.release(1)
    packing.release(2)
    assert packing.start_next([(4, cuda(1, alone=True))]) == (4, ["a", "b"])
    assert packing.start_next([(2, Need("cpu", 1))]) is None, "beside one that is to be alone"


def test_one_at_a_time_keeps_the_order_and_more_ranks_than_cores_have_them_all() -> None:
    packing = Packing({"cpu": ["0", "1"]}, most=1)
    assert packing.start_next([(0, Need("cpu", 1)), (1, Need("cpu", 4))]) == (0, ["0"])
    assert packing.start_next([(1, Need("cpu", 4))]) is None
    packing.release(0)
    assert packing.start_next([(1, Need("cpu", 4))]) == (1, ["0", "1"])


def test_a_job_without_memory_waits_unless_nothing_runs() -> None:
    packing = Packing(EIGHT)
    short: Callable[[int], bool] = lambda job: False  # noqa: E731
    assert packing.start_next([(0, cuda(1)), (1, cuda(1))], short) == (0, ["GPU-0"])
    assert packing.start_next([(1, cuda(1))], short) is None
    packing.release(0)
    assert packing.start_next([(1, cuda(1))], short) == (1, ["GPU-0"])

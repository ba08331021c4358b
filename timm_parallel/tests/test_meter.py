"""Test the throughput meter: images per second, parts of the step time, energy, and step times
on a GPU, which are measured over intervals of several steps.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from timm_parallel.machine import process
from timm_parallel.machine.process import StartClock, describe_start
from timm_parallel.run import meter as module
from timm_parallel.run import telemetry
from timm_parallel.run.meter import Meter


class Time:
    """Fake clock that the test advances."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now


class Gpu:
    """Fake GPU that executes queued steps one after the other. Each step takes `seconds`, while
    the process that queued it continues.
    """

    def __init__(self, time: Time, seconds: float) -> None:
        self.clock, self.seconds, self.done_at, self.waits = time, seconds, time.now, 0

    def record(self) -> None:
        self.done_at = max(self.done_at, self.clock.now) + self.seconds

    def query(self) -> bool:
        return self.clock.now >= self.done_at

    def synchronize(self) -> None:
        self.waits += 1
        self.clock.now = max(self.clock.now, self.done_at)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Time:
    time = Time()
    monkeypatch.setattr(module, "time", time)
    monkeypatch.setattr(process, "time", time)
    monkeypatch.setattr(telemetry, "time", time)
    return time


def train(
    meter: Meter,
    clock: Time,
    steps: Iterable[float],
    fetch: float = 0.0,
    log_every: int = 10,
    logging: float = 0.0,
) -> None:
    """Run steps that each keep the CPU busy for the given number of seconds of the fake clock."""
    steps = list(steps)
    for number, seconds in enumerate(steps, 1):
        meter.start_fetch()
        clock.now += fetch
        meter.end_fetch()
        clock.now += seconds
        meter.end_step()
        if number % log_every == 0 or number == len(steps):
            device: Any = meter._clock
            if device is not None:
                clock.now = max(clock.now, device.done_at)
            meter.synchronized()
            clock.now += logging


def test_throughput_after_the_warm_up_is_all_images_divided_by_all_seconds(
    clock: Time,
) -> None:
    """Each burst has nine steps of 0.01 s and one step of 1 s. Throughput from the median step
    time would ignore the slow steps.
    """
    meter = Meter(64, 50)
    train(meter, clock, [0.01] * 10 + ([0.01] * 9 + [1.0]) * 4)
    measured = meter.throughput()
    assert measured["images_per_sec"] == pytest.approx(64 * 40 / (36 * 0.01 + 4))
    assert measured["step_ms"] == pytest.approx(10)
    assert measured["step_ms_p95"] == pytest.approx(1000)
    assert (measured["steps_timed"], measured["seconds_timed"]) == (40, pytest.approx(4.36))


def test_time_and_energy_of_timed_steps_include_data_and_logging_but_no_evaluation(
    clock: Time,
) -> None:
    # A GPU that draws 10 W, and 1000 W from second 1000 on.
    gpu: Any = SimpleNamespace(uuid="GPU-a")
    gpu.joules = lambda: 10 * clock.now + 990 * max(0.0, clock.now - 1000)
    energy = telemetry.Energy([gpu])
    meter = Meter(1, 60, energy=energy)
    train(meter, clock, [0.1] * 30, fetch=0.05, logging=0.2)
    with meter.paused():
        clock.now += 2000
    train(meter, clock, [0.1] * 30, fetch=0.05, logging=0.2)
    with meter.paused():
        measured = meter.throughput()
    assert measured["steps_timed"] == 50
    # The expected time excludes the logging after the last step.
    assert measured["seconds_timed"] == pytest.approx(50 * 0.15 + 5 * 0.2)
    assert meter.data_seconds == pytest.approx(50 * 0.05)
    assert meter.other_seconds == pytest.approx(5 * 0.2)
    assert meter.data_wait() == pytest.approx(2.5 / 8.5)
    window, _ = energy.by_gpu()["GPU-a"]
    assert window == pytest.approx((20 * 0.15 + 3 * 0.2) * 10 + (30 * 0.15 + 3 * 0.2) * 1000)


def test_throughput_of_halves_and_of_the_steps_between_the_last_two_logged_steps(
    clock: Time,
) -> None:
    meter = Meter(10, 50)
    train(meter, clock, [9.0] * 10)
    assert meter.recent() is None
    train(meter, clock, [0.1] * 20)
    assert meter.recent() == pytest.approx(100)
    train(meter, clock, [0.2] * 20)
    assert meter.recent() == pytest.approx(50)
    assert meter.throughput()["halves"] == pytest.approx([100, 50])


def test_first_gpu_step_and_start_of_the_timed_steps_are_recorded_before_any_step_is_logged(
    clock: Time,
) -> None:
    started_at: list[float] = []
    gpu: Any = Gpu(clock, 3.0)
    meter = Meter(1, 100, gpu, start_measuring=lambda: started_at.append(clock.now))
    train(meter, clock, [0.001] * 100, log_every=100)
    assert (meter.first_step_at, meter.first_fetch) == (pytest.approx(103.001), 0)
    assert started_at == [pytest.approx(130, abs=0.01)]
    assert meter.throughput()["steps_timed"] == 90
    assert gpu.waits == 2, (
        "the process may wait only after the first step and at the start of the measurement"
    )
    for steps, untimed in ((1, 1), (3, 1), (4, 1), (12, 3), (40, 10), (10_000, 10)):
        assert Meter(1, steps)._warm_up == untimed


def test_parts_of_the_start_add_up_to_the_time_of_the_first_step(
    clock: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock.now += 1000
    monkeypatch.setenv("RUN_STARTED_AT", str(clock.now))
    began, start = clock.now, StartClock()
    for part, seconds in (("launch", 2.0), ("data", 3.0), ("setup", 0.5)):
        clock.now += seconds
        start.end(part)
    meter = Meter(1, 100)
    train(meter, clock, [0.25] * 5, fetch=1.5)
    # A later epoch, or another dataset, does not change the parts.
    start.end("data")
    assert meter.first_fetch is not None and meter.first_step_at is not None
    parts = start.until_first_step(meter.first_fetch, meter.first_step_at)
    assert list(parts.values()) == pytest.approx([2, 3, 0.5, 1.5, 0.25])
    assert list(parts) == ["launch", "data", "setup", "first_batch", "first_step"]
    assert sum(parts.values()) == pytest.approx(meter.first_step_at - began)
    assert describe_start(parts).startswith("7.2 s to")


@pytest.mark.parametrize(
    ("fetch", "step", "waited"), [(0.03, 0.1, 0.0), (0.2, 0.1, 0.1), (0.2, 0.0, 0.2)]
)
def test_gpu_data_wait_counts_only_the_time_in_which_the_gpu_is_idle(
    clock: Time, fetch: float, step: float, waited: float
) -> None:
    """Waiting for data costs nothing while the GPU still computes the previous step. If the GPU
    becomes idle during the wait, half of the wait counts.
    """
    meter = Meter(1, 50, Gpu(clock, step))  # type: ignore[arg-type]
    train(meter, clock, [0.0] * 50, fetch=fetch)
    assert meter.data_seconds / meter.steps_timed == pytest.approx(waited, abs=0.02)


def test_step_time_quantiles_from_intervals_of_several_steps_match_those_of_single_steps(
    clock: Time,
) -> None:
    """The intervals have 1, 5 and 4 steps. The median is the fifth of the ten sorted step times,
    and the 95 % quantile is the tenth.
    """
    meter = Meter(1, 11, Gpu(clock, 0.0), untimed=1)  # type: ignore[arg-type]
    for seconds, steps in ((0.0, 1), (3.0, 1), (1.0, 5), (2.0, 4)):
        train(meter, clock, [seconds] * steps, log_every=steps)
    measured = meter.throughput()
    milliseconds = sorted([3000.0] + [1000.0] * 5 + [2000.0] * 4)
    assert measured["step_ms"] == pytest.approx(milliseconds[4])
    assert measured["step_ms_p95"] == pytest.approx(milliseconds[9])


def test_throughput_is_none_when_run_ends_in_warm_up(clock: Time) -> None:
    meter = Meter(64, 1)
    train(meter, clock, [1.0])
    measured = meter.throughput()
    assert measured["images_per_sec"] is measured["step_ms"] is None
    assert (measured["steps_timed"], measured["halves"]) == (0, [None, None])
    assert meter.data_wait() is None and meter.recent() is None

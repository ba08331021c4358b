"""The throughput is images over seconds, its parts add up, and a GPU's intervals weigh as many steps as they hold."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any

import pytest

from src.engine.machine import usage
from src.engine.record import meter as module
from src.engine.record.meter import Clock, Meter


class Time:
    """A clock that only moves when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now


class Gpu(Clock):
    """A device that does its steps one after the other, `seconds` each, while its process goes on."""

    def __init__(self, time: Time, seconds: float) -> None:
        self.clock, self.seconds, self.done_at, self.waits = time, seconds, time.now, 0

    def step_ends(self) -> None:
        self.done_at = max(self.done_at, self.clock.now) + self.seconds

    def is_idle(self) -> bool:
        return self.clock.now >= self.done_at

    def wait(self) -> None:
        self.waits += 1
        self.clock.now = max(self.clock.now, self.done_at)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Time:
    time = Time()
    monkeypatch.setattr(module, "time", time)
    monkeypatch.setattr(usage, "time", time)
    return time


def train(
    meter: Meter, clock: Time, steps: Iterable[float], fetch: float = 0.0, log_every: int = 10, logging: float = 0.0
) -> None:
    """Steps that keep this process busy for so many seconds each."""
    steps = list(steps)
    for number, seconds in enumerate(steps, 1):
        meter.fetch_begins()
        clock.now += fetch
        meter.fetch_ends()
        clock.now += seconds
        meter.step_ends()
        if number % log_every == 0 or number == len(steps):
            device: Any = meter._clock
            if device is not None:
                clock.now = max(clock.now, device.done_at)
            meter.synchronised()
            clock.now += logging


def test_throughput_is_images_over_seconds_and_no_median(clock: Time) -> None:
    """Bursts: nine quick steps and a slow one. The median says 64 images in 0.01 s."""
    meter = Meter(64, 50)
    train(meter, clock, [0.01] * 10 + ([0.01] * 9 + [1.0]) * 4)
    found = meter.throughput()
    assert found["images_per_sec"] == pytest.approx(64 * 40 / (36 * 0.01 + 4))
    assert found["step_ms"] == pytest.approx(10)
    assert found["step_ms_p95"] == pytest.approx(1000)
    assert (found["steps_timed"], found["seconds_timed"]) == (40, pytest.approx(4.36))


def test_waiting_for_data_and_logging_are_in_the_window_evaluation_and_saving_are_not(clock: Time) -> None:
    meter = Meter(1, 60)
    train(meter, clock, [0.1] * 30, fetch=0.05, logging=0.2)
    meter.pause()
    clock.now += 1000
    meter.resume()
    train(meter, clock, [0.1] * 30, fetch=0.05, logging=0.2)
    found = meter.throughput()
    assert found["steps_timed"] == 50
    assert found["seconds_timed"] == pytest.approx(50 * 0.15 + 5 * 0.2)  # not the logging after the last step
    assert meter.data_seconds == pytest.approx(50 * 0.05)
    assert meter.other_seconds == pytest.approx(5 * 0.2)
    assert meter.data_wait() == pytest.approx(2.5 / 8.5)


def test_the_halves_of_a_run_tell_drift(clock: Time) -> None:
    meter = Meter(10, 50)
    train(meter, clock, [9.0] * 10 + [0.1] * 20 + [0.2] * 20)
    assert meter.throughput()["halves"] == pytest.approx([100, 50])


def test_recent_is_between_the_last_two_boundaries(clock: Time) -> None:
    meter = Meter(10, 40)
    train(meter, clock, [1.0] * 10)
    assert meter.recent() is None
    train(meter, clock, [0.1] * 10)
    assert meter.recent() == pytest.approx(100)
    train(meter, clock, [0.2] * 10)
    assert meter.recent() == pytest.approx(50)


def test_on_a_gpu_an_interval_of_one_step_does_not_weigh_as_one_of_ten(clock: Time) -> None:
    """39 steps an epoch: intervals of 10, 10, 10 and 9; and of one step where a checkpoint is saved after step 31."""
    meter = Meter(1, 111, Gpu(clock, 0.1))
    for _ in range(3):
        train(meter, clock, [0.0] * 30, logging=0.0)
        train(meter, clock, [0.0], fetch=0.9)  # a slow interval of one step
        train(meter, clock, [0.0] * 6, logging=0.0)
    found = meter.throughput()
    assert found["step_ms"] == pytest.approx(100)
    assert found["images_per_sec"] == pytest.approx(found["steps_timed"] / found["seconds_timed"])
    intervals = [1000 * s / n for s, n in zip(meter._seconds, meter._steps, strict=True)]
    assert statistics.quantiles(intervals, n=20)[-1] > 1.5 * found["step_ms_p95"], "what counting intervals would say"


def test_on_a_gpu_the_first_step_is_the_first_step_and_not_the_first_boundary(clock: Time) -> None:
    gpu = Gpu(clock, 3.0)
    meter = Meter(1, 100, gpu)
    train(meter, clock, [0.001] * 100)
    assert meter.first_step_at == pytest.approx(103.001)
    assert gpu.waits == 2, "after the first step and at the window's start; else nothing waits for the device"


def test_the_window_opens_after_ten_steps_also_between_two_boundaries(clock: Time) -> None:
    opened: list[float] = []
    meter = Meter(1, 100, Gpu(clock, 1.0), window_opens=lambda: opened.append(clock.now))
    train(meter, clock, [0.0] * 100, log_every=100)
    assert opened == [pytest.approx(110)]
    assert meter.throughput()["steps_timed"] == 90


@pytest.mark.parametrize(("fetch", "step", "waited"), [(0.03, 0.1, 0.0), (0.2, 0.1, 0.1), (0.2, 0.0, 0.2)])
def test_on_a_gpu_waiting_for_data_counts_while_the_device_has_nothing_to_do(
    clock: Time, fetch: float, step: float, waited: float
) -> None:
    """Hidden behind the step before it, it costs nothing. Half of a wait counts in which the device ran dry."""
    meter = Meter(1, 50, Gpu(clock, step))
    train(meter, clock, [0.0] * 50, fetch=fetch)
    assert meter.data_seconds / meter.steps_timed == pytest.approx(waited, abs=0.02)


def test_quantiles_are_those_of_the_steps_written_out(clock: Time) -> None:
    """Intervals of 1, 5 and 4 steps: the median is of the fifth step, and 95 % of ten steps are all ten."""
    meter = Meter(1, 11, Gpu(clock, 0.0), untimed=1)
    for seconds, steps in ((0.0, 1), (3.0, 1), (1.0, 5), (2.0, 4)):
        train(meter, clock, [seconds] * steps, log_every=steps)
    found = meter.throughput()
    written = sorted([3000.0] + [1000.0] * 5 + [2000.0] * 4)
    assert found["step_ms"] == pytest.approx(written[4])
    assert found["step_ms_p95"] == pytest.approx(written[9])


def test_a_short_run_keeps_three_quarters_of_its_steps() -> None:
    for steps, untimed in ((1, 1), (3, 1), (4, 1), (12, 3), (40, 10), (10_000, 10)):
        assert Meter(1, steps)._warm_up == untimed


def test_a_run_of_the_warm_up_alone_has_no_throughput(clock: Time) -> None:
    meter = Meter(64, 1)
    train(meter, clock, [1.0])
    found = meter.throughput()
    assert found == {
        "images_per_sec": None,
        "step_ms": None,
        "step_ms_p95": None,
        "steps_timed": 0,
        "seconds_timed": 0.0,
        "halves": [None, None],
    }
    assert meter.data_wait() is None and meter.recent() is None

"""Throughput, data wait, processor use: what a run costs, measured without waiting for the device.

An interval lies between two synchronisations; on a CPU every step is one. The first ones warm up caches, allocators and
compilers, and are left out.
"""

from __future__ import annotations

import statistics
import time
from array import array
from typing import Any

import psutil

WARM_UP_STEPS = 5


class Meter:
    """Times the training steps of one rank; evaluation and saving stand outside, between `pause` and `resume`."""

    def __init__(self, images_per_step: int, steps_are_synchronous: bool) -> None:
        """`images_per_step`: over all devices and accumulated batches. `steps_are_synchronous`: true on CPU."""
        self.images_per_step = images_per_step
        self._synchronous = steps_are_synchronous
        self._seconds = array("d")  # of each timed interval; 12 bytes a step, so that memory stays flat
        self._steps = array("I")
        self._open_steps = self._steps_seen = 0
        self._wait = self._wait_timed = 0.0
        self._mark = self._fetch_from = self._paused_at = time.perf_counter()
        self._epoch_from = self._epoch_seconds = 0.0
        self._cpu_from = self._cpu = 0.0
        self.first_step_at: float | None = None  # time.time()

    def epoch_begins(self) -> None:
        self._cpu_from = _cpu_seconds()
        self._epoch_from = self._mark = time.perf_counter()

    def epoch_ends(self) -> None:
        self._cpu += _cpu_seconds() - self._cpu_from
        self._epoch_seconds += time.perf_counter() - self._epoch_from

    def pause(self) -> None:
        """What happens from here to `resume` is not training; called between two steps, or outside an epoch."""
        self._paused_at = time.perf_counter()

    def resume(self) -> None:
        self._mark += time.perf_counter() - self._paused_at

    def fetch_begins(self) -> None:
        self._fetch_from = time.perf_counter()

    def fetch_ends(self) -> None:
        self._wait += time.perf_counter() - self._fetch_from

    def step_ends(self) -> None:
        self._open_steps += 1
        if self._synchronous:
            self._close_interval()

    def synchronised(self) -> None:
        """The device has done all that was asked of it."""
        if self._open_steps:
            self._close_interval()

    def _close_interval(self) -> None:
        now = time.perf_counter()
        if self.first_step_at is None:
            self.first_step_at = time.time()
        if self._steps_seen >= WARM_UP_STEPS:
            self._seconds.append(now - self._mark)
            self._steps.append(self._open_steps)
            self._wait_timed += self._wait
        self._steps_seen += self._open_steps
        self._mark, self._open_steps, self._wait = now, 0, 0.0

    def recent(self, steps: int) -> float | None:
        """Images per second over about the last `steps` steps; None while warming up."""
        seconds, counted, index = 0.0, 0, len(self._steps)
        while index and counted < steps:
            index -= 1
            seconds, counted = seconds + self._seconds[index], counted + self._steps[index]
        return self.images_per_step * counted / seconds if seconds else None

    def throughput(self) -> dict[str, Any]:
        """images_per_sec: median over the timed steps; spread: interquartile range over median."""
        step_ms = sorted(1000 * seconds / steps for seconds, steps in zip(self._seconds, self._steps, strict=True))
        if not step_ms:
            return {"images_per_sec": None, "spread": None, "step_ms": None, "steps_timed": 0}
        median = statistics.median(step_ms)
        quarters = statistics.quantiles(step_ms, n=4) if len(step_ms) > 1 else [median] * 3
        return {
            "images_per_sec": 1000 * self.images_per_step / median,
            "spread": (quarters[2] - quarters[0]) / median,
            "step_ms": median,
            "steps_timed": sum(self._steps),
        }

    def data_wait(self) -> float | None:
        """Share of the timed steps spent waiting for data."""
        return self._wait_timed / sum(self._seconds) if self._seconds else None

    def cpu_seconds_per_second(self) -> float | None:
        """Processor seconds of this rank and its loader workers per second of training."""
        return self._cpu / self._epoch_seconds if self._epoch_seconds else None


def _cpu_seconds() -> float:
    total = 0.0
    own = psutil.Process()
    for process in [own, *own.children(recursive=True)]:
        try:
            times = process.cpu_times()
        except psutil.Error:  # it has ended meanwhile
            continue
        total += times.user + times.system
    return total

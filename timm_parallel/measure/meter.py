"""Measure throughput and step times without waiting for the device in every step."""

# The timed window starts after the warm-up of caches, allocators, compilers and DDP buckets. It
# ends with the last step. Waiting for data and logging count, evaluation and saving do not. The
# window is a series of intervals. An interval ends when the device is known to be idle. On a CPU,
# this is after every step. On a GPU, it is after each step that logs, saves or evaluates (sync
# step).

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from timm_parallel.measure.telemetry import Energy, Usage

WARM_UP_STEPS = 10


class Meter:
    """Timer of the training steps of one rank.

    Time between `pause` and `resume`, such as that of evaluation and saving, does not count.
    """

    def __init__(
        self,
        images_per_step: int,
        steps: int,
        clock: torch.Event | None = None,
        start_measuring: Callable[[], object] = lambda: None,
        untimed: int | None = None,
        energy: Energy | None = None,
    ) -> None:
        """Configure the timer.

        `images_per_step`: images per optimizer step over all devices. `steps`: number of steps that
        will run. `clock`: GPU event that is recorded after every step; None on a CPU.
        `start_measuring`: function to call when the timed window starts. `untimed`: number of first
        steps that are not timed; None: choose it from `steps`. `energy`: energy counters of the
        GPUs.
        """
        self.images_per_step, self._untimed = images_per_step, untimed
        self.expect(steps)
        self._clock, self._start_measuring = clock, start_measuring
        # Seconds and number of steps of each interval in the timed window. They take 12 bytes per
        # step.
        self._seconds = array("d")
        self._steps = array("I")
        self._steps_seen = self._open_steps = 0
        # `_mark` is the time at which the current interval started.
        self._mark = self._fetch_from = self._paused_at = time.perf_counter()
        # Two parts of the current interval in seconds: waiting of the device for data, and time
        # between steps.
        self._wait = self._between = 0.0
        self._was_idle = self._is_between = True
        self.steps_timed, self.seconds_timed, self.data_seconds, self.other_seconds = (
            0,
            0.0,
            0.0,
            0.0,
        )
        # Timed steps and timed seconds until each of the last two steps that logged, saved or
        # evaluated.
        self._sync_points = ((0, 0.0), (0, 0.0))
        # Processor time and energy that the run uses in the timed window.
        self.usage, self._energy = Usage(), energy or Energy()
        # Time of time.perf_counter() at which the first step ended, and the seconds for which it
        # waited for its data.
        self.first_step_at: float | None = None
        self.first_fetch = 0.0

    def expect(self, steps: int) -> None:
        """Set how many steps will run, which determines how many first steps are not timed.

        These are ten steps, or the first quarter of fewer than 40 steps.
        """
        self._warm_up = self._untimed or min(WARM_UP_STEPS, max(1, steps // 4))

    def pause(self) -> None:
        """Pause the timer until `resume` is called. This function must be called between
        two steps.
        """
        self._paused_at = time.perf_counter()
        if self._steps_seen >= self._warm_up:
            self.usage.end()
            self._energy.end()

    def resume(self) -> None:
        if self._steps_seen >= self._warm_up:
            self._begin_usage()
        self._mark += time.perf_counter() - self._paused_at

    def _begin_usage(self) -> None:
        self.usage.begin()
        self._energy.begin()

    def start_fetch(self) -> None:
        self._fetch_from = time.perf_counter()
        if self._is_between:
            self._between, self._is_between = self._fetch_from - self._mark, False
        self._was_idle = self._clock is None or self._clock.query()

    def end_fetch(self) -> None:
        """Add the time for which the device waited for a batch.

        If the device finished its work while the batch was read, half of the reading time is added,
        because the exact moment is unknown.
        """
        if self._was_idle:
            self._wait += time.perf_counter() - self._fetch_from
        elif self._clock is not None and self._clock.query():
            self._wait += (time.perf_counter() - self._fetch_from) / 2

    def end_step(self) -> None:
        self._open_steps += 1
        if self._clock is None:
            self._close_interval()
            return
        self._clock.record()
        steps = self._steps_seen + self._open_steps
        if self.first_step_at is None or steps == self._warm_up:
            self._clock.synchronize()
            self._close_interval()

    def synchronized(self) -> None:
        """End the current time interval, because the device has finished all queued work.

        The training loop calls this function after each step that logs, saves or evaluates.
        """
        if self._open_steps:
            self._close_interval()
        if self.steps_timed:
            self._sync_points = (self._sync_points[1], (self.steps_timed, self.seconds_timed))

    def _close_interval(self) -> None:
        now = time.perf_counter()
        self._steps_seen += self._open_steps
        if self.first_step_at is None:
            self.first_step_at, self.first_fetch = now, self._wait
        if self._steps_seen > self._warm_up:
            self._seconds.append(now - self._mark)
            self._steps.append(self._open_steps)
            self.steps_timed += self._open_steps
            self.seconds_timed += now - self._mark
            self.data_seconds += self._wait
            self.other_seconds += self._between
        elif self._steps_seen == self._warm_up:
            self._start_measuring()
            self._begin_usage()
            now = time.perf_counter()
        self._mark, self._open_steps, self._wait, self._is_between = now, 0, 0.0, True

    def recent(self) -> float | None:
        """Return the images per second between the last two steps that logged, saved or evaluated.

        Returns None if no step was timed between them.
        """
        (steps_before, seconds_before), (steps, seconds) = self._sync_points
        if steps == steps_before:
            return None
        return self.images_per_step * (steps - steps_before) / (seconds - seconds_before)

    def throughput(self) -> dict[str, Any]:
        """Compute the entry `throughput` of result.json: images per second, step times, and timed
        steps.
        """
        rate, steps, seconds = self.images_per_step, np.array(self._steps), np.array(self._seconds)
        # An interval belongs to that half of the timed window in which its middle lies.
        in_first_half = 2 * steps.cumsum() - steps <= self.steps_timed

        def images_per_second(chosen: Any) -> float | None:
            return (
                float(rate * steps[chosen].sum() / seconds[chosen].sum()) if chosen.any() else None
            )

        def step_ms(share: float) -> float | None:
            """Compute a quantile of the step times in milliseconds, in which an interval of n steps
            counts n times.
            """
            if not self.steps_timed:
                return None
            return float(
                np.quantile(1000 * seconds / steps, share, weights=steps, method="inverted_cdf")
            )

        return {
            "images_per_sec": rate * self.steps_timed / self.seconds_timed
            if self.seconds_timed
            else None,
            "step_ms": step_ms(0.5),
            "step_ms_p95": step_ms(0.95),
            "steps_timed": self.steps_timed,
            "seconds_timed": self.seconds_timed,
            "halves": [images_per_second(in_first_half), images_per_second(~in_first_half)],
        }

    def data_wait(self) -> float | None:
        """Return the share of the timed seconds, from 0 to 1, in which the device waited for data.

        Returns None if no step was timed.
        """
        return self.data_seconds / self.seconds_timed if self.seconds_timed else None

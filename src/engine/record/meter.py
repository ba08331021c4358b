"""Throughput, and what a step is made of, measured without waiting for the device.

The window opens at the end of the warm-up (caches, allocators, compilers, buckets) and ends with the last step. All of
training is in it, waiting for data and logging too; evaluation and saving are out of it. Its ends, and those of the
intervals in it, are moments at which the device is known to be done: on a CPU every step's end, on a GPU a boundary's.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from src.engine.machine.usage import Usage

WARM_UP_STEPS = 10


class Clock:
    """A CUDA device, or Apple's GPU, works on while its process asks for more: an event after every step says how far it is."""

    def __init__(self, device: torch.device) -> None:
        self._of = torch.get_device_module(device)
        self._step_done = self._of.Event()

    def wait(self) -> None:
        """Block until it has done all queued work. Called twice in a run: after the first step, and when the window opens."""
        self._of.synchronize()

    def step_ends(self) -> None:
        """All work of a step is queued."""
        self._step_done.record()

    def is_idle(self) -> bool:
        """True if it has done the last step."""
        return bool(self._step_done.query())


class Meter:
    """Times the training steps of one rank; evaluation and saving stand between `pause` and `resume`."""

    def __init__(
        self,
        images_per_step: int,
        steps: int,
        clock: Clock | None = None,
        window_opens: Callable[[], object] = int,
        untimed: int | None = None,
    ) -> None:
        """`images_per_step`: over all devices and accumulated batches. `steps`: those to come. `clock`: None on a CPU.

        `untimed`: steps before the window; None: the usual warm-up.
        """
        self.images_per_step, self._untimed = images_per_step, untimed
        self.expect(steps)
        self._clock, self._window_opens = clock, window_opens
        self._seconds = array("d")  # of each interval in the window; 12 bytes a step, so that memory stays flat
        self._steps = array("I")
        self._steps_seen = self._open_steps = 0
        self._mark = self._fetch_from = self._paused_at = time.perf_counter()  # `_mark`: the open interval's start
        self._wait = self._between = 0.0  # of the open interval
        self._was_idle = self._is_between = True
        self.steps_timed, self.seconds_timed, self.data_seconds, self.other_seconds = 0, 0.0, 0.0, 0.0
        self._boundaries = ((0, 0.0), (0, 0.0))  # (steps, seconds) timed up to the last two
        self.usage = Usage()  # over the window
        self.first_step_at: float | None = None  # time.time()

    def expect(self, steps: int) -> None:
        """So many steps are to come: all of a run, or the rest of a resumed one. Called before the first of them.

        Ten of them are untimed, but of a short run a quarter.
        """
        self._warm_up = self._untimed or min(WARM_UP_STEPS, max(1, steps // 4))

    def pause(self) -> None:
        """Leave the time until `resume` out. Called between two steps."""
        self._paused_at = time.perf_counter()
        if self._is_open:
            self.usage.end()

    def resume(self) -> None:
        if self._is_open:
            self.usage.begin()
        self._mark += time.perf_counter() - self._paused_at

    @property
    def _is_open(self) -> bool:
        return self._steps_seen >= self._warm_up

    def fetch_begins(self) -> None:
        self._fetch_from = time.perf_counter()
        if self._is_between:
            self._between, self._is_between = self._fetch_from - self._mark, False
        self._was_idle = self._clock is None or self._clock.is_idle()

    def fetch_ends(self) -> None:
        """Waiting for data counts while the device has nothing else to do: half of it, where that began meanwhile."""
        if self._was_idle:
            self._wait += time.perf_counter() - self._fetch_from
        elif self._clock is not None and self._clock.is_idle():
            self._wait += (time.perf_counter() - self._fetch_from) / 2

    def step_ends(self) -> None:
        self._open_steps += 1
        if self._clock is None:
            self._close_interval()
            return
        self._clock.step_ends()
        steps = self._steps_seen + self._open_steps
        if self.first_step_at is None or steps == self._warm_up:
            self._clock.wait()
            self._close_interval()

    def synchronised(self) -> None:
        """The device has done all queued work: a boundary."""
        if self._open_steps:
            self._close_interval()
        if self.steps_timed:
            self._boundaries = (self._boundaries[1], (self.steps_timed, self.seconds_timed))

    def _close_interval(self) -> None:
        now = time.perf_counter()
        self._steps_seen += self._open_steps
        if self.first_step_at is None:
            self.first_step_at = time.time()
        if self._steps_seen > self._warm_up:
            self._seconds.append(now - self._mark)
            self._steps.append(self._open_steps)
            self.steps_timed += self._open_steps
            self.seconds_timed += now - self._mark
            self.data_seconds += self._wait
            self.other_seconds += self._between
        elif self._steps_seen == self._warm_up:
            self._window_opens()
            self.usage.begin()
            now = time.perf_counter()
        self._mark, self._open_steps, self._wait, self._is_between = now, 0, 0.0, True

    def recent(self) -> float | None:
        """Images per second between the last two boundaries; None while warming up."""
        (first, since), (last, until) = self._boundaries
        return self.images_per_step * (last - first) / (until - since) if last > first else None

    def throughput(self) -> dict[str, Any]:
        """As result.json has it; see src/engine/record/result.py."""
        rate, steps, seconds = self.images_per_step, np.array(self._steps), np.array(self._seconds)
        is_first = 2 * steps.cumsum() - steps <= self.steps_timed  # the middle of an interval says which half it is of

        def step_ms(share: float) -> float | None:
            """What `share` of the steps do not exceed; an interval of ten steps counts ten times."""
            each = 1000 * seconds / steps
            return float(np.quantile(each, share, weights=steps, method="inverted_cdf")) if len(each) else None

        return {
            "images_per_sec": rate * self.steps_timed / self.seconds_timed if self.seconds_timed else None,
            "step_ms": step_ms(0.5),
            "step_ms_p95": step_ms(0.95),
            "steps_timed": self.steps_timed,
            "seconds_timed": self.seconds_timed,
            "halves": [
                float(rate * steps[half].sum() / seconds[half].sum()) if half.any() else None
                for half in (is_first, ~is_first)
            ],
        }

    def data_wait(self) -> float | None:
        """Share of the window spent waiting for data."""
        return self.data_seconds / self.seconds_timed if self.seconds_timed else None

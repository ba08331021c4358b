"""Measure throughput and step times without waiting for the device in every step, with hooks that
the training loop calls. They also report progress, tell the loop about stop signals, and profile
steps with torch.profiler (train.profile_steps).
"""

from __future__ import annotations

import os
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.autograd import DeviceType
from torch.profiler import _ExperimentalConfig as ExperimentalConfig
from torch.profiler import profile, record_function, schedule

from timm_parallel.faults.liveness import BACKWARD, EVALUATING, FORWARD, READING, liveness
from timm_parallel.faults.stop import StopCoordinator
from timm_parallel.keys import WARM_UP_STEPS, ResolvedConfig
from timm_parallel.machine.process import describe_start
from timm_parallel.parallel.strategy import Communication, Strategy
from timm_parallel.run.telemetry import Energy, Usage

# The timed window starts after the warm-up of caches, allocators, compilers and DDP buckets. It
# ends with the last step. Waiting for data and logging count, evaluation and saving do not. The
# window is a series of intervals. An interval ends when the device is known to be idle. On a CPU,
# this is after every step. On a GPU, it is after each step that logs, saves or evaluates (sync
# step).


class Meter:
    """Timer of the training steps of one rank.

    Time in a block of `paused`, such as that of evaluation and saving, does not count.
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
        self._mark = self._fetch_from = time.perf_counter()
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
        # Timed steps and timed seconds at the last call of `recent`.
        self._logged = (0, 0.0)
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

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Pause the timer in the `with` block, which must be between two steps."""
        paused_at = time.perf_counter()
        if self._steps_seen >= self._warm_up:
            self.usage.end()
            self._energy.end()
        try:
            yield
        finally:
            if self._steps_seen >= self._warm_up:
                self._begin_usage()
            self._mark += time.perf_counter() - paused_at

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
        """Return the images per second since the last call, which is that of the last logged step.
        Returns None if no step was timed since then.
        """
        steps, seconds = self.steps_timed - self._logged[0], self.seconds_timed - self._logged[1]
        self._logged = (self.steps_timed, self.seconds_timed)
        return self.images_per_step * steps / seconds if steps else None

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


# Names of the phases of a training step in the profile.
PARTS = {READING: "data", FORWARD: "forward", BACKWARD: "backward"}
# Each named range in the profiler's trace starts with this text.
RANGE = "step: "
# Name of the folder, below the run folder, to which the profile is written.
FOLDER = "profile"
OPERATIONS_IN_TABLE = 50


def build_hooks(
    config: ResolvedConfig,
    strategy: Strategy,
    communication: Sequence[Communication],
    energy: Energy,
    total_steps: int,
) -> StepHooks:
    """Build the hooks that time the steps of a training run, and profile train.profile_steps of
    them.

    `total_steps`: steps of the run. Raises ValueError if no step is left to time after the profile.
    """
    recorded, untimed = config.train.profile_steps, config.train.untimed_steps
    for problem in config.train.profile_problems(total_steps):
        raise ValueError(problem)

    def start_measuring() -> None:
        for each in communication:
            each.start_measuring()

    meter = Meter(
        config.global_batch * config.train.accumulate,
        total_steps,
        None if strategy.device.type == "cpu" else torch.Event(strategy.device),
        start_measuring=start_measuring,
        untimed=untimed,
        energy=energy,
    )
    if untimed is None or recorded is None:
        return StepHooks(meter, strategy.group.stop)
    return ProfiledStepHooks(meter, strategy, untimed, recorded)


class StepHooks:
    """Functions that the training loop calls at each phase of a step, such as reading or backward.

    These functions run in every step. To be fast, each only reads the clock and assigns a few
    values.
    """

    def __init__(self, meter: Meter, stop: StopCoordinator) -> None:
        self.meter, self.stop = meter, stop

    def at(self, phase: int) -> None:
        """Report that a phase of the step starts: READING (waiting for a batch), FORWARD or
        BACKWARD.

        The constants are defined in liveness.py.
        """
        liveness.at(phase)
        if phase == READING:
            self.meter.start_fetch()
        elif phase == FORWARD:
            self.meter.end_fetch()

    def start_update(self) -> None:
        """Report that the gradients are complete and the optimizer step starts."""

    def end_step(self) -> bool:
        """Tell the meter that the training loop has queued all work of a step on the device.

        Returns True if the run must stop after this step, because it received a stop signal.
        """
        self.meter.end_step()
        return self.stop.should_stop()

    def profile(self, folder: Path) -> dict[str, Any] | None:
        """Write the profile of this rank, and return its entry for result.json.

        Returns None if train.profile_steps is not set.
        """
        return None

    @contextmanager
    def aside(self, phase: int = EVALUATING) -> Iterator[None]:
        """Exclude the code in the `with` block, such as an evaluation, from the step times.

        `phase`: EVALUATING or SAVING, which the watchdog shows.
        """
        liveness.at(phase)
        with self.meter.paused():
            yield


class ProfiledStepHooks(StepHooks):
    """Step hooks that also record some steps with torch.profiler, before the timed steps.

    The trace shows each phase of a step as a named range.
    """

    # The profiler slows down the steps that it records. So it records steps before the timed window
    # starts.
    #
    # A recorded step has four phases. `data` is waiting for a batch and copying it to the device.
    # `forward` includes mixup and the loss. `backward` includes the communication for which it
    # waits. `optimizer` lasts from computing the norm of the gradients to updating the averaged
    # weights.

    def __init__(self, meter: Meter, strategy: Strategy, untimed: int, recorded: int) -> None:
        super().__init__(meter, strategy.group.stop)
        self._rank, self._device = strategy.group.rank, strategy.device
        self._untimed, self._recorded, self._steps = untimed, recorded, 0
        # Without this variable, the profiler prints on the console that it finds no GPU.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        self._profiler = profile(
            schedule=schedule(wait=untimed - recorded - 1, warmup=1, active=recorded, repeat=1),
            # Profile all threads, because the replicas of dp run in threads.
            experimental_config=ExperimentalConfig(profile_all_threads=True),
        )
        self._profiler.start()
        self._range = ExitStack()

    def at(self, phase: int) -> None:
        super().at(phase)
        self._begin(PARTS[phase])

    def start_update(self) -> None:
        self._begin("optimizer")

    def end_step(self) -> bool:
        self._range.close()
        self._steps += 1
        if self._steps <= self._untimed:
            self._profiler.step()
        # Stop after the last recorded step. torch then waits for queued kernels, which belong to
        # the trace too.
        if self._steps == self._untimed:
            self._profiler.stop()
        # Call the method of the base class last, because it may start the timed window. The
        # profiler must have stopped by then.
        return super().end_step()

    def profile(self, folder: Path) -> dict[str, Any] | None:
        """Write the trace and a table of the operations of this rank.

        Returns the entry for result.json, with the mean milliseconds of each phase of a recorded
        step. Returns None if the recorded steps did not all run.
        """
        # The run was resumed near its end or stopped early, so not all steps were recorded.
        if self._steps < self._untimed:
            return None
        trace = folder / FOLDER / f"rank_{self._rank}.json.gz"
        trace.parent.mkdir(exist_ok=True)
        self._profiler.export_chrome_trace(str(trace))
        averages = self._profiler.key_averages()
        # Select the named ranges of the CPU, because a GPU has events with the same names.
        ranges = [
            event
            for event in averages
            if event.key.startswith(RANGE) and event.device_type == DeviceType.CPU
        ]
        parts = {
            f"{e.key.removeprefix(RANGE)}_ms": e.cpu_time_total / 1000 / self._recorded
            for e in ranges
        }
        time = f"self_{'device' if self._device.type == 'cuda' else 'cpu'}_time_total"
        table = averages.table(sort_by=time, row_limit=OPERATIONS_IN_TABLE)
        text = f"a step: {describe_parts(parts)}\n{table}"
        trace.with_name(f"rank_{self._rank}.txt").write_text(text, encoding="utf-8")
        return {"rank": self._rank, "parts": parts, "trace": trace.relative_to(folder).as_posix()}

    def _begin(self, part: str) -> None:
        self._range.close()
        if self._steps < self._untimed:
            self._range.enter_context(record_function(f"{RANGE}{part}"))


def describe_parts(parts: dict[str, float]) -> str:
    """Format the milliseconds and the share of each phase of a recorded step, as seen by the main
    thread.
    """
    step = sum(parts.values())
    shares = [
        f"{name.removesuffix('_ms')} {ms:.2f} ({ms / step:.0%})" for name, ms in parts.items()
    ]
    return f"{step:.2f} ms in the main thread while recorded: {', '.join(shares)}"


def summary_lines(profile: dict[str, Any], start: dict[str, float], folder: Path) -> list[str]:
    """Format the console lines that show the parts of the start, the phases of a step and the files
    of the profile.

    `profile`: one entry of `profile` in result.json. `start`: the entry `start` of `seconds`.
    `folder`: the run folder.
    """
    return [
        f"start        {describe_start(start)}",
        f"a step       {describe_parts(profile['parts'])}",
        f"operations   {folder / FOLDER}/rank_*.txt",
        f"traces       {folder / FOLDER}/rank_*.json.gz, for ui.perfetto.dev",
    ]

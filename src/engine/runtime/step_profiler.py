"""Profile of training steps (train.profile_steps): the time of each part of a step, and a trace by torch.profiler."""

# The profiler slows down the steps that it records, so it records steps before the timed window of meter.py. The parts are timed
# inside the window, undisturbed, and add up to the meter's step time.

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch.profiler import _ExperimentalConfig as ExperimentalConfig
from torch.profiler import profile, record_function, schedule

from src.engine.faults.liveness import BACKWARD, FORWARD, READING
from src.engine.parallel.communication import Communication
from src.engine.parallel.strategy import Strategy
from src.engine.runtime.meter import Meter
from src.engine.runtime.step_hooks import StepHooks
from src.schema import ResolvedConfig

PARTS = {READING: "data", FORWARD: "forward", BACKWARD: "backward"}  # of phases
FOLDER = "profile"  # of the run folder
OPERATIONS_IN_TABLE = 50


def build_hooks(
    config: ResolvedConfig, strategy: Strategy, communication: Communication, total_steps: int
) -> StepHooks:
    """Build the step hooks of a training run of `total_steps` steps. With train.profile_steps they also profile steps."""
    untimed, recorded = config.train.untimed_steps, config.train.profile_steps
    meter = Meter(
        config.global_batch * config.train.accumulate,
        total_steps,
        None if strategy.device.type == "cpu" else torch.Event(strategy.device),
        start_measuring=communication.start_measuring,
        untimed=untimed,
        energy=strategy.telemetry.energy,
    )
    if untimed is None or recorded is None:
        return StepHooks(meter, strategy.group.stop)
    return ProfiledStepHooks(meter, strategy, untimed, recorded)


class ProfiledStepHooks(StepHooks):
    """Step hooks that record some steps with torch.profiler before the timed steps, and measure each part of timed steps."""

    # The parts: `data` waiting for a batch and bringing it to the device; `forward` with mixup and loss; `backward` with the
    # communication that it waits for; `optimizer` from the gradient's norm to the averaged weights; `other` between two steps.

    def __init__(self, meter: Meter, strategy: Strategy, untimed: int, recorded: int) -> None:
        super().__init__(meter, strategy.group.stop)
        self._rank, self._untimed, self._steps = strategy.group.rank, untimed, 0
        self._recording = Recording(strategy.device, untimed, recorded)
        self._timer = PartTimer(strategy.device, ("data", "forward", "backward", "optimizer", "other"))

    def at(self, phase: int) -> None:
        super().at(phase)
        self._begin(PARTS[phase])

    def start_update(self) -> None:
        self._begin("optimizer")

    def end_step(self) -> bool:
        self._steps += 1
        if self._steps <= self._untimed:
            self._recording.end_step(is_last=self._steps == self._untimed)
        # The meter's timed window may start in this call.
        is_last = super().end_step()
        self._begin("other")
        return is_last

    def synchronized(self) -> None:
        super().synchronized()
        self._timer.add_up()

    @contextmanager
    def aside(self, phase: int) -> Iterator[None]:
        self._begin(None)
        with super().aside(phase):
            yield
        self._begin("other")

    def profile(self, folder: Path) -> dict[str, Any] | None:
        """Write the trace and the table of this rank to the run folder. Return the milliseconds of each part of a step."""
        steps = self.meter.steps_timed
        # No step was timed: the run was resumed near its end, or stopped early.
        if not steps:
            return None
        parts = {f"{name}_ms": 1000 * seconds / steps for name, seconds in self._timer.seconds.items()}
        trace = folder / FOLDER / f"rank_{self._rank}.json.gz"
        self._recording.write(trace)
        return {"rank": self._rank, "parts": parts, "trace": trace.relative_to(folder).as_posix()}

    def _begin(self, part: str | None) -> None:
        if self._steps >= self._untimed:
            self._timer.mark(part)
        else:
            self._recording.begin(part)


class PartTimer:
    """Timer of the parts of a step, with the sum of seconds per part. `mark` ends the current part and begins another."""

    # On a GPU a mark is an event in the queue of the GPU's work, so it does not wait and measures the time on the GPU.

    def __init__(self, device: torch.device, parts: tuple[str, ...]) -> None:
        self.seconds = dict.fromkeys(parts, 0.0)
        self._device = device
        self._marks: list[tuple[str | None, Any]] = []

    def mark(self, part: str | None) -> None:
        self._marks.append((part, self._now()))

    def add_up(self) -> None:
        """Add the time between each two marks to the sum of its part. Call it at a sync step, when the device is idle."""
        on_cpu = self._device.type == "cpu"
        for (part, start), (_, end) in pairwise(self._marks):
            if part is not None:
                self.seconds[part] += end - start if on_cpu else start.elapsed_time(end) / 1000
        del self._marks[:-1]

    def _now(self) -> Any:
        if self._device.type == "cpu":
            return perf_counter()
        event = torch.get_device_module(self._device).Event(enable_timing=True)
        event.record()
        return event


class Recording:
    """Recording by torch.profiler of the last `recorded` of `steps` steps. The trace shows each part of a step by name."""

    def __init__(self, device: torch.device, steps: int, recorded: int) -> None:
        # Otherwise the profiler prints on the console that it finds no GPU.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        self._device = device
        self._profiler = profile(
            schedule=schedule(wait=steps - recorded - 1, warmup=1, active=recorded, repeat=1),
            # Replicas of dp run in threads.
            experimental_config=ExperimentalConfig(profile_all_threads=True),
        )
        self._profiler.start()
        self._range = ExitStack()

    def begin(self, part: str | None) -> None:
        self._range.close()
        if part is not None:
            self._range.enter_context(record_function(f"step: {part}"))

    def end_step(self, is_last: bool) -> None:
        self.begin(None)
        # After the last step torch waits for queued kernels: they belong to the trace too.
        self._profiler.step()
        if is_last:
            self._profiler.stop()

    def write(self, trace: Path) -> None:
        """Write the trace, and next to it a table of the operations that took the most time."""
        trace.parent.mkdir(exist_ok=True)
        self._profiler.export_chrome_trace(str(trace))
        time = f"self_{'device' if self._device.type == 'cuda' else 'cpu'}_time_total"
        table = self._profiler.key_averages().table(sort_by=time, row_limit=OPERATIONS_IN_TABLE)
        trace.with_name(trace.name.replace(".json.gz", ".txt")).write_text(table, encoding="utf-8")


def summary_lines(profile: dict[str, Any], folder: Path) -> list[str]:
    """Return console lines with the milliseconds of each part of a step, from one entry of `profile` in result.json."""
    parts: dict[str, float] = profile["parts"]
    step = sum(parts.values())
    shares = [f"{name.removesuffix('_ms')} {ms:.2f} ({ms / step:.0%})" for name, ms in parts.items()]
    return [
        f"a step       {step:.2f} ms: {', '.join(shares)}",
        f"operations   {folder / FOLDER}/rank_*.txt",
        f"traces       {folder / FOLDER}/rank_*.json.gz, for ui.perfetto.dev",
    ]

"""Profile of training steps (train.profile_steps): a trace by torch.profiler, with the parts of a
step as named ranges.
"""

# The profiler slows down the steps that it records, so it records steps before the timed window of
# meter.py.

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import _ExperimentalConfig as ExperimentalConfig
from torch.profiler import profile, record_function, schedule

from timm_parallel.faults.liveness import BACKWARD, FORWARD, READING
from timm_parallel.keys import ResolvedConfig
from timm_parallel.measure.meter import Meter
from timm_parallel.measure.step_hooks import StepHooks
from timm_parallel.parallel.communication import Communication
from timm_parallel.parallel.strategy import Strategy

PARTS = {READING: "data", FORWARD: "forward", BACKWARD: "backward"}  # of phases
RANGE = "step: "  # begins the names of ranges in the trace
FOLDER = "profile"  # of the run folder
OPERATIONS_IN_TABLE = 50


def build_hooks(
    config: ResolvedConfig,
    strategy: Strategy,
    communication: Communication,
    total_steps: int,
    untimed: int | None,
    recorded: int | None,
) -> StepHooks:
    """Build the step hooks of a training run of `total_steps` steps, of which the first `untimed`
    ones are not timed. They also profile `recorded` steps.
    """
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
    """Step hooks that record some steps with torch.profiler before the timed steps. The trace shows
    each part of a step by name.
    """

    # The parts: `data` waiting for a batch and bringing it to the device; `forward` with mixup and
    # loss; `backward` with the communication that it waits for; `optimizer` from the gradient's
    # norm to the averaged weights.

    def __init__(self, meter: Meter, strategy: Strategy, untimed: int, recorded: int) -> None:
        super().__init__(meter, strategy.group.stop)
        self._rank, self._device = strategy.group.rank, strategy.device
        self._untimed, self._recorded, self._steps = untimed, recorded, 0
        # Otherwise the profiler prints on the console that it finds no GPU.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        self._profiler = profile(
            schedule=schedule(wait=untimed - recorded - 1, warmup=1, active=recorded, repeat=1),
            # Replicas of dp run in threads.
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
        # torch waits for queued kernels: they belong to the trace too.
        if self._steps == self._untimed:
            self._profiler.stop()
        # The meter's timed window may start in this call.
        return super().end_step()

    def profile(self, folder: Path) -> dict[str, Any] | None:
        """Write the trace and a table of operations of this rank. Return the milliseconds of each
        part of a recorded step.
        """
        # The run was resumed near its end, or stopped early.
        if self._steps < self._untimed:
            return None
        trace = folder / FOLDER / f"rank_{self._rank}.json.gz"
        trace.parent.mkdir(exist_ok=True)
        self._profiler.export_chrome_trace(str(trace))
        averages = self._profiler.key_averages()
        # A GPU has events of the same names.
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
    """Return the milliseconds and share of each part of a recorded step, by the clock of the main
    thread, as text.
    """
    step = sum(parts.values())
    shares = [
        f"{name.removesuffix('_ms')} {ms:.2f} ({ms / step:.0%})" for name, ms in parts.items()
    ]
    return f"{step:.2f} ms in the main thread while recorded: {', '.join(shares)}"


def summary_lines(profile: dict[str, Any], folder: Path) -> list[str]:
    """Return console lines with the parts of a step and the files, from one entry of `profile` in
    result.json.
    """
    return [
        f"a step       {describe_parts(profile['parts'])}",
        f"operations   {folder / FOLDER}/rank_*.txt",
        f"traces       {folder / FOLDER}/rank_*.json.gz, for ui.perfetto.dev",
    ]

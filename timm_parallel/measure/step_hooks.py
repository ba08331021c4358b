"""Hooks that the training loop calls in each step, to time it and to report its progress.

They also tell the loop about stop signals, and profile steps with torch.profiler
(train.profile_steps). The watchdog reads the progress.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import _ExperimentalConfig as ExperimentalConfig
from torch.profiler import profile, record_function, schedule

from timm_parallel.faults.liveness import BACKWARD, EVALUATING, FORWARD, READING, liveness
from timm_parallel.faults.stop import StopCoordinator
from timm_parallel.keys import ResolvedConfig
from timm_parallel.machine.start_clock import describe_start
from timm_parallel.measure.meter import Meter
from timm_parallel.measure.telemetry import Energy
from timm_parallel.parallel.strategy import Communication, Strategy

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
    untimed: int | None,
    recorded: int | None,
) -> StepHooks:
    """Build the hooks that time the steps of a training run, and profile some steps if requested.

    `total_steps`: steps of the run. `untimed`: number of steps at the start of the run that are not
    timed. `recorded`: number of these untimed steps to profile; None: no profile.
    """

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

    def start_step(self, step: int) -> None:
        liveness.step = step

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
        self.meter.pause()
        try:
            yield
        finally:
            self.meter.resume()


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

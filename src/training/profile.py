"""`train.profile_steps`: which part of a step takes its time, and what torch's profiler records of some steps.

The profiler slows down what it looks at. So it records the steps before the timed window of record/meter.py, and the parts
are measured in that window, undisturbed; what meter and parts say of a step must then agree.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function, schedule
from torch.profiler import _ExperimentalConfig as ExperimentalConfig

from src.engine.machine.pulse import BACKWARD, FORWARD, READING
from src.engine.record.meter import Meter
from src.parallel.single import Single
from src.training.moments import Moments

PARTS = {READING: "data", FORWARD: "forward", BACKWARD: "backward"}  # of phases
FOLDER = "profile"  # of the run folder
OPERATIONS_TOLD, OPERATIONS_WRITTEN = 10, 50


class ProfiledMoments(Moments):
    """Reports every moment also to the profiler, in the first `untimed` steps, and later to the split of a step into parts.

    The parts: `data` waiting for a batch and bringing it to the device; `forward` with mixup and loss, and apart from it
    what the strategy names (dp: scatter, replicate, gather); `backward` with the communication that it waits for;
    `optimizer` from the gradient's norm to the averaged weights; `other` between two steps.
    """

    def __init__(self, meter: Meter, strategy: Single, wrapped: nn.Module, untimed: int, recorded: int) -> None:
        super().__init__(meter, strategy.stopping)
        self._rank, self._untimed, self._steps = strategy.rank, untimed, 0
        self._recording = Recording(strategy.device, untimed, recorded)
        calls = strategy.calls_of_forward(wrapped)
        in_forward = [name for _, name in calls]
        self._split = Split(strategy.device, ("data", *in_forward, "forward", "backward", "optimizer", "other"))
        for owner, name in calls:
            setattr(owner, name, self._as_part(name, getattr(owner, name)))

    def at(self, phase: int) -> None:
        super().at(phase)
        self._begin(PARTS[phase])

    def update_begins(self) -> None:
        super().update_begins()
        self._begin("optimizer")

    def step_ends(self) -> bool:
        self._steps += 1
        if self._steps <= self._untimed:
            self._recording.step_ends(is_last=self._steps == self._untimed)
        is_last = super().step_ends()  # the meter's window may open in it
        self._begin("other")
        return is_last

    def synchronised(self) -> None:
        super().synchronised()
        self._split.add_up()

    @contextmanager
    def aside(self, phase: int) -> Iterator[None]:
        self._begin(None)
        with super().aside(phase):
            yield
        self._begin("other")

    def profile(self, folder: Path) -> dict[str, Any] | None:
        """This rank's entry of `profile` in result.json; its trace and its table are written into the run folder."""
        steps = self.meter.steps_timed
        if not steps:  # resumed near its end, or stopped early
            return None
        trace, operations = self._recording.write(folder / FOLDER, self._rank)
        return {
            "rank": self._rank,
            "parts": {f"{name}_ms": 1000 * seconds / steps for name, seconds in self._split.seconds.items()},
            "operations": operations,
            "trace": trace.relative_to(folder).as_posix(),
        }

    def _begin(self, part: str | None) -> None:
        if self._steps >= self._untimed:
            self._split.mark(part)
        else:
            self._recording.begin(part)

    def _as_part(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call`, made inside the forward pass, as a part of its own."""

        @wraps(call)
        def told_apart(*args: Any, **kwargs: Any) -> Any:
            self._begin(name)
            try:
                return call(*args, **kwargs)
            finally:
                self._begin("forward")

        return told_apart


class Split:
    """Seconds of each part: from one mark to the next all time is the part's that the first one names (None: nobody's).

    On a GPU a mark is an event among its work, so nothing waits, and what counts is the device's time.
    """

    def __init__(self, device: torch.device, parts: tuple[str, ...]) -> None:
        self.seconds = dict.fromkeys(parts, 0.0)
        self._device = device
        self._marks: list[tuple[str | None, Any]] = []

    def mark(self, part: str | None) -> None:
        self._marks.append((part, self._now()))

    def add_up(self) -> None:
        """All up to the last mark. Called after a step's end, when the device has done all that was asked of it."""
        for (part, began), (_, ended) in pairwise(self._marks):
            if part is not None:
                on_cpu = self._device.type == "cpu"
                self.seconds[part] += ended - began if on_cpu else began.elapsed_time(ended) / 1000
        del self._marks[:-1]

    def _now(self) -> Any:
        if self._device.type == "cpu":
            return perf_counter()
        module = torch.cuda if self._device.type == "cuda" else torch.mps
        event = module.Event(enable_timing=True)
        event.record()
        return event


class Recording:
    """torch.profiler over the last `recorded` of `steps` steps; parts are ranges in the trace."""

    def __init__(self, device: torch.device, steps: int, recorded: int) -> None:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else it tells the console that it has found no GPU
        self._device, self._recorded = device, recorded
        on_gpu = device.type == "cuda"
        self._profiler = profile(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])],
            schedule=schedule(wait=steps - recorded - 1, warmup=1, active=recorded, repeat=1),
            experimental_config=ExperimentalConfig(profile_all_threads=True),  # replicas of dp run in threads
        )
        self._profiler.start()
        self._range = ExitStack()

    def begin(self, part: str | None) -> None:
        self._range.close()
        if part is not None:
            self._range.enter_context(record_function(f"step: {part}"))

    def step_ends(self, is_last: bool) -> None:
        self.begin(None)
        if is_last and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # its kernels are to be recorded too
        self._profiler.step()
        if is_last:
            self._profiler.stop()

    def write(self, folder: Path, rank: int) -> tuple[Path, list[dict[str, Any]]]:
        """(the trace, the operations that took most time, per step): rank_N.json.gz, and as a table rank_N.txt."""
        folder.mkdir(exist_ok=True)
        trace = folder / f"rank_{rank}.json.gz"
        self._profiler.export_chrome_trace(str(trace))
        kind = "device" if self._device.type == "cuda" else "cpu"
        averages = self._profiler.key_averages()
        table = averages.table(sort_by=f"self_{kind}_time_total", row_limit=OPERATIONS_WRITTEN)
        trace.with_name(f"rank_{rank}.txt").write_text(table, encoding="utf-8")
        operations = [
            {
                "name": average.key,
                "calls": average.count / self._recorded,
                "ms": getattr(average, f"self_{kind}_time_total") / 1000 / self._recorded,
            }
            for average in averages
            if average.device_type == DeviceType.CPU and not average.is_user_annotation  # neither kernels nor ranges
        ]
        operations.sort(key=lambda operation: -operation["ms"])
        return trace, operations[:OPERATIONS_TOLD]


def summary_lines(profile: dict[str, Any], folder: Path) -> list[str]:
    """One rank's entry of `profile` in result.json, for the console."""
    parts: dict[str, float] = profile["parts"]
    step = sum(parts.values())
    shares = (f"{name.removesuffix('_ms')} {ms:.2f} ({ms / step:.0%})" for name, ms in parts.items())
    longest = (f"             {o['ms']:9.3f} ms {o['calls']:8.1f} calls  {o['name']}" for o in profile["operations"])
    return [
        f"a step       {step:.2f} ms: {', '.join(shares)}",
        "operations   by their own time in a recorded step:",
        *longest,
        f"traces       {folder / FOLDER}/rank_*.json.gz, for ui.perfetto.dev",
    ]

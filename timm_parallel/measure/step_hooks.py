"""Hooks that the training loop calls in each step, to time it and to report its progress.

They also tell the loop about stop signals. The watchdog reads the progress.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from timm_parallel.faults.liveness import EVALUATING, FORWARD, READING, liveness
from timm_parallel.faults.stop import StopCoordinator
from timm_parallel.measure.meter import Meter


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

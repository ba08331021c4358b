"""Step hooks that the training loop calls: they time steps, report progress to the watchdog, and
notice stop signals.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from timm_parallel.faults.liveness import BACKWARD, EVALUATING, FORWARD, READING, liveness
from timm_parallel.faults.stop import StopCoordinator
from timm_parallel.measure.meter import Meter


class StepHooks:
    """Calls from the training loop at each phase of a step. Each does only a few assignments and
    reads of the clock.
    """

    def __init__(self, meter: Meter, stop: StopCoordinator) -> None:
        self.meter, self.stop = meter, stop

    def start_step(self, step: int) -> None:
        liveness.step = step

    def at(self, phase: int) -> None:
        """Mark the start of a phase of the step: READING (waits for a batch), FORWARD or BACKWARD;
        see liveness.py.
        """
        liveness.at(phase)
        if phase == READING:
            self.meter.start_fetch()
        elif phase == FORWARD:
            self.meter.end_fetch()

    def start_backward(self) -> None:
        """Mark the start of the backward pass."""
        self.at(BACKWARD)

    def start_update(self) -> None:
        """Mark that the gradients are complete and the optimizer step begins."""

    def end_step(self) -> bool:
        """Mark that all work of the step is queued. Return True if a signal asks to stop after this
        step.
        """
        self.meter.end_step()
        return self.stop.should_stop()

    def synchronized(self) -> None:
        """Mark that the device has finished all queued work."""
        self.meter.synchronized()

    def profile(self, folder: Path) -> dict[str, Any] | None:
        """Write the profile of this rank, and return its entry in result.json; None without
        train.profile_steps.
        """
        return None

    @contextmanager
    def aside(self, phase: int = EVALUATING) -> Iterator[None]:
        """Exclude the code in the `with` block from the step times. `phase`: EVALUATING or SAVING;
        see liveness.py.
        """
        liveness.at(phase)
        self.meter.pause()
        try:
            yield
        finally:
            self.meter.resume()

"""The moments of a training step: the loop reports each once, and it is passed on to whoever needs it.

The meter: what does a step cost? The pulse: does this rank still move? The stopping: may another step begin?
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from src.engine.machine.pulse import FORWARD, READING, pulse
from src.engine.record.meter import Meter
from src.parallel.stopping import Stopping


class Moments:
    """Called several times a step, so each call is a few assignments and looks at the clock."""

    def __init__(self, meter: Meter, stopping: Stopping) -> None:
        self.meter, self.stopping = meter, stopping

    def step_begins(self, step: int) -> None:
        pulse.step = step

    def at(self, phase: int) -> None:
        """A phase of pulse.py begins: READING, in which this rank waits for a batch, FORWARD or BACKWARD."""
        pulse.at(phase)
        if phase == READING:
            self.meter.fetch_begins()
        elif phase == FORWARD:
            self.meter.fetch_ends()

    def update_begins(self) -> None:
        """The gradients are whole."""

    def step_ends(self) -> bool:
        """All of the step has been asked of the device. Returns True if it was the last, because a signal has come."""
        pulse.steps_done += 1
        self.meter.step_ends()
        return self.stopping.is_due()

    def synchronised(self) -> None:
        """The device has done all that was asked of it."""
        self.meter.synchronised()

    def profile(self, folder: Path) -> dict[str, Any] | None:
        """What parts a step has, where that was measured; see profile.py."""
        return None

    @contextmanager
    def aside(self, phase: int) -> Iterator[None]:
        """What happens inside, `phase` of pulse.py, is no part of a step."""
        pulse.at(phase)
        self.meter.pause()
        try:
            yield
        finally:
            self.meter.resume()

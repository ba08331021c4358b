"""Counter of the progress of this process. The watchdog polls it to find a rank that makes no
progress.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

# In the order of a step, so that comparing (step, phase) shows which rank is behind.
PHASES = (
    "starting",
    "reading a batch",
    "the forward pass",
    "waiting for the other ranks' weights",
    "the backward pass",
    "evaluating",
    "waiting for the other ranks' counts",
    "saving",
)
STARTING, READING, FORWARD, GATHERING, BACKWARD, EVALUATING, COUNTING, SAVING = range(len(PHASES))


class Liveness:
    """Counter of signs of progress (ticks) of the main thread, with the step and phase that this
    thread is in.
    """

    def __init__(self) -> None:
        self.step = 0  # in progress
        self.phase = STARTING
        self.ticks = 0
        self.steps_done = 0  # optimizer steps of this process that train
        self._on_trial = False

    def at(self, phase: int) -> None:
        """Set the phase of the step that begins now, and count a tick. Cheap, because each step
        calls it several times.
        """
        self.phase = phase
        self.ticks += 1

    def count_step(self, *_: object) -> None:
        """Count an optimizer step and a tick. torch calls this hook after each step of any
        optimizer, in any loop.
        """
        self.ticks += 1
        self.steps_done += not self._on_trial

    @contextmanager
    def on_trial(self) -> Iterator[None]:
        """Do not count the optimizer steps in the `with` block, which train nothing: the first step
        of the run comes later.
        """
        self._on_trial = True
        try:
            yield
        finally:
            self._on_trial = False


liveness = Liveness()

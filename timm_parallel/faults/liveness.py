"""Progress counter of this process. The watchdog reads it to find a rank that makes no progress."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

# Phases in the order of a training step. Comparing (step, phase) of two ranks shows which rank is
# behind.
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
    """Progress counter of the main thread, with the step and phase in which this thread is."""

    def __init__(self) -> None:
        # Number of the step in progress.
        self.step = 0
        self.phase = STARTING
        self.ticks = 0
        # Number of optimizer steps that this process has trained, trial steps excluded.
        self.steps_done = 0
        self._on_trial = False

    def at(self, phase: int) -> None:
        """Set the phase that the main thread now enters, and count progress. Each step calls this
        method several times, so it must be cheap.
        """
        self.phase = phase
        self.ticks += 1

    def count_step(self, *_: object) -> None:
        """Count an optimizer step. torch calls this method after each step of any optimizer, in any
        training loop.
        """
        self.ticks += 1
        self.steps_done += not self._on_trial

    @contextmanager
    def on_trial(self) -> Iterator[None]:
        """Do not count the optimizer steps in the `with` block as training steps, because they are
        trials before the first training step.
        """
        self._on_trial = True
        try:
            yield
        finally:
            self._on_trial = False


liveness = Liveness()

"""Progress counter of this process. The watchdog reads it to find a rank that makes no progress."""

from __future__ import annotations

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
        # Number of optimizer steps that this process has trained.
        self.steps_done = 0

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
        self.steps_done += 1


liveness = Liveness()

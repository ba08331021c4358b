"""Progress counter of this process's main thread. The watchdog polls it to find a rank that makes no progress."""

from __future__ import annotations

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
    """Counts the main thread's ticks (signs of progress). `at` runs several times per step, so it has to be cheap."""

    def __init__(self) -> None:
        self.step = 0  # in progress
        self.phase = STARTING
        self.ticks = 0
        self.steps_done = 0  # optimizer steps of this process

    def at(self, phase: int) -> None:
        """Count a tick and set the phase of the step that the main thread enters."""
        self.phase = phase
        self.ticks += 1

    def count_step(self, *_: object) -> None:
        """Count a tick and a step; torch calls this hook after every optimizer step, also in your own training loop."""
        self.ticks += 1
        self.steps_done += 1


liveness = Liveness()

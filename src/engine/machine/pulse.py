"""What the main thread of this process last began. The watchdog's thread reads it to tell which rank has stopped moving."""

from __future__ import annotations

PHASES = (  # in the order in which a step goes through them, so that (step, phase) says which rank is behind
    "starting",
    "reading a batch",
    "the forward pass",
    "the backward pass",
    "evaluating",
    "waiting for the other ranks' counts",
    "saving",
)
STARTING, READING, FORWARD, BACKWARD, EVALUATING, COUNTING, SAVING = range(len(PHASES))


class Pulse:
    """`at` is called several times a step, so it is two assignments."""

    def __init__(self) -> None:
        self.step = 0  # the one under way
        self.phase = STARTING
        self.beats = 0
        self.steps_done = 0  # by this process

    def at(self, phase: int) -> None:
        self.phase = phase
        self.beats += 1


pulse = Pulse()

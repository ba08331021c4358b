"""Clock of the start of a run: the seconds of each part, from the command to the first step."""

from __future__ import annotations

import time

from timm_parallel.machine.process import started_at


class StartClock:
    """Seconds of the parts of a start that have ended, by name, in order.

    The parts are `launch` (the command reads the config and starts this process), `imports`,
    `devices` (with the process group), `data` (the lists of images), `model` (with optimizer,
    loaders and downloads) and `setup` (checks, banner and trackers).
    """

    def __init__(self) -> None:
        self.parts: dict[str, float] = {}

    def end(self, part: str) -> None:
        """End a part of the start, in which the time since the previous part was spent.

        Only the first call for a part counts. Later ones belong to another epoch or dataset.
        """
        if part not in self.parts:
            self.parts[part] = time.perf_counter() - started_at() - sum(self.parts.values())

    def until_first_step(self, first_fetch: float, first_step_at: float) -> dict[str, float]:
        """Return the seconds of all parts, including `first_batch` and `first_step`.

        `first_fetch`: seconds for which the first step waited for its data. `first_step_at`: time
        of time.perf_counter() at its end.
        """
        parts = {**self.parts, "first_batch": first_fetch}
        return {**parts, "first_step": first_step_at - started_at() - sum(parts.values())}


start_clock = StartClock()


def describe_start(parts: dict[str, float]) -> str:
    """Format the seconds of the parts of a start for the console."""
    shares = [f"{name.replace('_', ' ')} {seconds:.1f}" for name, seconds in parts.items()]
    return f"{sum(parts.values()):.1f} s to the end of the first step: {', '.join(shares)}"

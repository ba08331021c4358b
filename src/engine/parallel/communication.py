"""Communication per training step: bytes that the devices exchange, and seconds that this takes."""

from __future__ import annotations

from torch import nn


class Communication:
    """Communication of a run on one device, which exchanges nothing. Strategies override it."""

    method = "one device: none"

    def start_measuring(self) -> None:
        """Start the time window that `seconds` averages over."""

    def seconds(self) -> tuple[float, float] | None:
        """Return this rank's seconds per step: (communication, the part that does not overlap with computing); None: unknown."""
        return 0.0, 0.0

    def bytes(self, model: nn.Module, accumulate: int) -> tuple[int, int]:
        """Return bytes per step of `accumulate` batches: (over all links, over the busiest link in one direction).

        `model`: the training step, whose parameters are the model's and those of the loss.
        """
        return 0, 0

    def timed_calls(self) -> list[tuple[nn.Module, str]]:
        """List the (module, method name) pairs of the forward pass that the profiler times separately."""
        return []

"""Communication per training step: bytes of the gradients that ranks reduce, and seconds that this
takes.
"""

from __future__ import annotations

from torch import nn


class Communication:
    """Communication of a run on one device, which exchanges nothing. Strategies override it."""

    method = "one device: none"

    def start_measuring(self) -> None:
        """Start the time window that `seconds` averages over."""

    def seconds(self) -> tuple[float, float] | None:
        """Return this rank's seconds per step: (communication, the part that does not overlap with
        computing); None: unknown.
        """
        return 0.0, 0.0

    def bytes(self, step: nn.Module) -> int | None:
        """Return the bytes of all gradients that the ranks reduce in a step of training `step`;
        None: unknown.
        """
        return 0


class UnmeasuredCommunication(Communication):
    """Communication by kernels among others, as under dp and fsdp: neither its bytes nor its
    seconds are known.
    """

    def seconds(self) -> tuple[float, float] | None:
        return None

    def bytes(self, step: nn.Module) -> int | None:
        return None

"""Measure the communication between ranks in a training step: bytes of gradients, and seconds."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn


class Communication:
    """Communication of a run on one device, which is zero. Other strategies override this class."""

    method = "one device: none"

    def start_measuring(self) -> None:
        """Start a new time window, over which the seconds of communication are averaged."""

    def seconds(self) -> tuple[float, float] | None:
        """Return two times of this rank in seconds per step, or None if they are unknown.

        The first is the time of all communication. The second is the part of it that does not
        overlap with computing.
        """
        return 0.0, 0.0

    def bytes(self, trained: Iterable[nn.Parameter]) -> int | None:
        """Return the bytes of all gradients that the ranks reduce in one training step; None:
        unknown. `trained`: the parameters that the step trains.
        """
        return 0


class UnmeasuredCommunication(Communication):
    """Communication of a strategy for which bytes and seconds are unknown, such as dp and fsdp.

    Their transfers are not separated from other GPU kernels.
    """

    def seconds(self) -> tuple[float, float] | None:
        return None

    def bytes(self, trained: Iterable[nn.Parameter]) -> int | None:
        return None

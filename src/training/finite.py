"""Losses and weights that are not finite: found without waiting for the device in every step, decided on all ranks alike."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from src.parallel.single import Single


class NotFiniteError(RuntimeError):
    """The loss or the weights became NaN or infinite; every rank raises this at the same boundary."""

    def __init__(self, what: str, step: int) -> None:
        """`step`: the first that was not finite."""
        super().__init__(what)
        self.step = step


class LossWindow:
    """The losses since the last boundary. They stay on the device until `fetch`."""

    def __init__(self) -> None:
        self._losses: dict[int, Tensor] = {}  # by step

    def add(self, step: int, loss: Tensor) -> None:
        self._losses[step] = loss

    def fetch(self, strategy: Single) -> list[float]:
        """The losses, each the mean over the ranks, and an empty window. Collective. Raises NotFiniteError."""
        if not self._losses:
            return []
        own = torch.stack(list(self._losses.values()))
        losses = strategy.sum(own).tolist()
        for index, (step, loss) in enumerate(zip(self._losses, losses, strict=True)):
            if not math.isfinite(loss):
                bad = [rank for rank, ok in enumerate(strategy.gather(bool(own[index].isfinite()))) if not ok]
                raise NotFiniteError(f"the loss is {loss} at step {step} (rank {', '.join(map(str, bad))})", step)
        self._losses = {}
        return [loss / strategy.world_size for loss in losses]


def check_finite(states: Iterable[dict[str, Tensor] | None], strategy: Single, step: int) -> None:
    """Before weights and buffers are saved: raise NotFiniteError if they are not finite on any rank. Collective."""
    tensors = [tensor for state in states for tensor in (state or {}).values() if tensor.is_floating_point()]
    bad = torch.stack([~tensor.isfinite().all() for tensor in tensors]).any()
    if strategy.sum(bad.to(torch.int64)).item():
        raise NotFiniteError(f"the weights are not finite after step {step}, though its loss was", step)

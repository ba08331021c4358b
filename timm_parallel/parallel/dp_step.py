"""Training steps under dp, which compute the loss of the whole batch or one loss per replica."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

Metrics = dict[str, Tensor]


def chunk_sizes(batch_size: int, replicas: int) -> list[int]:
    """Return the sizes of the chunks into which torch splits a batch for dp. The last chunk may be
    smaller.
    """
    return [len(chunk) for chunk in torch.arange(batch_size).chunk(replicas)]


class StepOnOutputs(nn.Module):
    """Training step under dp that computes the loss of the whole batch on the output device.

    This is the usual form of DataParallel.
    """

    def __init__(self, step: Any) -> None:
        super().__init__()
        self.step = step

    def forward(self, images: Tensor, targets: Tensor) -> tuple[Tensor, Metrics]:
        loss, metrics = self.step(images, targets)
        return loss.to(images.device), metrics


class StepInReplicas(nn.Module):
    """Training step under dp in which each replica computes the loss of its chunk.

    The losses and metrics of the replicas are averaged, weighted by the sizes of their chunks.
    """

    def __init__(self, spread: nn.Module, replicas: int, buffers: dict[str, Tensor]) -> None:
        """`buffers`: those of the loss by name. A replica must not write them, because only the
        writes of the first replica would last.
        """
        super().__init__()
        self.spread, self.replicas = spread, replicas
        # torch counts in _version how often a tensor was written in place.
        self._written = {name: (buffer, buffer._version) for name, buffer in buffers.items()}
        # Weights with which the losses of the replicas are averaged, as a dictionary from batch
        # size to tensor. They are cached, because creating a tensor waits for the device.
        self._weights: dict[int, Tensor] = {}

    def forward(self, images: Tensor, targets: Tensor) -> tuple[Tensor, Metrics]:
        losses, metrics = self.spread(images, targets)
        for name, (buffer, version) in self._written.items():
            if buffer._version != version:
                raise ValueError(
                    f"parallel.loss_in_replica=true: the training step writes the buffer {name}, "
                    "which would only get the part of the first replica; set "
                    "parallel.loss_in_replica=false"
                )
        # Each step writes the same buffers, so the first one tells.
        self._written = {}
        size = len(images)
        if size not in self._weights:
            shares = torch.tensor(
                chunk_sizes(size, self.replicas), dtype=losses.dtype, device=losses.device
            )
            self._weights[size] = shares / size
        weights = self._weights[size]
        averaged = {name: torch.dot(values.view(-1), weights) for name, values in metrics.items()}
        return torch.dot(losses.view(-1), weights).to(images.device), averaged

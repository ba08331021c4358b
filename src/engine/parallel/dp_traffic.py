"""Training steps under DataParallel, and the bytes that they move: inputs and replicas out, outputs and gradients back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from src.engine.parallel.communication import Communication

Metrics = dict[str, Tensor]


class DpTraffic(Communication):
    """Counts the bytes on the links of the first device, through which all of dp's traffic passes."""

    method = "not measured: copies and sums are kernels among others"

    def __init__(self, devices: list[torch.device], output_device: torch.device) -> None:
        self._devices, self._output_device = devices, output_device
        # Bytes of a batch from and to the first device, besides the model's own. Counted once: batches keep their shape.
        self._out: int | None = None
        self._back = 0
        self.spread: nn.Module | None = None  # the DataParallel of the training step

    def timed_calls(self) -> list[tuple[nn.Module, str]]:
        assert self.spread is not None
        return [(self.spread, name) for name in ("scatter", "replicate", "gather")]

    def seconds(self) -> tuple[float, float] | None:
        return (0.0, 0.0) if len(self._devices) == 1 else None

    def bytes(self, model: nn.Module, accumulate: int) -> tuple[int, int]:
        """Count what each batch moves: parameters and buffers to the replicas, gradients back, inputs and outputs."""
        others = len(self._devices) - 1
        # The whole step with loss_in_replica, else the model without its loss.
        copied = model if self.spread is None else self.spread
        out = others * sum(tensor.nbytes for tensor in (*copied.parameters(), *copied.buffers())) + (self._out or 0)
        back = others * sum(p.nbytes for p in copied.parameters() if p.requires_grad) + self._back
        return accumulate * (out + back), accumulate * max(out, back)

    def count(self, images: Tensor, targets: Tensor, outputs: Tensor | None) -> None:
        """Count the input and output bytes of a batch. `outputs`: None if the replicas compute the loss themselves."""
        if self._out is not None:
            return
        elsewhere = self._share_elsewhere(len(images), images.device)
        if outputs is None:
            self._out = round((images.nbytes + targets.nbytes) * elsewhere)
            return
        to_loss = targets.nbytes if self._output_device != images.device else 0
        # Outputs, and later their gradients.
        self._back = round(outputs.nbytes * self._share_elsewhere(len(images), self._output_device))
        self._out = round(images.nbytes * elsewhere) + to_loss + self._back

    def _share_elsewhere(self, batch_size: int, device: torch.device) -> float:
        """Return the share of a batch for devices other than `device`; on a CPU, for all replicas but the first."""
        sizes = chunk_sizes(batch_size, len(self._devices))
        if device.type == "cpu":
            return sum(sizes[1:]) / batch_size
        return sum(size for size, at in zip(sizes, self._devices, strict=False) if at != device) / batch_size


def chunk_sizes(batch_size: int, replicas: int) -> list[int]:
    """Return the sizes of the chunks into which torch splits a batch; the last may be smaller."""
    return [len(chunk) for chunk in torch.arange(batch_size).chunk(replicas)]


class StepOnOutputs(nn.Module):
    """Training step that computes the loss of the whole batch on the output device: the usual form of DataParallel."""

    def __init__(self, step: Any, traffic: DpTraffic) -> None:
        super().__init__()
        self.step, self.traffic = step, traffic
        step.model.register_forward_hook(self._count)

    def forward(self, images: Tensor, targets: Tensor) -> tuple[Tensor, Metrics]:
        self._targets = targets
        loss, metrics = self.step(images, targets)
        return loss.to(images.device), metrics

    def _count(self, spread: nn.Module, inputs: tuple[Tensor, ...], outputs: Tensor) -> None:
        self.traffic.count(inputs[0], self._targets, outputs)


class StepInReplicas(nn.Module):
    """Training step that computes the loss in each replica, and averages loss and metrics weighted by chunk size."""

    def __init__(self, spread: nn.Module, traffic: DpTraffic, replicas: int) -> None:
        super().__init__()
        self.spread, self.traffic, self.replicas = spread, traffic, replicas
        # By batch size. Cached, because creating them waits for the device.
        self._weights: dict[int, Tensor] = {}

    def forward(self, images: Tensor, targets: Tensor) -> tuple[Tensor, Metrics]:
        losses, metrics = self.spread(images, targets)
        size = len(images)
        if size not in self._weights:
            shares = torch.tensor(chunk_sizes(size, self.replicas), dtype=losses.dtype, device=losses.device)
            self._weights[size] = shares / size
            self.traffic.count(images, targets, None)
        weights = self._weights[size]
        averaged = {name: torch.dot(values.view(-1), weights) for name, values in metrics.items()}
        return torch.dot(losses.view(-1), weights).to(images.device), averaged

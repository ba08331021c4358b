"""Training steps under dp, which compute the losses of the whole batch or of one chunk per
replica.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from timm_parallel.batch import Batch
from timm_parallel.parallel.networks import PhaseStep

Numbers = dict[str, Tensor]


def chunk_sizes(batch_size: int, replicas: int) -> list[int]:
    """Return the sizes of the chunks into which torch splits a batch for dp. The last chunk may be
    smaller.
    """
    return [len(chunk) for chunk in torch.arange(batch_size).chunk(replicas)]


class StepOnOutputs(nn.Module):
    """Training step under dp that computes the losses of the whole batch on the output device.

    This is the usual form of DataParallel.
    """

    def __init__(self, step: PhaseStep) -> None:
        super().__init__()
        self.step = step

    def forward(self, batch: Batch) -> tuple[Tensor, Numbers]:
        losses, numbers = self.step(batch)
        return losses.to(batch.device), numbers


class StepInReplicas(nn.Module):
    """Training step under dp in which each replica computes the losses of its chunk."""

    def __init__(
        self,
        step: PhaseStep,
        spread: Callable[[nn.Module], nn.Module],
        buffers: dict[str, Tensor],
    ) -> None:
        """`spread`: function that replicates a module with DataParallel. `buffers`: those of the
        loss by name. A replica must not write them, because only the writes of the first replica
        would last.
        """
        super().__init__()
        self.replica = _StepOfTensors(step)
        self.spread = spread(self.replica)
        # torch counts in _version how often a tensor was written in place.
        self._written = {name: (buffer, buffer._version) for name, buffer in buffers.items()}

    def forward(self, batch: Batch) -> tuple[Tensor, Numbers]:
        for name, field in batch.fields.items():
            if not isinstance(field, Tensor):
                raise ValueError(
                    f"parallel.loss_in_replica=true: the field {name} of a batch is no tensor, "
                    "which DataParallel cannot split; set parallel.loss_in_replica=false"
                )
        self.replica.batch = batch
        indices = torch.from_numpy(batch.indices).to(batch.device, non_blocking=True)
        losses, numbers = self.spread(*batch.fields.values(), indices)
        for name, (buffer, version) in self._written.items():
            if buffer._version != version:
                raise ValueError(
                    f"parallel.loss_in_replica=true: the training step writes the buffer {name}, "
                    "which would only get the part of the first replica; set "
                    "parallel.loss_in_replica=false"
                )
        # Each step writes the same buffers, so the first one tells.
        self._written = {}
        return losses.to(batch.device), numbers


class _StepOfTensors(nn.Module):
    """Training step whose inputs are the fields of a batch and its indices, so that DataParallel
    can split them.
    """

    # The whole batch, which tells the names of the fields.
    batch: Batch

    def __init__(self, step: PhaseStep) -> None:
        super().__init__()
        self.step = step

    def forward(self, *tensors: Tensor) -> tuple[Tensor, Numbers]:
        *fields, indices = tensors
        whole = self.batch
        chunk = Batch(
            dict(zip(whole.fields, fields, strict=True)),
            indices,
            seed=whole.seed,
            epoch=whole.epoch,
            share=whole.share,
        )
        losses, numbers = self.step(chunk)
        # DataParallel concatenates, so a mean over the chunk is divided among its samples.
        if losses.ndim == 0:
            losses = (losses * (self.step.task.weight(chunk) / len(chunk))).expand(len(chunk))
        return losses, {name: values.expand(len(chunk)) for name, values in numbers.items()}

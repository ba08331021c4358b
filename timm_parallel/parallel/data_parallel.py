"""Strategy dp: torch.nn.DataParallel, with one process and one thread per device.

Each step copies the model to all devices, and each copy (replica) computes one chunk of the batch.
BatchNorm in training, and losses over pairs of images, see only the chunk of their replica.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from timm_parallel.batch import Batch
from timm_parallel.keys import ResolvedParallel
from timm_parallel.machine.ranks import Ranks
from timm_parallel.parallel.communication import Communication, UnmeasuredCommunication
from timm_parallel.parallel.networks import LOSS, Networks, PhaseStep
from timm_parallel.parallel.strategy import Strategy
from timm_parallel.parallel.threaded_data_parallel import ThreadedDataParallel

if TYPE_CHECKING:
    from torch.distributed import Store


class DataParallelStrategy(Strategy):
    """Strategy dp, in which one process drives all devices of the run."""

    compiles = False

    def __init__(self, config: ResolvedParallel, ranks: Ranks, store: Store | None = None) -> None:
        super().__init__(config, ranks, store)
        if config.accelerator == "cpu":
            self.note = "threads on CPU; the speed is not that of GPUs"
        self.output_device = (
            self.device
            if config.output_device is None
            else torch.device("cuda", config.output_device)
        )

    def choose_devices(self, ranks: Ranks) -> list[torch.device]:
        if self.config.accelerator == "cuda":
            return [
                torch.device("cuda", index)
                for index in self.config.device_ids or range(self.config.devices)
            ]
        return [torch.device("cpu")] * self.config.devices

    def wrap(self, step: PhaseStep) -> nn.Module:
        """Wrap a training step with DataParallel. Raises ValueError if the task has networks other
        than the model and its loss, because only the model would be spread over the devices.

        The model is replicated, and the loss of the whole batch is computed on the gathered
        outputs. This is the usual form of DataParallel.
        """
        others = [name for name in step.networks if name not in ("model", LOSS)]
        if others:
            raise ValueError(
                f"parallel=dp: DataParallel spreads one network, but the task has {others} too; "
                "use parallel=ddp"
            )
        spread = self._spread(step.networks["model"], self.output_device)
        # Move the loss to the device on which the outputs are gathered. The model stays on its
        # device.
        if LOSS in step.networks:
            step.networks[LOSS].to(self.output_device)
        step.networks["model"] = spread
        return _StepOnOutputs(step)

    def for_evaluation(self, networks: Networks) -> Networks:
        """Replicate the model for evaluation, and gather its outputs on the device of the batch.

        The key parallel.output_device is ignored here, because it applies only to training.
        """
        return networks.replace(model=self._spread(networks["model"], self.device))

    def chunk_sizes(self, batch_size: int) -> list[int]:
        # torch splits a batch in this way, so the last chunk may be smaller.
        return [len(chunk) for chunk in torch.arange(batch_size).chunk(len(self.devices))]

    def count_replicas(self) -> int:
        probe = self._spread(_One().to(self.device), self.device)
        return int(probe(torch.zeros(len(self.devices), device=self.device)).sum().item())

    def communication(self, wrapped: nn.Module) -> Communication:
        return Communication() if len(self.devices) == 1 else UnmeasuredCommunication()

    def _spread(self, module: nn.Module, gather_on: torch.device) -> nn.Module:
        dim = self.config.dim or 0
        if self.device.type == "cuda":
            return nn.DataParallel(module, self.devices, gather_on, dim)
        return ThreadedDataParallel(module, len(self.devices), self.config.threads_per_device, dim)


class _StepOnOutputs(nn.Module):
    """Training step whose losses move from the output device to the device of the batch."""

    def __init__(self, step: PhaseStep) -> None:
        super().__init__()
        self.step = step

    def forward(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        losses, numbers = self.step(batch)
        return losses.to(batch.device), numbers


class _One(nn.Module):
    def forward(self, chunk: Tensor) -> Tensor:
        return torch.ones(1, device=chunk.device)

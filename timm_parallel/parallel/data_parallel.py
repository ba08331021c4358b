"""Strategy dp: torch.nn.DataParallel, with one process and one thread per device.

Each step copies the model to all devices, and each copy (replica) computes one chunk of the batch.
BatchNorm in training, and losses over pairs of images, see only the chunk of their replica.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from timm_parallel.batch import Batch
from timm_parallel.keys import TRAITS, ResolvedParallel
from timm_parallel.machine.ranks import Ranks
from timm_parallel.parallel.networks import LOSS, Networks, PhaseStep
from timm_parallel.parallel.strategy import Communication, Strategy

if TYPE_CHECKING:
    from torch.distributed import Store

log = logging.getLogger(__name__)


class DataParallelStrategy(Strategy):
    """Strategy dp, in which one process drives all devices of the run."""

    traits = TRAITS["dp"]

    def __init__(self, config: ResolvedParallel, ranks: Ranks, store: Store | None = None) -> None:
        super().__init__(config, ranks, store)
        if config.accelerator == "cpu":
            log.info("dp           threads on CPU; the speed is not that of GPUs")
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
        return Networks({**networks, "model": self._spread(networks["model"], self.device)})

    def _count_replicas(self) -> int:
        probe = self._spread(_One().to(self.device), self.device)
        return int(probe(torch.zeros(len(self.devices), device=self.device)).sum().item())

    def communication(self, wrapped: nn.Module) -> Communication:
        return Communication(is_zero=len(self.devices) == 1)

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


class ThreadedDataParallel(nn.DataParallel):  # type: ignore[type-arg]
    """DataParallel over `replicas` CPU threads, for machines without GPUs. There, torch's own
    DataParallel would silently run the model on one device. Each replica computes with `threads`
    cores.
    """

    # The backward pass runs in one thread, so speed and memory say nothing about dp on GPUs. The
    # replicas share one random generator, so dropout is not reproducible.

    def __init__(self, module: nn.Module, replicas: int, threads: int, dim: int) -> None:
        # Skip the constructor of nn.DataParallel, which would find no GPU and set up only one
        # device.
        nn.Module.__init__(self)
        self.module, self.dim = module, dim
        self.device_ids, self.output_device, self.src_device_obj = (
            list(range(replicas)),
            0,
            torch.device("cpu"),
        )
        self._pool = ThreadPoolExecutor(replicas, "replica", torch.set_num_threads, (threads,))

    def scatter(self, inputs: Sequence[Tensor], kwargs: Any, device_ids: Sequence[Any]) -> Any:
        """Split every input into one chunk per replica.

        Returns a list with a tuple of inputs per replica, and a list of empty keyword arguments.
        """
        chunks = list(
            zip(*(tensor.chunk(len(device_ids), self.dim) for tensor in inputs), strict=True)
        )
        return chunks, [{} for _ in chunks]

    def replicate(self, module: nn.Module, device_ids: Sequence[Any]) -> list[Any]:
        """Copy the module once per replica.

        The backward pass adds the gradients of all copies to the original parameters. The first
        copy shares the buffers of the original module.
        """
        # The first replica shares its buffers with the original, as on GPUs, so that its BatchNorm
        # statistics persist.
        return [_replica(module, first=index == 0) for index in range(len(device_ids))]

    def parallel_apply(
        self, replicas: Sequence[Any], inputs: Sequence[Any], kwargs: Any
    ) -> list[Any]:
        # Pass on whether gradients are enabled, because PyTorch stores this per thread. Autocast is
        # also per thread, but the module enters it by itself.
        grad = torch.is_grad_enabled()

        def apply(replica: nn.Module, chunk: tuple[Tensor, ...]) -> Any:
            with torch.set_grad_enabled(grad):
                return replica(*chunk)

        return list(self._pool.map(apply, replicas, inputs))

    def gather(self, outputs: Any, output_device: Any) -> Any:
        """Concatenate the outputs of the replicas, tensor by tensor. Scalars become a vector with
        one entry per replica.
        """

        def concatenate(*parts: Tensor) -> Tensor:
            return torch.cat(
                [part.view(1) if part.dim() == 0 else part for part in parts], self.dim
            )

        return tree_map(concatenate, *outputs)


def _replica(module: nn.Module, first: bool) -> nn.Module:
    replica = module._replicate_for_data_parallel()  # type: ignore[operator]
    for name, child in module._modules.items():
        replica._modules[name] = None if child is None else _replica(child, first)
    for name, parameter in module._parameters.items():
        if parameter is None:
            replica._parameters[name] = None
        else:
            # Store a clone of the parameter, through which gradients flow to the original. The
            # clone is not a leaf tensor, so it cannot be a Parameter.
            setattr(
                replica, name, parameter.clone() if torch.is_grad_enabled() else parameter.detach()
            )
    for name, buffer in module._buffers.items():
        if buffer is not None:
            replica._buffers[name] = buffer if first else buffer.clone()
    return replica

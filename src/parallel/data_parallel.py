"""torch.nn.DataParallel: one process, one replica and one thread per device, every step copied out and gathered back.

Without GPUs torch's class silently becomes the bare module. `ThreadedDataParallel` runs the same scatter, replicate,
parallel_apply and gather over threads instead, so that what dp means can be tested anywhere. Its speed and its memory
say nothing about GPUs: its backward pass runs in one thread.

A model that reads its whole batch (BatchNorm in training, losses over pairs) sees only its replica's chunk under dp.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from src.engine.machine.ranks import Ranks
from src.parallel.forward import Autocast, ModelAndLoss
from src.parallel.single import Criterion, Single
from src.schema import ParallelConfig


class DataParallelStrategy(Single):
    """One process drives all `devices`."""

    kind = "dp"

    def __init__(self, config: ParallelConfig, ranks: Ranks) -> None:
        super().__init__(config, ranks)
        self.dim = config.dim or 0
        self.output_device = self.device if config.output_device is None else torch.device("cuda", config.output_device)

    def _choose_devices(self) -> list[torch.device]:
        self._refuse_blind_torch()
        count = int(self.config.devices)
        if self.config.accelerator == "cuda":
            return [torch.device("cuda", index) for index in self.config.device_ids or range(count)]
        return [torch.device("cpu")] * count

    def wrap(self, model: nn.Module, criterion: Criterion, autocast: torch.dtype | None) -> nn.Module:
        if self.config.loss_in_replica:
            return LossInReplicas(self._spread(ModelAndLoss(model, criterion, self.device.type, autocast)), self)
        return LossOnOutput(self._spread(Autocast(model, self.device.type, autocast)), criterion, self.output_device)

    def for_evaluation(self, model: nn.Module) -> nn.Module:
        return self._spread(model)

    def measured_world_size(self) -> int:
        """The same proof as an all-reduce of ones: one 1 from each replica that really ran, gathered and added."""
        probe = self._spread(_One().to(self.device))
        return int(probe(torch.zeros(len(self.devices), device=self.device)).sum().item())

    def memory(self) -> list[dict[str, Any]]:
        entries = super().memory()
        if self.device.type == "cuda":
            return entries
        return [{**entries[0], "device": f"cpu:{i}", "shared": True} for i in range(len(self.devices))]  # one process

    def communication(self, model: nn.Module, wrapped: nn.Module) -> dict[str, Any]:
        """Parameters and buffers go out to the other replicas and gradients come back; inputs and outputs are small beside them."""
        parameters = sum(p.numel() * p.element_size() for p in model.parameters())
        buffers = sum(b.numel() * b.element_size() for b in model.buffers())
        others = len(self.devices) - 1
        return {"bytes_per_step": others * (2 * parameters + buffers), "ms_per_step": None, "exposed_ms_per_step": None}

    def chunk_sizes(self, batch_size: int) -> list[int]:
        return [len(chunk) for chunk in torch.arange(batch_size).chunk(len(self.devices))]

    def _spread(self, module: nn.Module) -> nn.Module:
        if self.device.type == "cuda":
            return nn.DataParallel(module, self.devices, self.output_device, self.dim)
        return ThreadedDataParallel(module, len(self.devices), int(self.config.threads_per_device), self.dim)


class LossOnOutput(nn.Module):
    """Outputs gathered on `output_device`, where the loss of the whole batch is taken. DataParallel's usual form."""

    def __init__(self, spread: nn.Module, criterion: Criterion, output_device: torch.device) -> None:
        super().__init__()
        self.spread, self.criterion, self.output_device = spread, criterion, output_device

    def forward(self, images: Tensor, targets: Tensor) -> Tensor:
        return self.criterion(self.spread(images), targets.to(self.output_device, non_blocking=True))


class LossInReplicas(nn.Module):
    """Each replica takes the loss of its chunk: scalars are gathered instead of outputs, weighted by chunk size."""

    def __init__(self, spread: nn.Module, strategy: DataParallelStrategy) -> None:
        super().__init__()
        self.spread = spread
        self.chunk_sizes = strategy.chunk_sizes

    def forward(self, images: Tensor, targets: Tensor) -> Tensor:
        losses = self.spread(images, targets)
        weights = torch.tensor(self.chunk_sizes(len(images)), dtype=losses.dtype, device=losses.device)
        return torch.dot(losses.view(-1), weights) / len(images)


class ThreadedDataParallel(nn.DataParallel):  # type: ignore[type-arg]
    """DataParallel over CPU threads: `num_replicas` replicas, each in a thread that uses `threads` cores."""

    def __init__(self, module: nn.Module, num_replicas: int, threads: int, dim: int) -> None:
        nn.Module.__init__(self)  # not DataParallel's: it looks for GPUs, and finding none forgets the rest
        self.module, self.dim = module, dim
        self.num_replicas = num_replicas
        self._pool = ThreadPoolExecutor(num_replicas, "replica", initializer=torch.set_num_threads, initargs=(threads,))

    def forward(self, *inputs: Tensor) -> Any:
        chunks = list(zip(*(tensor.chunk(self.num_replicas, self.dim) for tensor in inputs), strict=True))
        if self.num_replicas == 1:
            return self.module(*chunks[0])
        replicas = self.replicate(self.module, range(len(chunks)))
        return self.gather(self.parallel_apply(replicas, chunks, None), 0)

    def replicate(self, module: nn.Module, device_ids: Sequence[Any]) -> list[Any]:
        """Copies whose parameters are clones that pass gradients back; the first keeps the module's own buffers.

        So its BatchNorm statistics persist and the others' are dropped, as torch.nn.parallel.replicate does on GPUs.
        """
        return [_replica(module, first=index == 0) for index in range(len(device_ids))]

    def parallel_apply(self, replicas: Sequence[Any], inputs: Sequence[Any], kwargs: Any) -> list[Any]:
        grad = torch.is_grad_enabled()  # per thread, like autocast, which the module enters itself

        def apply(replica: nn.Module, chunk: tuple[Tensor, ...]) -> Any:
            with torch.set_grad_enabled(grad):
                return replica(*chunk)

        return list(self._pool.map(apply, replicas, inputs))

    def gather(self, outputs: Any, output_device: Any) -> Any:
        return torch.cat([output.view(1) if output.dim() == 0 else output for output in outputs], self.dim)


def _replica(module: nn.Module, first: bool) -> nn.Module:
    replica = module._replicate_for_data_parallel()  # type: ignore[operator]
    for name, child in module._modules.items():
        replica._modules[name] = None if child is None else _replica(child, first)
    for name, parameter in module._parameters.items():
        if parameter is None:
            replica._parameters[name] = None
        else:  # not a leaf, so no longer a Parameter: gradients flow through the clone to the original
            setattr(replica, name, parameter.clone() if torch.is_grad_enabled() else parameter.detach())
    for name, buffer in module._buffers.items():
        if buffer is not None:
            replica._buffers[name] = buffer if first else buffer.clone()
    return replica


class _One(nn.Module):
    def forward(self, chunk: Tensor) -> Tensor:
        return torch.ones(1, device=chunk.device)

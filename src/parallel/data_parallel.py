"""torch.nn.DataParallel: one process, one replica and one thread per device, every step copied out and gathered back.

Without GPUs torch's class silently becomes the bare module. `ThreadedDataParallel` runs the same scatter, replicate,
parallel_apply and gather over threads instead, so that what dp means can be tested anywhere. Its speed and its memory
say nothing about GPUs: its backward pass runs in one thread, and where a model draws random numbers (dropout), replicas
take turns at the process's one generator.

A model that reads its whole batch (BatchNorm in training, losses over pairs) sees only its replica's chunk under dp.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from src.engine.machine.ranks import Ranks
from src.parallel.forward import Autocast, Criterion, ModelAndLoss
from src.parallel.single import Single
from src.schema import ResolvedParallel


class DataParallelStrategy(Single):
    """One process drives all `devices`."""

    def __init__(self, config: ResolvedParallel, ranks: Ranks, store: Any = None) -> None:
        super().__init__(config, ranks)
        self.dim = config.dim or 0
        self.output_device = self.device if config.output_device is None else torch.device("cuda", config.output_device)
        self.generators = [torch.Generator() for _ in self.devices]  # of replicas that are threads on a CPU

    def _choose_devices(self) -> list[torch.device]:
        count = self.config.devices
        if self.config.accelerator == "cuda":
            return [torch.device("cuda", index) for index in self.config.device_ids or range(count)]
        return [torch.device("cpu")] * count

    def wrap(self, model: nn.Module, criterion: Criterion, autocast: torch.dtype | None) -> nn.Module:
        if self.config.loss_in_replica:
            with_loss = ModelAndLoss(model, criterion, self.device.type, autocast)
            return LossInReplicas(self._spread(with_loss, self.output_device), self)
        bare = Autocast(model, self.device.type, autocast)
        return LossOnOutput(self._spread(bare, self.output_device), criterion, self)

    def for_evaluation(self, model: nn.Module, autocast: torch.dtype | None) -> nn.Module:
        """Outputs are gathered where the labels are; `output_device` is for the larger share that training takes."""
        return self._spread(Autocast(model, self.device.type, autocast), self.device)

    def seed(self, seeds: Sequence[int]) -> None:
        super().seed(seeds)
        for generator, seed in zip(self.generators, seeds, strict=True):
            generator.manual_seed(seed)

    def measured_world_size(self) -> int:
        """The same proof as an all-reduce of ones: one 1 from each replica that really ran, gathered and added."""
        probe = self._spread(_One().to(self.device), self.device)
        return int(probe(torch.zeros(len(self.devices), device=self.device)).sum().item())

    def memory(self) -> list[dict[str, Any]]:
        entries = super().memory()
        if self.device.type == "cuda":
            return entries
        return [{**entries[0], "device": f"cpu:{i}", "shared": True} for i in range(len(self.devices))]  # one process

    def calls_of_forward(self, wrapped: nn.Module) -> list[tuple[nn.Module, str]]:
        assert isinstance(wrapped, LossOnOutput | LossInReplicas)
        return [(wrapped.spread, name) for name in ("scatter", "replicate", "gather")]

    def communication_seconds(self, wrapped: nn.Module) -> tuple[float, float] | None:
        return (0.0, 0.0) if len(self.devices) == 1 else None  # copies and sums are kernels among others

    def communication_bytes(self, model: nn.Module, wrapped: nn.Module, accumulate: int) -> tuple[int, int]:
        """For every batch parameters and buffers go out to the other replicas, gradients come back, and the batch moves too.

        All of it over the links of the first device.
        """
        assert isinstance(wrapped, LossOnOutput | LossInReplicas)
        others = len(self.devices) - 1
        out = others * sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers())) + wrapped.bytes_out
        back = others * sum(p.nbytes for p in model.parameters() if p.requires_grad) + wrapped.bytes_back
        return accumulate * (out + back), accumulate * max(out, back)

    def share_elsewhere(self, batch_size: int, device: torch.device) -> float:
        """The share of a batch that goes to replicas on other devices than `device`; on a CPU, to all but the first replica."""
        chunks = self.chunk_sizes(batch_size)
        places = self.devices if self.device.type == "cuda" else [self.device, *[None] * len(chunks)]
        return sum(size for size, place in zip(chunks, places, strict=False) if place != device) / batch_size

    def chunk_sizes(self, batch_size: int) -> list[int]:
        return [len(chunk) for chunk in torch.arange(batch_size).chunk(len(self.devices))]

    def _spread(self, module: nn.Module, gather_on: torch.device) -> nn.Module:
        if self.device.type == "cuda":
            return nn.DataParallel(module, self.devices, gather_on, self.dim)
        return ThreadedDataParallel(module, self.generators, self.config.threads_per_device, self.dim)


class LossOnOutput(nn.Module):
    """Outputs gathered on the output device, where the loss of the whole batch is taken. DataParallel's usual form."""

    def __init__(self, spread: nn.Module, criterion: Criterion, strategy: DataParallelStrategy) -> None:
        super().__init__()
        self.spread, self.criterion = spread, criterion
        self.output_device, self.share_elsewhere = strategy.output_device, strategy.share_elsewhere
        self.bytes_out = self.bytes_back = 0  # from and to the first device, besides the model's own

    def forward(self, images: Tensor, targets: Tensor) -> Tensor:
        outputs = self.spread(images)
        if not self.bytes_out:
            self._count(images, targets, outputs)
        loss = self.criterion(outputs, targets.to(self.output_device, non_blocking=True))
        return loss.to(images.device)

    def _count(self, images: Tensor, targets: Tensor, outputs: Tensor) -> None:
        """Images out, targets to where the loss is taken, outputs there and their gradients back."""
        size, to_loss = len(images), targets.nbytes if self.output_device != images.device else 0
        gathered = round(outputs.nbytes * self.share_elsewhere(size, self.output_device))
        self.bytes_out = round(images.nbytes * self.share_elsewhere(size, images.device)) + to_loss + gathered
        self.bytes_back = gathered


class LossInReplicas(nn.Module):
    """Each replica takes the loss of its chunk: scalars are gathered instead of outputs, weighted by chunk size."""

    def __init__(self, spread: nn.Module, strategy: DataParallelStrategy) -> None:
        super().__init__()
        self.spread = spread
        self.chunk_sizes, self.share_elsewhere = strategy.chunk_sizes, strategy.share_elsewhere
        self.bytes_out = self.bytes_back = 0  # from and to the first device, besides the model's own
        self._weights: dict[int, Tensor] = {}  # by batch size; kept, because making them waits for the device

    def forward(self, images: Tensor, targets: Tensor) -> Tensor:
        losses, size = self.spread(images, targets), len(images)
        if size not in self._weights:
            self._weights[size] = torch.tensor(self.chunk_sizes(size), dtype=losses.dtype, device=losses.device)
            self.bytes_out = round((images.nbytes + targets.nbytes) * self.share_elsewhere(size, images.device))
        return (torch.dot(losses.view(-1), self._weights[size]) / size).to(images.device)


class ThreadedDataParallel(nn.DataParallel):  # type: ignore[type-arg]
    """DataParallel over CPU threads: a replica for each of `generators`, in a thread that uses `threads` cores.

    A GPU has a random generator of its own; threads of a process share one. So in training replicas take turns, each
    with the state of its own generator, until a whole pass has shown that the model draws nothing.
    """

    def __init__(self, module: nn.Module, generators: Sequence[torch.Generator], threads: int, dim: int) -> None:
        nn.Module.__init__(self)  # not DataParallel's: it looks for GPUs, and finding none forgets the rest
        self.module, self.dim, self.generators = module, dim, generators
        self.device_ids, self.output_device, self.src_device_obj = list(range(len(generators))), 0, torch.device("cpu")
        self._draws, self._turn = True, threading.Lock()
        self._pool = ThreadPoolExecutor(len(generators), "replica", torch.set_num_threads, (threads,))

    def scatter(self, inputs: Sequence[Tensor], kwargs: Any, device_ids: Sequence[Any]) -> Any:
        """(a tuple of inputs for each replica, no keyword arguments)."""
        chunks = list(zip(*(tensor.chunk(len(device_ids), self.dim) for tensor in inputs), strict=True))
        return chunks, [{} for _ in chunks]

    def replicate(self, module: nn.Module, device_ids: Sequence[Any]) -> list[Any]:
        """Copies whose parameters are clones that pass gradients back; the first keeps the module's own buffers.

        So its BatchNorm statistics persist and the others' are dropped, as torch.nn.parallel.replicate does on GPUs.
        """
        return [_replica(module, first=index == 0) for index in range(len(device_ids))]

    def parallel_apply(self, replicas: Sequence[Any], inputs: Sequence[Any], kwargs: Any) -> list[Any]:
        grad = torch.is_grad_enabled()  # per thread, like autocast, which the module enters itself
        in_turn = self.training and self._draws

        def states() -> list[Tensor]:
            return [generator.get_state() for generator in self.generators] if in_turn else [torch.get_rng_state()]

        def apply(replica: nn.Module, chunk: tuple[Tensor, ...], generator: torch.Generator) -> Any:
            with torch.set_grad_enabled(grad), self._drawing_from(generator) if in_turn else nullcontext():
                return replica(*chunk)

        before = states()
        outputs = list(self._pool.map(apply, replicas, inputs, self.generators))
        if self.training:
            self._draws = not all(map(torch.equal, before, states()))
        return outputs

    @contextmanager
    def _drawing_from(self, generator: torch.Generator) -> Iterator[None]:
        """Inside, which is for one thread at a time, the process's generator goes on from the state of `generator`."""
        with self._turn:
            common = torch.get_rng_state()
            torch.set_rng_state(generator.get_state())
            try:
                yield
            finally:
                generator.set_state(torch.get_rng_state())
                torch.set_rng_state(common)

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

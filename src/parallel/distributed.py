"""DistributedDataParallel: one process per device, gradients averaged by all-reduce while the backward pass goes on."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import PrefixStore, Store
from torch.nn.parallel import DistributedDataParallel

from src.engine.machine.ranks import Ranks
from src.parallel.forward import Criterion, ModelAndLoss
from src.parallel.packing import as_bytes, pack, unpack
from src.parallel.reporting import ReportingParallel
from src.parallel.single import Single
from src.parallel.stopping import Stopping
from src.schema import ResolvedParallel

OPTIONS = ("bucket_cap_mb", "broadcast_buffers", "find_unused_parameters", "gradient_as_bucket_view", "static_graph")


def has_only_batch_norm_buffers(model: nn.Module) -> bool:
    """True if rank 0's need not be sent in every step: training does not read BatchNorm's, and evaluation shares them first."""
    having = (module for module in model.modules() if next(module.buffers(recurse=False), None) is not None)
    return all(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in having)


class Distributed(Single):
    """Rank `rank` of `world_size`, on a device of its own."""

    def __init__(self, config: ResolvedParallel, ranks: Ranks, store: Store | None = None) -> None:
        super().__init__(config, ranks)
        assert store is not None
        dist.init_process_group(
            config.backend,
            store=PrefixStore("process_group", store),
            rank=ranks.rank,
            world_size=ranks.world_size,
            # After the watchdog, which names the rank.
            timeout=timedelta(seconds=max(config.start_timeout, config.timeout) + 60),
            device_id=self.device if config.backend == "nccl" else None,
        )
        self._at = self.device if config.backend == "nccl" else torch.device("cpu")  # what is sent must be there
        own = PrefixStore("stopping", store.clone())  # a client of its own: waiting on one blocks its other users
        self.stopping = Stopping(ranks.rank, ranks.world_size, own)

    @property
    def backend(self) -> str | None:
        return dist.get_backend()

    def _choose_devices(self) -> list[torch.device]:
        if self.config.accelerator != "cuda":
            return [torch.device("cpu")]
        index = self.config.device_ids[self.local_rank] if self.config.device_ids else self.local_rank
        return [torch.device("cuda", index % torch.cuda.device_count())]  # gloo ranks may share a device

    def wrap(self, model: nn.Module, criterion: Criterion, autocast: torch.dtype | None) -> nn.Module:
        options = {key: getattr(self.config, key) for key in OPTIONS if getattr(self.config, key) is not None}
        if self.config.dist_bn != "reduce" and has_only_batch_norm_buffers(model):
            options.setdefault("broadcast_buffers", False)
        if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters:  # its name since torch 2.13
            options = {"forward_sync_buffers" if k == "broadcast_buffers" else k: v for k, v in options.items()}
        if self.device.type == "cuda":
            options |= {"device_ids": [self.device], "output_device": self.config.output_device}
        wrapped = ReportingParallel(ModelAndLoss(model, criterion, self.device.type, autocast), **options)
        wrapped.report(self.config.comm_hook)
        return wrapped

    def skip_sync(self, wrapped: nn.Module) -> AbstractContextManager[Any]:
        assert isinstance(wrapped, DistributedDataParallel)
        return wrapped.no_sync()

    def sum(self, values: Tensor) -> Tensor:
        total = values.clone()
        dist.all_reduce(total)
        return total

    def gather(self, value: Any) -> list[Any]:
        """As JSON: torch's all_gather_object would unpickle whatever the other end of a connection sends."""
        own = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(self._at)
        sizes = self._rows(torch.tensor([len(own)], device=self._at)).flatten()
        texts = self._rows(nn.functional.pad(own, (0, int(sizes.max()) - len(own)))).cpu().numpy()
        return [json.loads(text[:size].tobytes()) for text, size in zip(texts, sizes.tolist(), strict=True)]

    def _rows(self, own: Tensor) -> Tensor:
        """[ranks, ...]: every rank's `own`, which is of the same shape on all."""
        rows = own.new_empty(self.world_size, *own.shape)
        dist.all_gather(list(rows), own)
        return rows

    def share_state(self, state: Any) -> Any:
        """Its shape as JSON, then each tensor's bytes: nothing is unpickled. Rank 0 gets its own back."""
        tensors: list[Tensor] = []
        shape = self.gather(pack(state, tensors) if self.is_first else None)[0]
        for tensor in tensors:
            if tensor.numel():
                dist.broadcast(as_bytes(tensor.to(self._at).contiguous()), src=0)
        if self.is_first:
            return state

        def receive(dtype: torch.dtype, size: list[int]) -> Tensor:
            tensor = torch.empty(size, dtype=dtype, device=self._at)
            if tensor.numel():
                dist.broadcast(as_bytes(tensor), src=0)
            return tensor.cpu()  # as rank 0 has it: loading copies to the device what belongs there

        return unpack(shape, receive)

    def share_buffers(self, model: nn.Module) -> None:
        for buffer in model.buffers():
            if self.config.dist_bn == "reduce" and buffer.is_floating_point():
                dist.all_reduce(buffer)
                buffer.div_(self.world_size)
            else:
                dist.broadcast(buffer, src=0)

    def buffers_by_rank(self, model: nn.Module) -> Tensor | None:
        own = [buffer.flatten() for buffer in model.buffers() if buffer.is_floating_point()]
        if self.config.dist_bn != "reduce" or not own:
            return None
        return self._rows(torch.cat(own).float())

    def restore_own_buffers(self, model: nn.Module, by_rank: Tensor | None) -> None:
        if by_rank is None or len(by_rank) != self.world_size:
            return
        buffers = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
        parts = by_rank[self.rank].split([buffer.numel() for buffer in buffers])
        for buffer, part in zip(buffers, parts, strict=True):
            buffer.copy_(part.view_as(buffer))

    @contextmanager
    def one_of_node_first(self) -> Iterator[None]:
        if self.local_rank > 0:
            dist.barrier()
        yield
        if self.local_rank == 0:
            dist.barrier()

    def barrier(self) -> None:
        dist.barrier()

    def close(self) -> None:
        self.stopping.close()
        dist.destroy_process_group()

    @property
    def communication_method(self) -> str:
        if self.world_size == 1:
            return super().communication_method
        steps = "every step" if self.device.type == "cpu" else "every tenth step"
        return f"torch's reducer, {steps}: from the first bucket's start to the last one's end"

    def window_opens(self, wrapped: nn.Module) -> None:
        if isinstance(wrapped, ReportingParallel):
            wrapped.window_opens()

    def communication_seconds(self, wrapped: nn.Module) -> tuple[float, float] | None:
        if self.world_size == 1:
            return 0.0, 0.0
        return wrapped.seconds_per_step() if isinstance(wrapped, ReportingParallel) else None

    def communication_bytes(self, model: nn.Module, wrapped: nn.Module, accumulate: int) -> tuple[int, int]:
        """The gradients, all-reduced once per step in a ring: every rank sends 2 (n - 1) / n of them. Buffers once.

        Micro-batches but the last send nothing: their gradients add up at home. Ring: Patarasuk and Yuan 2009,
        doi:10.1016/j.jpdc.2008.09.002.
        """
        others = self.world_size - 1
        if not others:
            return 0, 0
        gradients = sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
        if (compressed := getattr(wrapped, "compressed", None)) is not None:
            gradients = compressed.bytes // max(1, compressed.steps)
        shared = getattr(wrapped, "broadcast_buffers", False)
        buffers = sum(buffer.nbytes for buffer in model.buffers()) if shared else 0
        return gradients, 2 * others * gradients // self.world_size + buffers

"""Process groups: a single process, or ranks joined by torch.distributed. Also synchronizes buffers
over ranks.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from timm_parallel.errors import ConnectError
from timm_parallel.faults.stop import StopCoordinator
from timm_parallel.keys import ResolvedParallel
from timm_parallel.machine.ranks import Ranks

if TYPE_CHECKING:
    from torch.distributed import Store

PIECE_BYTES = 64 * 2**20  # piece size when rank 0 sends a state


class ProcessGroup:
    """A single process: every collective returns this process's value."""

    backend: str | None = None

    def __init__(self, ranks: Ranks) -> None:
        self.rank, self.world_size = ranks.rank, ranks.world_size
        self.local_rank, self.local_world_size = ranks.local_rank, ranks.local_world_size
        self.node = ranks.node
        # True on rank 0, which writes the run's files.
        self.is_first = ranks.rank == 0
        self.stop = StopCoordinator()

    def sum(self, values: Tensor) -> Tensor:
        """Add `values` element by element over the ranks; every rank gets the sum."""
        return values

    def gather(self, value: Any) -> list[Any]:
        """Gather the `value` (plain JSON types) of each rank into a list in rank order, on every
        rank.
        """
        return [value]

    def rows(self, own: Tensor) -> Tensor:
        """Gather a tensor `own` of equal shape from each rank. Return [ranks,
        ...] on every rank.
        """
        return own[None]

    def share_state(self, state: Any) -> Any:
        """Broadcast rank 0's `state` (nested dicts and lists of tensors and plain values) to every
        rank.
        """
        return state

    def broadcast(self, tensor: Tensor) -> None:
        """Overwrite `tensor` with rank 0's, in place."""

    @contextmanager
    def one_of_node_first(self) -> Iterator[None]:
        """Let one rank per node run the `with` block first, so that the others find the files that
        it downloads.
        """
        if self.local_rank > 0:
            self.barrier()
        yield
        if self.local_rank == 0:
            self.barrier()

    def barrier(self) -> None:
        """Wait for all ranks."""

    def close(self) -> None:
        """Leave the process group."""


class TorchProcessGroup(ProcessGroup):
    """The ranks of a run, joined by torch.distributed."""

    def __init__(
        self, config: ResolvedParallel, ranks: Ranks, store: Store, device: torch.device
    ) -> None:
        super().__init__(ranks)
        self.backend = config.backend
        try:
            dist.init_process_group(
                config.backend,
                store=dist.PrefixStore("process_group", store),
                rank=ranks.rank,
                world_size=ranks.world_size,
                # Longer than the watchdog waits, because the watchdog names the rank that failed.
                timeout=timedelta(seconds=max(config.start_timeout, config.timeout) + 60),
                device_id=device if config.backend == "nccl" else None,
            )
            # NCCL makes its connections in the first collective.
            self.barrier()
        except RuntimeError as error:
            raise ConnectError(f"{type(error).__name__}: {error}") from error
        # NCCL sends from the device only.
        self._at = device if config.backend == "nccl" else torch.device("cpu")
        # A separate client of the store, because waiting on a client blocks its other users.
        self.stop = StopCoordinator(
            ranks.rank, ranks.world_size, dist.PrefixStore("stopping", store.clone())
        )

    def sum(self, values: Tensor) -> Tensor:
        total = values.clone()
        dist.all_reduce(total)
        return total

    def gather(self, value: Any) -> list[Any]:
        # As JSON: torch's all_gather_object would unpickle what the other end of a connection
        # sends.
        own = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(
            self._at
        )
        sizes = self.rows(torch.tensor([len(own)], device=self._at)).flatten()
        texts = self.rows(nn.functional.pad(own, (0, int(sizes.max()) - len(own)))).cpu().numpy()
        return [
            json.loads(text[:size].tobytes())
            for text, size in zip(texts, sizes.tolist(), strict=True)
        ]

    def rows(self, own: Tensor) -> Tensor:
        rows = own.new_empty(self.world_size, *own.shape)
        dist.all_gather(list(rows), own)
        return rows

    def share_state(self, state: Any) -> Any:
        # As a file, because torch's broadcast_object_list would unpickle what the other end of a
        # connection sends.
        file = io.BytesIO()
        if self.is_first:
            torch.save(state, file)
        size = self.gather(file.tell())[0]
        file.seek(0)
        # In pieces, because a GPU may lack memory for the whole file.
        for start in range(0, size, PIECE_BYTES):
            piece = torch.empty(min(PIECE_BYTES, size - start), dtype=torch.uint8, device=self._at)
            if self.is_first:
                piece.copy_(torch.frombuffer(bytearray(file.read(len(piece))), dtype=torch.uint8))
            dist.broadcast(piece, src=0)
            if not self.is_first:
                file.write(piece.cpu().numpy().tobytes())
        if self.is_first:
            return state
        file.seek(0)
        # To the CPU, as on rank 0. Loading copies to the device what it needs there.
        return torch.load(file, map_location="cpu", weights_only=True)

    def broadcast(self, tensor: Tensor) -> None:
        dist.broadcast(tensor, src=0)

    def barrier(self) -> None:
        dist.barrier()

    def close(self) -> None:
        self.stop.close()
        dist.destroy_process_group()


class BufferSync:
    """Gives ranks equal buffers (BatchNorm statistics) for evaluation: rank 0's, or the mean with
    `dist_bn=reduce`.
    """

    def __init__(self, group: ProcessGroup, dist_bn: str | None) -> None:
        self._group, self._averages = group, dist_bn == "reduce"

    def share(self, model: nn.Module) -> None:
        """Make the buffers of `model` equal on all ranks. Collective."""
        if self._group.world_size == 1:
            return
        for buffer in model.buffers():
            if self._averages and buffer.is_floating_point():
                buffer.copy_(self._group.sum(buffer).div_(self._group.world_size))
            else:
                self._group.broadcast(buffer)

    def by_rank(self, model: nn.Module) -> Tensor | None:
        """Gather the float buffers of all ranks: [ranks, values]. Return None if evaluation does
        not average them. Collective.
        """
        buffers = [buffer.flatten() for buffer in model.buffers() if buffer.is_floating_point()]
        if not self._averages or not buffers:
            return None
        return self._group.rows(torch.cat(buffers).float())

    def restore_own(self, model: nn.Module, by_rank: Tensor | None) -> None:
        """Restore this rank's buffers from the result of `by_rank`, unless the number of ranks has
        changed.
        """
        if by_rank is None or len(by_rank) != self._group.world_size:
            return
        buffers = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
        parts = by_rank[self._group.rank].split([buffer.numel() for buffer in buffers])
        for buffer, part in zip(buffers, parts, strict=True):
            buffer.copy_(part.view_as(buffer))

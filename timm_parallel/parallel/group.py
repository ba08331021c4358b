"""Process groups: a single process, or several ranks that torch.distributed joins.

The module also makes the BatchNorm statistics of all ranks equal for evaluation.
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

# Number of bytes per broadcast with which rank 0 sends the state of a checkpoint.
PIECE_BYTES = 64 * 2**20


class ProcessGroup:
    """Process group of a run with a single process. Every collective returns the value of this
    process.
    """

    backend: str | None = None

    def __init__(self, ranks: Ranks) -> None:
        self.rank, self.world_size = ranks.rank, ranks.world_size
        self.local_rank, self.local_world_size = ranks.local_rank, ranks.local_world_size
        self.node = ranks.node
        # This is True only on rank 0, which writes the files of the run.
        self.is_first = ranks.rank == 0
        self.stop = StopCoordinator()

    def sum(self, values: Tensor) -> Tensor:
        """Add tensors element by element over all ranks, and return the sum on every rank.

        All ranks must call this function.
        """
        return values

    def gather(self, value: Any) -> list[Any]:
        """Gather one value from each rank, and return them as a list in rank order on every rank.

        The value consists of plain JSON types. All ranks must call this function.
        """
        return [value]

    def rows(self, own: Tensor) -> Tensor:
        """Gather a tensor of equal shape from each rank, and return them stacked as [ranks, ...].

        All ranks must call this function, and every rank gets the result.
        """
        return own[None]

    def gather_rows(self, own: Tensor) -> Tensor:
        """Gather the samples [B, …] of a batch from all ranks, for a loss over all samples of a
        step. Gradients flow back to the ranks. The result has the order of the global batch: the
        samples of rank r are `[r::world_size]`.

        All ranks must call this function, with tensors of equal shape.
        """
        return own

    def share_state(self, state: Any) -> Any:
        """Send the state of rank 0 to every rank, and return this state.

        A state consists of nested dictionaries and lists of tensors and plain values. All ranks
        must call this function.
        """
        return state

    def broadcast(self, tensor: Tensor) -> None:
        """Overwrite a tensor in place with the tensor of rank 0. All ranks must call this
        function.
        """

    @contextmanager
    def one_of_node_first(self) -> Iterator[None]:
        """Let one rank per node run the `with` block before the other ranks of the node.

        The other ranks then find the files that the first rank has downloaded. All ranks must call
        this function.
        """
        if self.local_rank > 0:
            self.barrier()
        yield
        if self.local_rank == 0:
            self.barrier()

    def barrier(self) -> None:
        """Wait until all ranks have called this function."""

    def close(self) -> None:
        """Leave the process group at the end of the run."""


class TorchProcessGroup(ProcessGroup):
    """Process group of several ranks, which torch.distributed joins."""

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
                # Use a longer timeout than the watchdog. The watchdog then ends the run first, and
                # names the rank that failed.
                timeout=timedelta(seconds=max(config.start_timeout, config.timeout) + 60),
                device_id=device if config.backend == "nccl" else None,
            )
            # Run a first collective now, because NCCL opens its connections only then.
            self.barrier()
        except RuntimeError as error:
            raise ConnectError(
                f"torch.distributed reports {type(error).__name__}: {error}"
            ) from error
        # NCCL can only send tensors that are on the GPU.
        self._at = device if config.backend == "nccl" else torch.device("cpu")
        # Use a second client of the key-value store, because a waiting call blocks all other calls
        # of its client.
        self.stop = StopCoordinator(
            ranks.rank, ranks.world_size, dist.PrefixStore("stopping", store.clone())
        )

    def sum(self, values: Tensor) -> Tensor:
        total = values.clone()
        dist.all_reduce(total)
        return total

    def gather(self, value: Any) -> list[Any]:
        # Send values as JSON. torch's all_gather_object would unpickle received bytes, which may
        # run code that an attacker sends.
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

    def gather_rows(self, own: Tensor) -> Tensor:
        if own.device.type == "meta":
            return own.repeat(self.world_size, *[1] * (own.ndim - 1))
        rows: Tensor = _GatherRows.apply(own, self)
        return rows

    def share_state(self, state: Any) -> Any:
        # Send the bytes of a file of torch.save. torch's broadcast_object_list would unpickle
        # received bytes, which may run code that an attacker sends.
        file = io.BytesIO()
        if self.is_first:
            torch.save(state, file)
        size = self.gather(file.tell())[0]
        file.seek(0)
        # Send the file in pieces, because the memory of a GPU may be too small for the whole file.
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
        # Load tensors to the CPU, where those of rank 0 are too. The caller copies them to the
        # device when necessary.
        return torch.load(file, map_location="cpu", weights_only=True)

    def broadcast(self, tensor: Tensor) -> None:
        dist.broadcast(tensor, src=0)

    def barrier(self) -> None:
        dist.barrier()

    def close(self) -> None:
        self.stop.close()
        dist.destroy_process_group()


class _GatherRows(torch.autograd.Function):
    """Gathers tensors in the order of the global batch. The gradient of a rank is the sum of the
    gradients that all ranks have for its rows.
    """

    @staticmethod
    def forward(context: Any, own: Tensor, group: ProcessGroup) -> Tensor:
        context.group = group
        return group.rows(own.contiguous()).transpose(0, 1).flatten(0, 1)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Any:
        group: ProcessGroup = context.group
        total = group.sum(gradients[0].contiguous())
        return total[group.rank :: group.world_size], None


def share_buffers(model: nn.Module, group: ProcessGroup, averages: bool) -> None:
    """Make the buffers of a model, such as BatchNorm statistics, equal on all ranks for evaluation:
    those of rank 0, or if `averages` the mean over the ranks. All ranks must call this function.
    """
    if group.world_size == 1:
        return
    for buffer in model.buffers():
        if averages and buffer.is_floating_point():
            buffer.copy_(group.sum(buffer).div_(group.world_size))
        else:
            group.broadcast(buffer)


def buffers_by_rank(model: nn.Module, group: ProcessGroup) -> Tensor | None:
    """Gather the float buffers of a model from all ranks as one tensor [ranks, values]; None if it
    has none. A checkpoint stores this tensor, so that each rank can later continue with its own
    buffers. All ranks must call this function.
    """
    buffers = [buffer.flatten() for buffer in model.buffers() if buffer.is_floating_point()]
    return group.rows(torch.cat(buffers).float()) if buffers else None


def restore_buffers(model: nn.Module, by_rank: Tensor | None, group: ProcessGroup) -> None:
    """Restore the buffers of this rank, such as BatchNorm statistics, from those of all ranks in a
    checkpoint. Does nothing if the number of ranks differs from that of the saved run.
    """
    if by_rank is None or len(by_rank) != group.world_size:
        return
    buffers = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    parts = by_rank[group.rank].split([buffer.numel() for buffer in buffers])
    for buffer, values in zip(buffers, parts, strict=True):
        buffer.copy_(values.view_as(buffer))

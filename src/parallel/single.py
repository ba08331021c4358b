"""One process on one device: the strategy that the others extend, and the one that does nothing where they do something."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from src.engine.machine.hardware import cpu_model, visible_cuda_devices
from src.engine.machine.nvidia import Gpu
from src.engine.machine.platform import peak_memory
from src.engine.machine.process import keep_freed_memory
from src.engine.machine.ranks import Ranks
from src.parallel.crowding import give_way
from src.parallel.forward import Autocast, Criterion, ModelAndLoss
from src.parallel.packing import as_bytes
from src.parallel.stopping import Stopping
from src.schema import ResolvedParallel

if TYPE_CHECKING:
    from torch.distributed import Store


class Single:
    """`rank` and `world_size` count processes; `devices` are those this process drives."""

    # True if `wrap` leaves each rank a part of every parameter, as a DTensor that `whole` and `part` translate.
    shards = False

    def __init__(self, config: ResolvedParallel, ranks: Ranks, store: Store | None = None) -> None:
        """`store`: where the ranks meet; None for one process."""
        self.config, self.kind = config, config.strategy
        self.rank, self.world_size = ranks.rank, ranks.world_size
        self.local_rank, self.local_world_size, self.node = ranks.local_rank, ranks.local_world_size, ranks.node
        torch.set_num_threads(config.threads_per_device)
        if config.accelerator == "cpu":
            keep_freed_memory()
            give_way(config.threads_per_device)
        elif config.accelerator == "cuda" and not torch.cuda.is_available():
            raise RuntimeError(
                f"this machine has an NVIDIA driver, but torch {torch.__version__} sees no GPU: the driver is probably older "
                f"than CUDA {torch.version.cuda} needs; update it, install a torch built for it, or set parallel.accelerator=cpu"
            )
        self.devices = self._choose_devices()
        self.device = self.devices[0]
        self.stopping = Stopping()
        self._gpus: list[Gpu] = []  # of `devices`
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            # Batches keep their shape, so each kernel is chosen once; by trying, so not the same one in every run.
            torch.backends.cudnn.benchmark = not torch.are_deterministic_algorithms_enabled()
            uuids = {device.index: device.uuid for device in visible_cuda_devices()}
            self._gpus = [Gpu(uuids.get(device.index)) for device in self.devices]

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def backend(self) -> str | None:
        """The process group's backend; None without a group."""
        return None

    @property
    def kind_of_device(self) -> str:
        """What computes here: two kinds may round differently."""
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else cpu_model()

    def _choose_devices(self) -> list[torch.device]:
        return [torch.device("cuda:0" if self.config.accelerator == "cuda" else self.config.accelerator)]

    def wrap(self, model: nn.Module, criterion: Criterion, autocast: torch.dtype | None) -> nn.Module:
        """Spread `model`: a module that maps (images, targets) to the mean loss of this process's batch, on `device`.

        The optimizer is built from `model`'s parameters as this leaves them.
        """
        return ModelAndLoss(model, criterion, self.device.type, autocast)

    def place(self, module: nn.Module) -> None:
        """Lay out the parameters of `module`, a copy of the model from before `wrap`, as `wrap` lays out the model's."""

    def whole(self, tensor: Tensor) -> Tensor:
        """A tensor of the model, a gradient or optimizer state as one device would hold it. Collective where sharded."""
        return tensor

    def part(self, tensor: Tensor, like: Tensor) -> Tensor:
        """This rank's part of a whole `tensor`, laid out as `like`: the inverse of `whole`."""
        return tensor

    def for_evaluation(self, model: nn.Module, autocast: torch.dtype | None) -> nn.Module:
        """What maps images to outputs on `device` in evaluation, without gradients."""
        return Autocast(model, self.device.type, autocast)

    def seed(self, seeds: Sequence[int]) -> None:
        """Start the random generators anew, with one seed for each of `devices`."""
        torch.default_generator.manual_seed(seeds[0])
        for device, seed in zip(self.devices, seeds, strict=True):
            if device.type == "cuda":
                torch.cuda.default_generators[device.index].manual_seed(seed)
            elif device.type == "mps":
                torch.mps.manual_seed(seed)

    def calls_of_forward(self, wrapped: nn.Module) -> list[tuple[nn.Module, str]]:
        """What `wrapped` does besides computing, to be timed apart: (module, the name of its method)."""
        return []

    def skip_sync(self, wrapped: nn.Module) -> AbstractContextManager[Any]:
        """Inside, a backward pass leaves gradients unreduced: for all but the last batch of an accumulated step."""
        return nullcontext()

    def sum(self, values: Tensor) -> Tensor:
        """The element-wise sum of `values` over the ranks, on all of them."""
        return values

    def gather(self, value: Any) -> list[Any]:
        """Every rank's `value` (what JSON can say), in rank order, on all of them."""
        return [value]

    def share_state(self, state: Any) -> Any:
        """Rank 0's nested dicts and lists of tensors and plain values, on all ranks: files are read by rank 0 alone."""
        return state

    def share_buffers(self, model: nn.Module) -> None:
        """Give every rank rank 0's buffers, so that BatchNorm statistics are the same in evaluation."""

    def buffers_by_rank(self, model: nn.Module) -> Tensor | None:
        """(ranks, numbers): the floating-point buffers of each rank, where an evaluation averages them; else None. Collective."""
        return None

    def restore_own_buffers(self, model: nn.Module, by_rank: Tensor | None) -> None:
        """Give this rank those that it had when `buffers_by_rank` was called, if as many ranks go on."""

    def one_of_node_first(self) -> AbstractContextManager[Any]:
        """Inside, one rank of each node goes first and the others follow: what it downloads, they find."""
        return nullcontext()

    def barrier(self) -> None:
        """Wait for all ranks."""

    def close(self) -> None:
        """Leave the group."""

    def measured_world_size(self) -> int:
        """Proof that the devices asked for take part: the sum of one 1 from each."""
        return int(self.sum(torch.ones((), device=self.device)).item())

    def parameters_hash(self, model: nn.Module) -> tuple[str, bool]:
        """(rank 0's hash of all parameters, True if all ranks have the same)."""
        digest = hashlib.sha256()
        for parameter in model.parameters():
            digest.update(as_bytes(self.whole(parameter.detach()).cpu().contiguous()).numpy().tobytes())
        hashes = self.gather(digest.hexdigest()[:16])
        return hashes[0], len(set(hashes)) == 1

    def sample_utilisation(self) -> None:
        """Look once at how busy and how hot this process's devices are, for `memory` and `gpu_states`."""
        for gpu in self._gpus:
            gpu.sample()

    def gpu_states(self) -> list[dict[str, Any]]:
        """How hot all GPUs of the job got, and what slowed them down; see Gpu."""
        own = [gpu.state() for gpu in self._gpus]
        return [state for states in self.gather(own) for state in states if state]

    def memory(self) -> list[dict[str, Any]]:
        """Peak bytes of every device of the job. A CPU device is a process: its resident memory, libraries included."""
        if self.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated
            own: list[dict[str, Any]] = [
                {"device": str(device), "peak_bytes": peak(device), "utilisation": gpu.utilisation()}
                for device, gpu in zip(self.devices, self._gpus, strict=True)
            ]
        else:
            own = [{"device": f"{self.device.type}:{self.rank}", "peak_bytes": peak_memory()}]
        entries = [(rank, entry) for rank, entries in enumerate(self.gather(own)) for entry in entries]
        names = [entry["device"] for _, entry in entries]  # one name twice: ranks share a GPU, or are on several nodes
        return [
            {**entry, "device": f"{name}_rank_{rank}" if names.count(name) > 1 else name}
            for (rank, entry), name in zip(entries, names, strict=True)
        ]

    @property
    def communication_method(self) -> str:
        """How `communication_seconds` is measured."""
        return "one device: none"

    def window_opens(self, wrapped: nn.Module) -> None:
        """The steps that count in `communication_seconds` begin."""

    def communication_seconds(self, wrapped: nn.Module) -> tuple[float, float] | None:
        """Of this rank per step: (all communication, the part that computing does not hide). None: not known."""
        return 0.0, 0.0

    def communication_bytes(self, model: nn.Module, wrapped: nn.Module, accumulate: int) -> tuple[int, int]:
        """Per step of `accumulate` batches: (what devices exchange, what crosses the busiest link in its busier direction)."""
        return 0, 0

    def chunk_sizes(self, batch_size: int) -> list[int]:
        """How many images of a global batch each device gets."""
        return [batch_size // self.world_size] * self.world_size

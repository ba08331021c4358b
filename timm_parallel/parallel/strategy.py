"""The base class of strategies, which spread a single-device model over devices."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from timm_parallel.keys import ResolvedParallel
from timm_parallel.machine import hardware
from timm_parallel.machine.process import keep_freed_memory
from timm_parallel.machine.ranks import Ranks
from timm_parallel.parallel.communication import Communication
from timm_parallel.parallel.group import BufferSync, ProcessGroup, TorchProcessGroup
from timm_parallel.parallel.openmp import watch_openmp_oversubscription
from timm_parallel.parallel.telemetry import Telemetry

if TYPE_CHECKING:
    from torch.distributed import Store


class HasParameters(Protocol):
    """A model, or the state of a run, whose parameters are those of the whole training step."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...

    def parameters(self) -> Iterator[nn.Parameter]: ...


def own_parameters(step: nn.Module, model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of a training step besides those of its model, by name: those of the
    loss, or of a projector.
    """
    of_model = {id(parameter) for parameter in model.parameters()}
    return {
        name: parameter
        for name, parameter in step.named_parameters()
        if id(parameter) not in of_model
    }


class Strategy:
    """Base class of strategies. Override the methods below `__init__`; their defaults suit a single
    device.

    `group` has the collectives of the ranks, `telemetry` measures the devices, `buffers` keeps
    BatchNorm statistics equal. `devices` are those that this process drives.
    """

    # What the strategy can do. train.py reads these attributes from the source of the class and of
    # its bases, to refuse a config before torch is imported: give each a plain True or False.
    # A process per device, or one process for all devices.
    process_per_device = False
    # Uses one device, whatever the machine has.
    has_one_device = False
    # True if `wrap` leaves each rank a part of every parameter, as a DTensor that `whole` and
    # `part` translate.
    shards = False
    # Works with model.compile.
    compiles = True
    # Copies gradients to buckets to send them, unless parallel.gradient_as_bucket_view is true.
    has_buckets = False
    # Shown next to the name of the strategy on the console.
    note = ""

    def __init__(self, config: ResolvedParallel, ranks: Ranks, store: Store | None = None) -> None:
        """`store`: key-value store through which the ranks find each other;
        None for one process.
        """
        self.config, self.kind = config, config.strategy
        torch.set_num_threads(config.threads_per_device)
        if config.accelerator == "cpu":
            keep_freed_memory()
            watch_openmp_oversubscription(config.threads_per_device)
        elif config.accelerator == "cuda" and not torch.cuda.is_available():
            raise RuntimeError(
                f"parallel.accelerator=cuda: torch {torch.__version__} can use no CUDA device "
                f"({_why_no_cuda()}); fix that, or set parallel.accelerator=cpu"
            )
        self.devices = self.choose_devices(ranks)
        self.device = self.devices[0]
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            # Batches keep their shape, so cuDNN chooses each kernel once. It chooses by timing, so
            # the choice may vary.
            torch.backends.cudnn.benchmark = not torch.are_deterministic_algorithms_enabled()
        self.group = (
            ProcessGroup(ranks)
            if store is None
            else TorchProcessGroup(config, ranks, store, self.device)
        )
        self.is_first = self.group.is_first
        self.telemetry = Telemetry(self.devices, self.group)
        self.buffers = BufferSync(self.group, config.dist_bn)

    def choose_devices(self, ranks: Ranks) -> list[torch.device]:
        """Return the devices that this process drives."""
        return [
            torch.device("cuda:0" if self.config.accelerator == "cuda" else self.config.accelerator)
        ]

    def wrap(self, step: Any) -> nn.Module:
        """Apply the strategy to a training step, which is a module whose `model` maps images to
        outputs.

        Returns a module that maps this process's batch (images, targets), on `device`, to its mean
        loss and a dict of metrics. The optimizer is built afterwards, from the parameters of the
        model and of the rest of the step.
        """
        raise NotImplementedError

    def for_evaluation(self, model: nn.Module) -> nn.Module:
        """Return a module for evaluation, which maps images to outputs on `device` without
        gradients.
        """
        return model

    def skip_sync(self, wrapped: nn.Module) -> AbstractContextManager[Any]:
        """Skip the gradient all-reduce in the `with` block: all but the last batch of an
        accumulated step.
        """
        return nullcontext()

    def after_step(self, step: int) -> None:
        """Change the weights after optimizer step `step`, counted from 1, before model.ema averages
        them.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the strategy for a checkpoint: tensors, as `whole` reads them, and
        plain values.

        All ranks call it, and rank 0's is saved.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned, after `wrap`. Not called if another strategy saved the
        checkpoint.
        """

    def lay_out(self, module: nn.Module) -> None:
        """Shard a copy of the model, made before `wrap`, in the same way as `wrap` sharded the
        model.
        """

    def whole(self, tensor: Tensor) -> Tensor:
        """Return the unsharded form of a parameter, gradient or optimizer state. Collective if
        `shards`.
        """
        return tensor

    def part(self, tensor: Tensor, like: Tensor) -> Tensor:
        """Return this rank's part of an unsharded `tensor`, sharded like the tensor `like`. The
        inverse of `whole`.
        """
        return tensor

    def chunk_sizes(self, batch_size: int) -> list[int]:
        """Return the number of images of a global batch for each device."""
        return [batch_size // self.group.world_size] * self.group.world_size

    def count_replicas(self) -> int:
        """Run the model's forward pass on each device of this process, and return how many replicas
        ran.
        """
        return 1

    def measured_world_size(self) -> int:
        """Return the number of model replicas that train, by an all-reduce of the number on each
        rank. Collective; not to be overridden.
        """
        replicas = torch.tensor(float(self.count_replicas()), device=self.device)
        return int(self.group.sum(replicas).item())

    def communication(self, wrapped: nn.Module) -> Communication:
        """Return the object that measures the communication in a training step of `wrapped`."""
        return Communication()

    def close(self) -> None:
        """Leave the process group."""
        self.group.close()


def _why_no_cuda() -> str:
    """Return why this process can use no CUDA device, from the driver or, if it has no objection,
    from torch.
    """
    if (problem := hardware.cuda().problem) is not None:
        return problem
    try:
        torch.cuda.init()
    # An AssertionError from a build without CUDA.
    except (RuntimeError, AssertionError) as error:
        return " ".join(str(error).split())
    return "none is visible"

"""Base class of strategies, which distribute the training of a single-device model over devices,
the strategy single, and the function that builds the strategy of a run.

Each strategy is one class. To add a strategy, write a class that extends Single (one process) or
Distributed (a process per device), and a YAML file in conf/parallel/ with the line `strategy:
src.parallel.<module>.<Class>`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from timm_parallel.keys import (
    STRATEGIES,
    TRAITS,
    ResolvedConfig,
    ResolvedParallel,
    StrategyTraits,
    TrainConfig,
)
from timm_parallel.machine import hardware
from timm_parallel.machine.imports import import_class
from timm_parallel.machine.process import start_clock
from timm_parallel.machine.ranks import Ranks
from timm_parallel.parallel.cpu_tuning import keep_freed_memory, watch_openmp_oversubscription
from timm_parallel.parallel.group import ProcessGroup, TorchProcessGroup
from timm_parallel.parallel.networks import Networks, PhaseStep

if TYPE_CHECKING:
    from torch.distributed import Store


class Strategy:
    """Base class of strategies. A subclass overrides the methods below `__init__`.

    The default methods suit a single device. `devices`: devices that this process drives. `group`:
    collectives between the ranks.
    """

    # What the strategy can do. A strategy of a project takes the traits of another one, or replaces
    # some by `dataclasses.replace`.
    traits = StrategyTraits()

    def __init__(self, config: ResolvedParallel, ranks: Ranks, store: Store | None = None) -> None:
        """Set up the devices of this process and join the process group.

        `store`: key-value store through which the ranks find each other; None for a single process.
        """
        self.config = config
        torch.set_num_threads(config.threads_per_device)
        if config.accelerator == "cpu":
            keep_freed_memory()
            watch_openmp_oversubscription(config.threads_per_device)
        elif config.accelerator == "cuda" and not torch.cuda.is_available():
            raise RuntimeError(
                f"parallel.accelerator=cuda: torch {torch.__version__} can use no CUDA device "
                f"({_why_no_cuda()}); fix the cause, or set parallel.accelerator=cpu"
            )
        self.devices = self.choose_devices(ranks)
        self.device = self.devices[0]
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            # Let cuDNN choose the fastest algorithms, because all batches have the same shape. It
            # chooses them by timing, so the choice may vary between runs.
            torch.backends.cudnn.benchmark = not torch.are_deterministic_algorithms_enabled()
        self.group = (
            ProcessGroup(ranks)
            if store is None
            else TorchProcessGroup(config, ranks, store, self.device)
        )

    def choose_devices(self, ranks: Ranks) -> list[torch.device]:
        """Return the devices that this process drives."""
        return [
            torch.device("cuda:0" if self.config.accelerator == "cuda" else self.config.accelerator)
        ]

    def shard(self, networks: Networks, dtype: torch.dtype | None) -> None:
        """Shard the parameters of the networks and of their averages, before a step uses them. By
        default, nothing is sharded.

        `dtype`: type in which autocast computes; None: float32.
        """

    def wrap(self, step: PhaseStep) -> nn.Module:
        """Apply the strategy to the training step of one phase, while only the parameters that this
        phase trains require gradients.

        Returns a module that maps the batch of this process to the losses [B] of its samples, or
        their mean, and a dictionary of numbers for the log. Optimizers are built afterwards.
        """
        raise NotImplementedError

    def for_evaluation(self, networks: Networks) -> Networks:
        """Return the networks with which the samples of this process are evaluated."""
        return networks

    def start_update(self) -> None:
        """Hook for strategies that prepare the parameters before an optimizer changes them."""

    def skip_sync(self, wrapped: nn.Module) -> AbstractContextManager[Any]:
        """Skip the all-reduce of gradients in the `with` block.

        With gradient accumulation, all batches of a step except the last one run in such a block.
        """
        return nullcontext()

    def after_step(self, step: int) -> None:
        """Hook for strategies that change the weights after an optimizer step, before model.ema
        averages them. By default, the hook does nothing.

        `step`: number of the step, counted from 1.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the strategy for a checkpoint, as whole tensors and plain values.

        All ranks must call this function. The state of rank 0 is saved.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state of the strategy from a checkpoint, after the model was wrapped.

        It is not called if another strategy has saved the checkpoint.
        """

    def _count_replicas(self) -> int:
        """Return the number of model replicas with which this process trains. A strategy with
        several replicas per process runs a forward pass to count them.
        """
        return 1

    def measured_world_size(self) -> int:
        """Count the model replicas that train, by an all-reduce of the number on each rank.

        All ranks must call this function. Subclasses must not override it.
        """
        replicas = torch.tensor(float(self._count_replicas()), device=self.device)
        return int(self.group.sum(replicas).item())

    def communication(self, wrapped: nn.Module) -> Communication:
        """Build the object that measures the communication in a training step."""
        return Communication(is_zero=True)


class Communication:
    """Communication in a training step that is not measured. It is zero on one device. Under dp and
    fsdp it is unknown, because their transfers are not separated from other GPU kernels.
    """

    def __init__(self, is_zero: bool) -> None:
        self.is_zero = is_zero

    def start_measuring(self) -> None:
        """Start a new time window, over which the seconds of communication are averaged."""

    def seconds(self) -> tuple[float, float] | None:
        """Return two times of this rank in seconds per step, or None if they are unknown.

        The first is the time of all communication. The second is the part of it that does not
        overlap with computing.
        """
        return (0.0, 0.0) if self.is_zero else None

    def bytes(self, trained: Iterable[nn.Parameter]) -> int | None:
        """Return the bytes of all gradients that the ranks reduce in one training step; None:
        unknown. `trained`: the parameters that the step trains.
        """
        return 0 if self.is_zero else None


class Single(Strategy):
    """Strategy single, which runs the training step unchanged on one device."""

    traits = TRAITS["single"]

    def wrap(self, step: PhaseStep) -> nn.Module:
        return step


def build_strategy(
    config: ResolvedConfig, ranks: Ranks | None = None, store: Store | None = None
) -> Strategy:
    """Build the strategy of a resolved config, set up its devices and join the process group. Then
    replace `auto` in train.precision of the config, because only the ranks know the devices.

    All ranks must call this function. `ranks`: identity of this rank; None: the only process.
    `store`: key-value store through which the ranks find each other; None for a single process.
    """
    start_clock.end("imports")
    # This must take effect before a device is used.
    if config.train.deterministic:
        use_deterministic_algorithms()
    name = config.parallel.strategy
    strategy_class = import_class("parallel.strategy", name, Strategy, STRATEGIES)
    strategy = strategy_class(config.parallel, ranks or Ranks(), store)
    choose_precision(strategy, config.train)
    start_clock.end("devices")
    return strategy


def choose_precision(strategy: Strategy, train: TrainConfig) -> None:
    """Replace `auto` in train.precision: bf16 if every device of the run is a GPU that computes it
    in hardware, else fp32. All ranks must call this function.
    """
    if train.precision == "auto":
        own = all(_computes_bf16(device) for device in strategy.devices)
        train.precision = "bf16" if all(strategy.group.gather(own)) else "fp32"


def whole(tensor: Tensor) -> Tensor:
    """Return the whole tensor of a parameter, gradient or optimizer state, which may be sharded.

    All ranks must call this function if the strategy shards parameters.
    """
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def part(tensor: Tensor, like: Tensor) -> Tensor:
    """Return this rank's part of a whole tensor, sharded like the tensor `like`. It is the inverse
    of `whole`.
    """
    if not isinstance(like, DTensor) or isinstance(tensor, DTensor):
        return tensor
    # Every rank already has the whole tensor, so no rank needs to send it.
    return distribute_tensor(
        tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None
    )


def use_deterministic_algorithms() -> None:
    """Make torch raise RuntimeError for nondeterministic operations.

    This function must be called before a GPU is used for the first time.
    """
    # cuBLAS reads CUBLAS_WORKSPACE_CONFIG only once. Without this environment variable, torch would
    # raise RuntimeError for each matrix product.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # Disable cuDNN's benchmark mode, which chooses algorithms by timing and so may choose
    # differently in each run.
    torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(True)


def chunk_sizes(batch_size: int, devices: int) -> list[int]:
    """Return how many images of a global batch each device gets, as a list. The last chunk of dp,
    which splits a batch in this way, may be smaller.
    """
    return [len(chunk) for chunk in torch.arange(batch_size).chunk(devices)]


def device_model(device: torch.device) -> str:
    """Return the product name of a device, such as `NVIDIA H100`. Devices of two different products
    may round differently.
    """
    is_cuda = device.type == "cuda"
    return torch.cuda.get_device_name(device) if is_cuda else hardware.cpu_model()


def _computes_bf16(device: torch.device) -> bool:
    """Return True if a device is a GPU with hardware for bf16, which NVIDIA has had since compute
    capability 8.0 (Ampere, 2020). Older GPUs emulate it, which is slower than fp32.
    """
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def _why_no_cuda() -> str:
    """Return the reason why this process can use no CUDA device.

    The reason comes from the driver, or from torch if the driver works.
    """
    if (problem := hardware.cuda().problem) is not None:
        return problem
    try:
        torch.cuda.init()
    # A build of torch without CUDA raises AssertionError.
    except (RuntimeError, AssertionError) as error:
        return " ".join(str(error).split())
    return "none is visible"

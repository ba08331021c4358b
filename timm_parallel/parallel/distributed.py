"""Strategy ddp: DistributedDataParallel, with one process per device.

All-reduces average the gradients over the ranks during the backward pass.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from timm_parallel.keys import TRAITS, strategy_options
from timm_parallel.machine.ranks import Ranks
from timm_parallel.parallel.networks import PhaseStep
from timm_parallel.parallel.strategy import Communication, Strategy

# torch's reducer times each of the first 10 steps. Later it times only every n-th step.
ALWAYS_SAMPLED = 10


class Distributed(Strategy):
    """Strategy ddp, in which each rank drives one device."""

    traits = TRAITS["ddp"]

    def choose_devices(self, ranks: Ranks) -> list[torch.device]:
        if self.config.accelerator != "cuda":
            return [torch.device("cpu")]
        index = (
            self.config.device_ids[ranks.local_rank] if self.config.device_ids else ranks.local_rank
        )
        # Wrap around at the number of GPUs, because ranks that communicate with gloo may share a
        # GPU.
        return [torch.device("cuda", index % torch.cuda.device_count())]

    def wrap(self, step: PhaseStep) -> nn.Module:
        # Leave out dist_bn, which is not an argument of DistributedDataParallel.
        keys = [
            key for key, owner in strategy_options().items() if owner == "ddp" and key != "dist_bn"
        ]
        options = {
            key: getattr(self.config, key) for key in keys if getattr(self.config, key) is not None
        }
        # With dist_bn=reduce, each rank must keep its own BatchNorm statistics until they are
        # averaged. A broadcast would overwrite them.
        if self.config.dist_bn == "reduce" or has_only_batch_norm_buffers(step):
            options.setdefault("broadcast_buffers", False)
        # Use the new name of the option broadcast_buffers, which torch 2.13 renamed.
        renamed = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
        if renamed and "broadcast_buffers" in options:
            options["forward_sync_buffers"] = options.pop("broadcast_buffers")
        if self.device.type == "cuda":
            options |= {"device_ids": [self.device], "output_device": self.config.output_device}
        return TimedDistributedDataParallel(step, **options)

    def skip_sync(self, wrapped: nn.Module) -> AbstractContextManager[Any]:
        assert isinstance(wrapped, DistributedDataParallel)
        return wrapped.no_sync()

    def communication(self, wrapped: nn.Module) -> Communication:
        # The communication is unknown if a subclass wraps the step in another class than DDP.
        if self.group.world_size == 1 or not isinstance(wrapped, TimedDistributedDataParallel):
            return Communication(is_zero=self.group.world_size == 1)
        return DdpCommunication(wrapped)


class TimedDistributedDataParallel(DistributedDataParallel):
    """DistributedDataParallel that measures the time of its communication."""

    # Seconds that the broadcasts of buffers took before forward passes. torch's reducer counts them
    # as computing.
    buffer_seconds = 0.0

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module, **options)
        # Time only every tenth step on a GPU, because timing a step waits for the previous step.
        self.steps_per_sample = 1 if self.device_type == "cpu" else 10
        self._set_ddp_runtime_logging_sample_rate(self.steps_per_sample)  # type: ignore[operator]

    def _sync_buffers(self) -> None:
        start = time.perf_counter()
        super()._sync_buffers()  # type: ignore[no-untyped-call]
        # On a GPU, do not add the time of the broadcast, which is only queued at this point.
        if self.device_type == "cpu":
            self.buffer_seconds += time.perf_counter() - start


class DdpCommunication(Communication):
    """Measures the seconds of the all-reduce of gradients and of the broadcast of buffers under
    ddp.
    """

    # torch's reducer records when the communication of gradients starts and ends. A communication
    # hook that sleeps, instead of returning a future, blocks the backward pass. Its time therefore
    # counts as computing here.

    def __init__(self, wrapped: TimedDistributedDataParallel) -> None:
        super().__init__(is_zero=False)
        self._wrapped = wrapped
        self.start_measuring()

    def start_measuring(self) -> None:
        self._sums_at_start = self._sums()

    def seconds(self) -> tuple[float, float] | None:
        steps, samples, span, hidden, buffers = (self._sums() - self._sums_at_start).tolist()
        if not samples:
            return None
        return span / samples + buffers / steps, max(0.0, span - hidden) / samples + buffers / steps

    def _sums(self) -> torch.Tensor:
        """Return five sums since the start of the run. The caller subtracts older sums to get those
        of a time window.

        They are: steps, timed steps, seconds of all-reduces in timed steps, the part of these
        seconds that overlaps with computing, and seconds of buffer broadcasts.
        """
        # All-reduce time lasts from the start of the first bucket of gradients to the end of the
        # last one. It overlaps with computing until the last gradient is computed. The reducer of
        # torch gives only means over all timed steps since the start of the run, so they are
        # converted to sums. A step is included once the next step starts.
        ddp = self._wrapped
        stats: dict[str, Any] = ddp._get_ddp_logging_data()  # type: ignore[operator]
        # The number of the last step that was timed.
        steps = int(stats.get("iteration", 0))
        later = range(ALWAYS_SAMPLED + 1, steps + 1)
        samples = min(steps, ALWAYS_SAMPLED) + sum(
            step % ddp.steps_per_sample == 0 for step in later
        )
        span, hidden = (
            stats.get(f"avg_backward_{name}_time", 0) / 1e9
            for name in ("comm", "compute_comm_overlap")
        )
        return torch.tensor(
            [steps, samples, samples * span, samples * hidden, ddp.buffer_seconds],
            dtype=torch.float64,
        )

    def bytes(self, trained: Iterable[nn.Parameter]) -> int | None:
        # Count the gradients once per optimizer step, because only the last batch of an accumulated
        # step is reduced. Gradients of the other batches add up locally.
        return sum(parameter.nbytes for parameter in trained)


def has_only_batch_norm_buffers(model: nn.Module) -> bool:
    """Return True if all buffers of a model belong to BatchNorm layers.

    Training does not read such buffers, so they need not be broadcast in every step.
    """
    # Ignore buffers that are not in the state dict, such as class weights, because they are
    # constant.
    saved = model.state_dict().keys()
    owners = {name.rpartition(".")[0] for name, _ in model.named_buffers() if name in saved}
    return all(
        isinstance(model.get_submodule(owner), nn.modules.batchnorm._BatchNorm) for owner in owners
    )

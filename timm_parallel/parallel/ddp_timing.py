"""DistributedDataParallel that times its communication and names the parameters that got no
gradient.
"""

# torch's reducer records when communication starts and ends. A communication hook that sleeps
# instead of returning a future blocks the backward pass, so its time counts as computing here.

from __future__ import annotations

import re
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    bf16_compress_hook,
    fp16_compress_hook,
)
from torch.nn.parallel import DistributedDataParallel

from timm_parallel.parallel.communication import Communication

HOOKS = {"bf16": bf16_compress_hook, "fp16": fp16_compress_hook}
BYTES_PER_VALUE = 2  # sent by both hooks
ALWAYS_SAMPLED = 10  # first steps that the reducer samples; later it samples every so many


class TimedDistributedDataParallel(DistributedDataParallel):
    """DistributedDataParallel that times its communication. Call `start_reporting` before the first
    step.
    """

    is_compressed = False
    # Seconds of buffer broadcasts before a forward pass, which the reducer counts as computing.
    buffer_seconds = 0.0

    def start_reporting(self, comm_hook: str | None) -> None:
        # On a GPU a sample waits for the previous step, so only every tenth step is sampled.
        self.steps_per_sample = 1 if self.device_type == "cpu" else 10
        self._set_ddp_runtime_logging_sample_rate(self.steps_per_sample)  # type: ignore[operator]
        if comm_hook is not None:
            self.is_compressed = True
            self.register_comm_hook(dist.group.WORLD, HOOKS[comm_hook])

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the forward pass. Add parameter names to the reducer's error about missing gradients
        in the last step.
        """
        try:
            return super().forward(*inputs, **kwargs)
        except RuntimeError as error:
            names = unused_parameters(str(error), self.module)
            if not names:
                raise
            shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
            raise RuntimeError(
                f"no gradient reached {shown}: the loss does not depend on them. Set "
                "parallel.find_unused_parameters=true, or freeze or remove them"
            ) from error

    def _sync_buffers(self) -> None:
        start = time.perf_counter()
        super()._sync_buffers()  # type: ignore[no-untyped-call]
        # On a GPU the broadcast is only queued by now.
        if self.device_type == "cpu":
            self.buffer_seconds += time.perf_counter() - start


class DdpCommunication(Communication):
    """Measures the seconds of the all-reduce of gradients and of the broadcast of buffers."""

    def __init__(self, wrapped: nn.Module) -> None:
        self._wrapped = wrapped
        steps = (
            "every step" if getattr(wrapped, "device_type", "cpu") == "cpu" else "every tenth step"
        )
        self.method = (
            f"torch's reducer, {steps}: from the first bucket's start to the last one's end"
        )
        self.start_measuring()

    def start_measuring(self) -> None:
        self._sums_at_start = self._sums()

    def seconds(self) -> tuple[float, float] | None:
        steps, samples, span, hidden, buffers = (self._sums() - self._sums_at_start).tolist()
        if not samples:
            return None
        return span / samples + buffers / steps, max(0.0, span - hidden) / samples + buffers / steps

    def _sums(self) -> torch.Tensor:
        """Return sums since the run's start: steps, timed steps, their all-reduce seconds, the
        hidden ones, seconds of buffers.
        """
        # All: from the first bucket's start to the last one's end. Hidden: until the last gradient
        # was computed. The reducer gives means over all samples, with the warm-up. Sums can be
        # subtracted. A step is in them once the next one starts.
        ddp = self._wrapped
        if not isinstance(ddp, TimedDistributedDataParallel):
            return torch.zeros(5, dtype=torch.float64)
        stats: dict[str, Any] = ddp._get_ddp_logging_data()  # type: ignore[operator]
        steps = int(stats.get("iteration", 0))  # the last that was sampled
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

    def bytes(self, step: nn.Module) -> int | None:
        # Of the last micro-batch only: gradients of the others add up locally.
        trained = [parameter for parameter in step.parameters() if parameter.requires_grad]
        if getattr(self._wrapped, "is_compressed", False):
            return BYTES_PER_VALUE * sum(parameter.numel() for parameter in trained)
        return sum(parameter.nbytes for parameter in trained)


def unused_parameters(message: str, module: nn.Module) -> list[str]:
    """Extract the parameter names from torch's message about missing gradients; [] for any other
    message.
    """
    match = re.search(r"indices which did not receive grad for rank \d+: ([\d ]+)", message)
    if match is None:
        return []
    trained = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
    return [trained[int(number)].removeprefix("model.model.") for number in match.group(1).split()]


def has_only_batch_norm_buffers(model: nn.Module) -> bool:
    """Return True if all buffers of `model` belong to BatchNorm. Training does not read them, so no
    step needs to send them.
    """
    # Buffers that a state dict leaves out, such as class weights, are constants.
    saved = model.state_dict().keys()
    owners = {name.rpartition(".")[0] for name, _ in model.named_buffers() if name in saved}
    return all(
        isinstance(model.get_submodule(owner), nn.modules.batchnorm._BatchNorm) for owner in owners
    )

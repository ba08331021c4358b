"""torch's DistributedDataParallel, which also says what its communication takes, and which parameters got no gradient.

Its reducer notes when it begins and ends, in some steps of every run. A communication hook that sleeps instead of
returning a future holds up the backward pass, and is computing here.
"""

# No `from __future__ import annotations` here: DDP compares a hook's annotations with the classes themselves.

import re
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

HOOKS = {"bf16": bf16_compress_hook, "fp16": fp16_compress_hook}
BYTES_PER_VALUE = 2  # of what both send
ALWAYS_SAMPLED = 10  # the reducer samples its first ten steps, then every so many


class Compressed:
    """A communication hook: gradients go out in 16 bits, and what is handed to the backend is counted."""

    def __init__(self, hook: str) -> None:
        self.hook = HOOKS[hook]
        self.bytes = self.steps = 0

    def send(self, group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        self.bytes += bucket.buffer().numel() * BYTES_PER_VALUE
        self.steps += bucket.is_last()
        return self.hook(group, bucket)


class ReportingParallel(DistributedDataParallel):
    """Reports from `report` on, which is called before the first step."""

    compressed: Compressed | None = None
    buffer_seconds = 0.0  # of broadcasts before a forward pass, which the reducer takes for computing

    def report(self, comm_hook: str | None) -> None:
        self.steps_per_sample = 1 if self.device_type == "cpu" else 10  # on a GPU a sample waits for the step before
        self._set_ddp_runtime_logging_sample_rate(self.steps_per_sample)  # type: ignore[operator]
        if comm_hook is not None:
            self.compressed = Compressed(comm_hook)
            self.register_comm_hook(dist.group.WORLD, self.compressed.send)
        self.window_opens()

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The reducer waits for a gradient of every parameter, and finds out here, a step later, that none came."""
        try:
            return super().forward(*inputs, **kwargs)
        except RuntimeError as error:
            names = unused_parameters(str(error), self.module)
            if not names:
                raise
            shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
            raise RuntimeError(
                f"no gradient reached {shown}: the loss does not depend on them. Set parallel.find_unused_parameters=true, "
                "or freeze or remove them"
            ) from error

    def _sync_buffers(self) -> None:
        began = time.perf_counter()
        super()._sync_buffers()  # type: ignore[no-untyped-call]
        if self.device_type == "cpu":  # a GPU has only been asked for it
            self.buffer_seconds += time.perf_counter() - began

    def window_opens(self) -> None:
        """The steps that count in `seconds_per_step` begin."""
        self.sums_at_opening = self._sums()

    def seconds_per_step(self) -> tuple[float, float] | None:
        """(all communication, the part that computing does not hide); None: no sample."""
        steps, samples, span, hidden, buffers = (self._sums() - self.sums_at_opening).tolist()
        if not samples:
            return None
        return span / samples + buffers / steps, max(0.0, span - hidden) / samples + buffers / steps

    def _sums(self) -> torch.Tensor:
        """Since the run's start: (steps, samples, of these the seconds from the first bucket's start to the last one's end,
        those until the backward pass had computed its last gradient, seconds of buffers in all steps).

        The reducer gives means, which hold the warm-up for ever; sums can be subtracted. The last step is in them once
        the next one begins.
        """
        stats: dict[str, Any] = self._get_ddp_logging_data()  # type: ignore[operator]
        steps = int(stats.get("iteration", 0))  # the last that was sampled
        later = range(ALWAYS_SAMPLED + 1, steps + 1)
        samples = min(steps, ALWAYS_SAMPLED) + sum(step % self.steps_per_sample == 0 for step in later)
        span, hidden = (stats.get(f"avg_backward_{name}_time", 0) / 1e9 for name in ("comm", "compute_comm_overlap"))
        return torch.tensor(
            [steps, samples, samples * span, samples * hidden, self.buffer_seconds], dtype=torch.float64
        )


def unused_parameters(message: str, module: nn.Module) -> list[str]:
    """Names of the parameters whose numbers stand in torch's message; empty for any other message."""
    found = re.search(r"indices which did not receive grad for rank \d+: ([\d ]+)", message)
    if found is None:
        return []
    learned = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
    return [learned[int(number)].removeprefix("model.model.") for number in found.group(1).split()]

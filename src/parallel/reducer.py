"""What ddp's communication takes: torch's own reducer notes when it begins and ends, in some steps of every run.

A communication hook that sleeps instead of returning a future holds up the backward pass, and is computing here.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from src.parallel.unused import NamingParallel

ALWAYS_SAMPLED = 10  # the reducer samples its first ten steps, then every so many


class TimedParallel(NamingParallel):
    """Also times the broadcast of buffers before a forward pass, which the reducer takes for computing."""

    buffer_seconds = 0.0  # of this process; on a GPU only what it takes to ask for it

    def sample_every(self, steps: int) -> None:
        self.steps_per_sample = steps
        self._set_ddp_runtime_logging_sample_rate(steps)  # type: ignore[operator]

    def _sync_buffers(self) -> None:
        began = time.perf_counter()
        super()._sync_buffers()  # type: ignore[no-untyped-call]
        self.buffer_seconds += time.perf_counter() - began


@dataclass(frozen=True)
class Communicated:
    """Sums since the run's start. The last step is in them once the next one begins."""

    steps: int = 0
    samples: int = 0
    span: float = 0.0  # seconds of the sampled steps from the first bucket's start to the last one's end
    hidden: float = 0.0  # of these, until the backward pass had computed its last gradient
    buffers: float = 0.0  # seconds of all steps


def communicated(wrapped: TimedParallel) -> Communicated:
    """The reducer's means, times their number: means of all samples hold the warm-up for ever, sums can be subtracted."""
    stats: dict[str, Any] = wrapped._get_ddp_logging_data()  # type: ignore[operator]
    steps = int(stats.get("iteration", 0))  # the last that was sampled
    samples = min(steps, ALWAYS_SAMPLED) + sum(
        step % wrapped.steps_per_sample == 0 for step in range(ALWAYS_SAMPLED + 1, steps + 1)
    )
    span, hidden = (
        samples * stats.get(f"avg_backward_{name}_time", 0) / 1e9 for name in ("comm", "compute_comm_overlap")
    )
    return Communicated(steps, samples, span, hidden, wrapped.buffer_seconds)


def per_step(since: Communicated, now: Communicated, on_cpu: bool) -> tuple[float, float] | None:
    """(all communication, the part that computing does not hide) in seconds per step between two readings; None: no sample."""
    samples = now.samples - since.samples
    if samples <= 0:
        return None
    buffers = (now.buffers - since.buffers) / max(1, now.steps - since.steps) if on_cpu else 0.0
    span, hidden = (now.span - since.span) / samples, (now.hidden - since.hidden) / samples
    return span + buffers, max(0.0, span - hidden) + buffers

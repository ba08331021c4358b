"""Markers and helpers of tests that train on a CUDA device. The body of such a test also runs on a
CPU where that is possible, because CI has no GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

ON_CUDA = (
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
)
# Parameter sets of a test that runs on a CPU, and on a GPU where there is one.
EACH_ACCELERATOR = ("cpu", pytest.param("cuda", marks=ON_CUDA))
# Parameter set of a test that asserts something that only a GPU has. Only mypy checks it in CI.
ONLY_CUDA = (pytest.param("cuda", marks=ON_CUDA),)


def on_gpus(count: int) -> tuple[pytest.MarkDecorator, ...]:
    """Return the marks of a test that needs several GPUs."""
    has_too_few = torch.cuda.device_count() < count
    return pytest.mark.gpu, pytest.mark.skipif(has_too_few, reason=f"fewer than {count} GPUs")


@contextmanager
def error_on_waits(accelerator: str) -> Iterator[None]:
    """Let torch raise an error when the CPU waits for the GPU. With the accelerator cpu, nothing
    changes.
    """
    if accelerator == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if accelerator == "cuda":
            torch.cuda.set_sync_debug_mode("default")

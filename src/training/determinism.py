"""The same bits again, on a GPU too: `train.deterministic=true`."""

from __future__ import annotations

import os

import torch


def use_deterministic_algorithms() -> None:
    """For the rest of this process, and before it asks anything of a GPU.

    From then on an operation that has no deterministic algorithm raises a RuntimeError with its name.
    """
    # cuBLAS reads it once; without it torch refuses to multiply matrices.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.backends.cudnn.benchmark = False  # it may choose another algorithm each time
    torch.use_deterministic_algorithms(True)

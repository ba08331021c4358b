"""Reproducible runs: deterministic algorithms, and random draws that depend only on seed, step and
rank.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from timm_parallel.data.seeds import seed_for


def use_deterministic_algorithms() -> None:
    """Make torch raise RuntimeError for nondeterministic operations. Call this before the first use
    of a GPU.
    """
    # cuBLAS reads the variable once. Without it, torch raises RuntimeError for each matrix product.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # cuDNN's benchmark mode chooses algorithms by timing them, so its choice may vary.
    torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(True)


def seed_step(seed: int, step: int, rank: int, devices: Sequence[torch.device]) -> None:
    """Seed the random generators of all devices before a step, from (seed, step, rank, index of the
    device).
    """
    # So a resumed run draws the same numbers for dropout and drop path, without random states in
    # its checkpoints. dp's replicas on a CPU run in threads that share one generator.
    seeds = [seed_for(seed, step, rank, index) for index in range(len(devices))]
    torch.default_generator.manual_seed(seeds[0])
    for device, device_seed in zip(devices, seeds, strict=True):
        if device.type == "cuda":
            torch.cuda.default_generators[device.index].manual_seed(device_seed)
        elif device.type == "mps":
            torch.mps.manual_seed(device_seed)

"""Reproducible runs: deterministic algorithms, and random draws that depend on the step alone."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from src.engine.data.seeds import seed_for


def use_deterministic_algorithms() -> None:
    """Make torch raise RuntimeError for nondeterministic operations. Call this before the first use of a GPU."""
    # cuBLAS reads it once; without it torch refuses to multiply matrices.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # The benchmark chooses algorithms by timing them, so its choice may vary.
    torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(True)


def seed_step(seed: int, step: int, rank: int, devices: Sequence[torch.device]) -> None:
    """Make a step's random draws (dropout, drop path) a function of (seed, step, rank, device of the rank)."""
    # A run resumed at any step then draws the same numbers, without random states in its checkpoints. CPU replicas in threads
    # share one generator.
    seeds = [seed_for(seed, step, rank, index) for index in range(len(devices))]
    torch.default_generator.manual_seed(seeds[0])
    for device, device_seed in zip(devices, seeds, strict=True):
        if device.type == "cuda":
            torch.cuda.default_generators[device.index].manual_seed(device_seed)
        elif device.type == "mps":
            torch.mps.manual_seed(device_seed)

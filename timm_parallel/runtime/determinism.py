"""Random draws of a step that depend only on seed, step and rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from timm_parallel.data.seeds import seed_for


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

"""Seed random numbers, so that those of a training step depend only on seed, step and rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from timm_parallel.machine.seeds import seed_for


def seed_step(seed: int, step: int, rank: int, devices: Sequence[torch.device]) -> None:
    """Seed the random generators of all devices of this process before a training step.

    The seeds depend on the run's seed, the step, the rank and the index of the device.
    """
    # A resumed run then draws the same numbers for dropout and drop path, although its checkpoints
    # store no random states. The replicas of dp on a CPU run in threads that share one generator.
    seeds = [seed_for(seed, step, rank, index) for index in range(len(devices))]
    torch.default_generator.manual_seed(seeds[0])
    for device, device_seed in zip(devices, seeds, strict=True):
        if device.type == "cuda":
            torch.cuda.default_generators[device.index].manual_seed(device_seed)
        elif device.type == "mps":
            torch.mps.manual_seed(device_seed)

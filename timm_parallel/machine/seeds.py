"""Compute the seeds of random numbers from integers such as seed, epoch and index of an image.

A seed does not depend on random numbers that were drawn earlier. This module imports torch only to
seed generators.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# Bit mask that keeps the lowest 64 bits of an integer.
MASK = 0xFFFFFFFFFFFFFFFF


def seed_for(*values: int) -> int:
    """Mix integers into one seed from 0 to 2^63 - 1. Adjacent integers give unrelated seeds."""
    return int(_mix(*values))


def seeds_for(seed: int, epoch: int, indices: NDArray[np.int64], *more: int) -> list[int]:
    """Compute one seed per image index in `indices` [N], from the run's seed and the epoch.

    The result equals seed_for(seed, epoch, index, *more) for each index, but is faster. `more`:
    further integers, which give an image other seeds for another purpose.
    """
    return list(_mix(seed, epoch, indices.astype("uint64"), *more).tolist())


def _mix(*values: Any) -> Any:
    # Apply the finalizer of splitmix64 (Steele, Lea, Flood 2014) once per value.
    mixed: Any = 0
    for value in values:
        mixed = ((mixed ^ value) + 0x9E3779B97F4A7C15) & MASK
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & MASK
        mixed ^= mixed >> 31
    return mixed >> 1


def seed_all(seed: int) -> None:
    """Seed the global generators of torch, random and numpy, from which the constructors of
    datasets and models draw.
    """
    import numpy as np
    import torch

    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)

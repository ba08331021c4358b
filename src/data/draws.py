"""Random draws as functions of what they are for, so that they depend on no rank, worker, or earlier draw."""

from __future__ import annotations

MASK = 0xFFFFFFFFFFFFFFFF


def seed_for(*values: int) -> int:
    """One seed in 0 .. 2^63 - 1 from several integers; neighbouring ones give unrelated seeds.

    splitmix64's finaliser (Steele, Lea, Flood 2014), applied once per value.
    """
    mixed = 0
    for value in values:
        mixed = ((mixed ^ value) + 0x9E3779B97F4A7C15) & MASK
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & MASK
        mixed ^= mixed >> 31
    return mixed >> 1

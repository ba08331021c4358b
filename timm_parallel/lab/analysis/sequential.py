"""Group-sequential test of paired differences: after each pair of runs, a verdict may stop.

The error rate LEVEL is spent in proportion to the number of pairs (alpha spending: Lan and DeMets,
1983; Kim and DeMets, 1987). The boundaries are those of Student's t statistic itself, because a
normal limit does not hold for four pairs (Jennison and Turnbull, 1991); a simulation with fixed
random numbers computes them for any limit. The interval at a stop is the repeated confidence
interval, mean ± boundary × standard error (Jennison and Turnbull, 1989): all intervals of a verdict
together contain the true difference with a probability of 1 - LEVEL.

A verdict also stops if it is unlikely to decide within the limit. The boundaries do not rely on
this rule, so more pairs may be added afterwards.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np
from scipy.special import ndtr, ndtri, stdtr, stdtrit

from timm_parallel.lab.analysis.statistics import Array, Estimate

# Chance that a verdict says better or worse although nothing differs.
LEVEL = 0.02
# Number of pairs after which a verdict may decide. With three pairs, heavy tails and few images
# would decide too early.
FIRST = 4
# A verdict stops if its chance to decide within the limit is smaller.
LEAST_CHANCE = 0.1
# Simulated series of pairs. Their LEVEL has a standard error of 0.03 points.
SERIES = 200_000


@cache
def levels(limit: int) -> dict[int, float]:
    """Compute the error rate of the two-sided t test after each number of pairs from FIRST to
    `limit`, so that all tests together are wrong with a chance of LEVEL.
    """
    draw = np.random.default_rng(53)
    sums, squares = np.zeros(SERIES), np.zeros(SERIES)
    table: dict[int, float] = {}
    for pairs in range(1, limit + 1):
        values = draw.standard_normal(len(sums))
        sums, squares = sums + values, squares + values**2
        if pairs < FIRST:
            continue
        variances = (squares - sums**2 / pairs) / (pairs - 1)
        t = np.abs(sums) / np.sqrt(variances * pairs)
        spent = SERIES - len(sums)
        # Number of series that may stop here, which is the rank of the boundary.
        rank = len(t) - round(SERIES * LEVEL * pairs / limit) + spent
        boundary = np.partition(t, rank)[rank]
        table[pairs] = 2 * float(stdtr(pairs - 1, -boundary))
        sums, squares = sums[t < boundary], squares[t < boundary]
    return table


def chance_to_decide(e: Estimate, limit: int, last: int, margin: float | None) -> float:
    """Return the chance that `last` pairs show a difference, or equality, if the estimate of the
    pairs so far is true.

    `limit`: limit for which the boundaries hold, at least `last`. `margin`: largest difference
    between equal versions, in the unit of the estimate; None if equality is not tested.
    """
    level, unit = levels(limit)[last], e.in_units
    chance = float(conditional_power(np.array(e.p), np.array(e.n), last, level))
    if margin is None or not unit.error:
        return chance
    reach = float(stdtrit(last - 1, 1 - level / 2)) * unit.error * math.sqrt(e.n / last)
    room = margin - abs(unit.difference or 0.0) - reach
    return max(chance, float(ndtr(room / (unit.error * math.sqrt(1 - e.n / last)))))


def conditional_power(p: Array, pairs: Array, last: int, level: float) -> Array:
    """Return the chance that the two-sided p-value is at most `level` after `last` pairs if the
    estimate of `pairs` pairs, with the p-value `p`, is true (Lan and Wittes, 1988). Arrays have one
    element per series.
    """
    reached = -ndtri(p / 2) * np.sqrt(last / pairs)
    power: Array = ndtr((reached + ndtri(level / 2)) / np.sqrt(1 - pairs / last))
    return power

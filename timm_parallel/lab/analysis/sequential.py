"""Group-sequential test of paired differences: after each pair of runs, a verdict may stop, and so
may the comparison of a setting with the baseline of its sweep.

The error rate is spent in proportion to the number of pairs (alpha spending: Lan and DeMets, 1983;
Kim and DeMets, 1987). The boundaries are those of Student's t statistic itself, because a
normal limit does not hold for four pairs (Jennison and Turnbull, 1991); a simulation with fixed
random numbers computes them for any limit. The interval at a stop is the repeated confidence
interval, mean ± boundary × standard error (Jennison and Turnbull, 1989): all intervals of a
comparison together contain the true difference with a probability of 1 - error rate.

A comparison also stops if it is unlikely to decide within the limit. The boundaries do not rely on
this rule, so more pairs may be added afterwards.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import numpy as np
from scipy.special import ndtr, ndtri, stdtr, stdtrit

from timm_parallel.lab.analysis.statistics import NOT_MEASURABLE, Array, Contrast, Estimate

BETTER, WORSE, EQUAL, NO_DIFFERENCE = "better", "worse", "equal", "no difference shown"

# Chance that a verdict says better or worse although nothing differs.
LEVEL = 0.02
# Number of pairs after which a comparison may be decided. With three pairs, heavy tails and few
# images would decide too early.
FIRST = 4
# A comparison stops if its chance to decide within the limit is smaller.
LEAST_CHANCE = 0.1
# Simulated series of pairs that are wrong, for which the standard error of their share is 1.6 %.
# The largest number of series in all needs 100 MB.
WRONG, MOST_SERIES = 4000, 2_000_000


@dataclass(frozen=True)
class Plan:
    """Rules by which a paired comparison ends."""

    # Largest number of pairs.
    limit: int
    # Chance that the comparison says better or worse although nothing differs.
    level: float = LEVEL
    # Largest difference that counts as equal: in points if the metric is a proportion, else in
    # percent of the baseline. None if equality is not tested.
    smallest: float | None = None
    # True if the number of pairs is fixed, so that a single test decides.
    is_fixed: bool = False

    def level_at(self, pairs: int) -> float:
        """Return the error rate of a test after this number of pairs. It is 0 if there are too few
        to decide.
        """
        if self.is_fixed:
            return self.level
        return levels(self.limit, self.level)[min(pairs, self.limit)] if pairs >= FIRST else 0.0

    def margin(self, e: Estimate) -> float | None:
        """Return the largest difference that counts as equal: in the unit of the metric, or as a
        ratio minus 1. None if equality is not tested.
        """
        if self.smallest is None:
            return None
        is_share = e.scale.is_ratio or e.scale.is_proportion
        return self.smallest / 100 * (1.0 if is_share else abs(e.in_units.level))

    def answer(self, e: Estimate, contrast: Contrast) -> str:
        """Return what the confidence interval shows: better, worse, equal, or no difference."""
        word, margin = word_of(contrast), self.margin(e)
        low, high = (end - contrast.scale.none for end in contrast.interval)
        is_equal = margin is not None and -margin <= low and high <= margin
        return EQUAL if word == NO_DIFFERENCE and is_equal else word

    def is_futile(self, e: Estimate, left: int) -> bool:
        """Return True if `left` more pairs are unlikely to show a difference, or equality."""
        return e.n >= FIRST and chance_to_decide(e, self, e.n + left) < LEAST_CHANCE


def word_of(contrast: Contrast) -> str:
    """Return better or worse if the confidence interval excludes equality, else no difference
    shown.
    """
    scale = contrast.scale
    least, most = sorted(scale.sign * (end - scale.none) for end in contrast.interval)
    if most < 0:
        return WORSE
    return BETTER if least > 0 and contrast.verdict != NOT_MEASURABLE else NO_DIFFERENCE


@cache
def levels(limit: int, level: float = LEVEL) -> dict[int, float]:
    """Compute the error rate of the two-sided t test after each number of pairs from FIRST to
    `limit`, so that all tests together are wrong with a chance of `level`.
    """
    draw = np.random.default_rng(53)
    series = min(round(WRONG / level), MOST_SERIES)
    sums, squares = np.zeros(series), np.zeros(series)
    table: dict[int, float] = {}
    for pairs in range(1, limit + 1):
        values = draw.standard_normal(len(sums))
        sums, squares = sums + values, squares + values**2
        if pairs < FIRST:
            continue
        variances = (squares - sums**2 / pairs) / (pairs - 1)
        t = np.abs(sums) / np.sqrt(variances * pairs)
        spent = series - len(sums)
        # Number of series that may stop here, which is the rank of the boundary.
        rank = len(t) - round(series * level * pairs / limit) + spent
        boundary = np.partition(t, rank)[rank]
        table[pairs] = 2 * float(stdtr(pairs - 1, -boundary))
        sums, squares = sums[t < boundary], squares[t < boundary]
    return table


def chance_to_decide(e: Estimate, plan: Plan, last: int) -> float:
    """Return the chance that `last` pairs show a difference, or equality, if the estimate of the
    pairs so far is true.
    """
    level, unit, margin = plan.level_at(last), e.in_units, plan.margin(e)
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

"""Confidence intervals and verdicts for ratios of repeated measurements. Pure functions.

The model is that of randomized complete blocks: log(value) = point + block + noise, with one noise for all points. Its
intra-block analysis (Cochran and Cox, Experimental Designs, 1957, chapter 9) also serves blocks that lack a point or
hold one twice. Holm (1979) keeps the chance of any wrong statement in a family at `level`.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
from scipy.special import stdtr, stdtrit  # Student's t and its quantiles; scipy.stats takes a second to import

SUPPORTED, NOT_SUPPORTED = "supported", "not supported"
INCONCLUSIVE, NOT_MEASURABLE = "inconclusive", "not measurable"
SMALLEST_DIFFERENCE = 0.03  # a smaller difference does not matter for the choice of a strategy
LEVEL = 0.05  # chance of any wrong statement in a family
POWER = 0.8  # share of sweeps in which a detectable difference is found
MOST_BLOCKS = 1000  # the report never advises more


@dataclass(frozen=True)
class Estimate:
    """Estimate of log(a / b) for two points. `difference` is None if no chain of shared blocks connects them."""

    a: str
    b: str
    n: int  # measurements of a or of b, the smaller number
    difference: float | None = None
    error: float = 0.0  # standard error of the difference
    freedom: int = 0  # residual degrees of freedom; 0: the rows do not show the noise
    noise: float = 0.0  # residual standard deviation of one measurement
    points: int = 2

    @property
    def p(self) -> float:
        """Two-sided p-value of the difference. Needs at least one degree of freedom."""
        assert self.difference is not None
        if self.error == 0:
            return 0.0 if self.difference else 1.0
        return float(2 * stdtr(self.freedom, -abs(self.difference) / self.error))


@dataclass(frozen=True)
class Contrast:
    """Ratio a / b of two points with its interval, and a verdict on the statement "a is more than b"."""

    a: str
    b: str
    ratio: float | None
    low: float | None  # of the interval at the level that Holm's rule leaves to this contrast; None: noise unknown
    high: float | None
    n: int
    verdict: str
    detectable: float | None = None  # smallest difference (0.1: 10 %) that POWER of such sweeps show
    blocks_needed: int | None = None  # if inconclusive: blocks for a verdict, if the estimate stays; None: unknown

    @property
    def interval(self) -> tuple[float, float]:
        """Return the interval (low, high) of the ratio, which is unbounded if the noise is unknown."""
        return (-math.inf, math.inf) if self.low is None or self.high is None else (self.low, self.high)

    def exceeds(self, limit: float) -> str:
        """Return the verdict on "a is at least `limit` times b"."""
        if self.verdict == NOT_MEASURABLE:
            return NOT_MEASURABLE
        low, high = self.interval
        if low >= limit:
            return SUPPORTED
        return NOT_SUPPORTED if high < limit else INCONCLUSIVE


def estimate(rows: Iterable[tuple[str, object, float]], pairs: Sequence[tuple[str, str]]) -> list[Estimate]:
    """Estimate log(a / b) for each pair of points (a, b), with the block effects removed.

    Name only pairs that will be stated. `rows`: (point, block, value) of every measurement; values <= 0 are ignored.
    """
    known = [row for row in rows if 0 < row[2] < math.inf]
    counts = Counter(name for name, *_ in known)
    named: list[tuple[str, object]] = [("point", row[0]) for row in known] + [("block", row[1]) for row in known]
    columns = {name: column for column, name in enumerate(dict.fromkeys(named))}
    design = np.zeros((len(known), len(columns)))
    for line, (name, block, _) in zip(design, known, strict=True):
        line[[columns["point", name], columns["block", block]]] = 1
    values = np.log([value for *_, value in known])
    values -= values.mean() if known else 0.0
    information = design.T @ design
    inverse = np.linalg.pinv(information, hermitian=True, rcond=1e-9)
    effects = inverse @ design.T @ values
    residuals = values - design @ effects
    # The trace is the rank of the design.
    freedom = len(known) - round(float(np.trace(inverse @ information)))
    noise = math.sqrt(float(residuals @ residuals) / freedom) if freedom > 0 else 0.0
    estimates = []
    for a, b in pairs:
        n = min(counts[a], counts[b])
        weights = np.zeros(len(columns))
        if n:
            weights[columns["point", a]] += 1
            # a and b are the same column if a point is compared with itself.
            weights[columns["point", b]] -= 1
        # No chain of blocks connects a and b.
        if not n or np.abs(information @ (inverse @ weights) - weights).max() > 1e-6:
            estimates.append(Estimate(a, b, n))
            continue
        error = noise * math.sqrt(float(weights @ inverse @ weights))
        estimates.append(Estimate(a, b, n, float(weights @ effects), error, freedom, noise, len(counts)))
    return estimates


def decide(
    estimates: Sequence[Estimate], smallest_difference: float = SMALLEST_DIFFERENCE, level: float = LEVEL
) -> list[Contrast]:
    """Return a contrast with verdict per estimate, with the error rate controlled over all of them by Holm's rule.

    Holm: compare the smallest of m probabilities with level / m, the next with level / (m - 1), and so on, until one
    fails; the rest stay at its level. Each interval is at the level of its test, so that the two agree.
    """
    tested = sorted((e for e in estimates if e.freedom), key=lambda e: e.p)
    levels: dict[int, float] = {}
    share = level
    passed = True
    for index, e in enumerate(tested):
        if passed:
            share = level / (len(tested) - index)
            passed = e.p <= share
        levels[id(e)] = share
    return [_contrast(e, levels.get(id(e), level), smallest_difference) for e in estimates]


def _contrast(e: Estimate, level: float, smallest: float) -> Contrast:
    if e.difference is None:
        return Contrast(e.a, e.b, None, None, None, e.n, NOT_MEASURABLE)
    ratio = math.exp(e.difference)
    if not e.freedom:
        return Contrast(e.a, e.b, ratio, None, None, e.n, INCONCLUSIVE)
    reach = float(stdtrit(e.freedom, 1 - level / 2)) * e.error
    power = float(stdtrit(e.freedom, POWER)) * e.error
    # With one degree of freedom and a large family, exp overflows.
    with np.errstate(over="ignore"):
        low = float(np.exp(e.difference - reach))
        high = float(np.exp(e.difference + reach))
        detectable = float(np.expm1(reach + power))
    if high < 1 + smallest:
        verdict = NOT_SUPPORTED
    elif low > 1:
        verdict = SUPPORTED
    else:
        verdict = INCONCLUSIVE
    needed = _blocks_needed(e, level, smallest) if verdict == INCONCLUSIVE else None
    return Contrast(e.a, e.b, ratio, low, high, e.n, verdict, detectable, needed)


def _blocks_needed(e: Estimate, level: float, smallest: float) -> int | None:
    """Return how many blocks suffice for a verdict if the estimate stays: for or against a difference of `smallest`."""
    assert e.difference is not None
    margin = max(e.difference, math.log1p(smallest) - e.difference)

    def enough(blocks: int) -> bool:
        freedom = max(1, (blocks - 1) * (e.points - 1))
        reach = stdtrit(freedom, 1 - level / 2) + stdtrit(freedom, POWER)
        return bool(2 * (reach * e.noise / margin) ** 2 <= blocks)

    candidates = range(e.n + 1, MOST_BLOCKS + 1)
    index = bisect_left(candidates, True, key=enough)
    return candidates[index] if index < len(candidates) else None


def choose(
    rows: Iterable[tuple[str, object, float]],
    simplest_first: Sequence[str],
    smallest_difference: float = SMALLEST_DIFFERENCE,
) -> tuple[str, Contrast | None, list[str]] | None:
    """Return the recommended point, its contrast with the fastest point if simpler, and the points not compared.

    The recommendation is the point with the highest estimate, or the simplest one whose interval shows it at most
    `smallest_difference` slower. ("The simplest that cannot be excluded" would let one disturbed run, which widens all
    intervals, decide.) Points that no chain of blocks connects with it are not compared. None without rows.
    """
    rows = list(rows)
    measured = {name for name, _, value in rows if value > 0}
    names = [name for name in simplest_first if name in measured]
    if not names:
        return None
    estimates = estimate(rows, [(name, names[0]) for name in names])
    differences = {e.a: e.difference for e in estimates if e.difference is not None}
    apart = [name for name in names if name not in differences]
    best = max(differences, key=lambda name: differences[name])
    for to_best in estimate(rows, [(name, best) for name in names[: names.index(best)]]):
        [contrast] = decide([to_best], smallest_difference)
        if contrast.exceeds(1 - smallest_difference) == SUPPORTED:
            return contrast.a, contrast, apart
    return best, None, apart


@dataclass(frozen=True)
class Summary:
    """Median, smallest, largest and number of repeated measurements, for display only; verdicts do not use it."""

    median: float
    low: float
    high: float
    count: int


def summarize(values: Iterable[float | None]) -> Summary | None:
    finite = [value for value in values if value is not None and math.isfinite(value)]
    return Summary(median(finite), min(finite), max(finite), len(finite)) if finite else None

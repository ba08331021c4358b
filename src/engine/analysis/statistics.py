"""Confidence intervals and verdicts for ratios and differences of repeated measurements. Pure functions.

The model is that of randomized complete blocks; a block is one repeat of all configurations. On a scale (for speed the
logarithm, see scales.py), value = configuration + block + noise, with equal noise for all configurations. The intra-block
analysis (Cochran and Cox, Experimental Designs, 1957, chapter 9) allows blocks in which a configuration is missing or
occurs twice. Holm's rule (1979) keeps the chance that any verdict is wrong at `level`.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
from scipy.special import stdtr, stdtrit  # Student's t and its quantiles; scipy.stats takes a second to import

from src.engine.analysis.scales import RATIO, Scale

SUPPORTED, NOT_SUPPORTED = "supported", "not supported"
INCONCLUSIVE, NOT_MEASURABLE = "inconclusive", "not measurable"
SMALLEST_DIFFERENCE = 0.03  # a smaller difference does not matter for the choice of a strategy
LEVEL = 0.05  # chance that any verdict of a report is wrong
POWER = 0.8  # share of sweeps in which a detectable difference is found
MOST_BLOCKS = 1000  # the report never advises more


Row = tuple[str, object, float]  # label of a configuration, block, measured value


@dataclass(frozen=True)
class Estimate:
    """Estimated difference of configurations a and b on `scale`: for speed log(a / b). The difference is None if unknown."""

    a: str
    b: str
    n: int  # measurements of a or of b, the smaller number
    difference: float | None = None
    error: float = 0.0  # standard error of the difference
    freedom: int = 0  # residual degrees of freedom; 0: the rows do not show the noise
    noise: float = 0.0  # residual standard deviation of one measurement
    points: int = 2
    scale: Scale = RATIO
    level: float = 0.0  # of b on the scale, a mean over the blocks

    @property
    def better(self) -> float:
        """Difference with its sign chosen so that it is positive if a is better than b."""
        assert self.difference is not None
        return self.scale.sign * self.difference

    @property
    def p(self) -> float:
        """Two-sided p-value of the difference. Needs at least one degree of freedom."""
        assert self.difference is not None
        if self.error == 0:
            return 0.0 if self.difference else 1.0
        return float(2 * stdtr(self.freedom, -abs(self.difference) / self.error))


@dataclass(frozen=True)
class Contrast:
    """Ratio or difference of configurations a and b, its confidence interval, and the verdict on "a is better than b"."""

    a: str
    b: str
    effect: float | None  # a ratio or a difference, see `scale`
    low: float | None  # of the interval at the level that Holm's rule leaves to this contrast; None: noise unknown
    high: float | None
    n: int
    verdict: str
    detectable: float | None = None  # smallest difference (of a ratio 0.1: 10 %) that POWER of such sweeps show
    blocks_needed: int | None = None  # if inconclusive: repeats for a verdict, if the estimate stays; None: unknown
    scale: Scale = RATIO

    @property
    def ratio(self) -> float | None:
        return self.effect if self.scale.is_ratio else None

    @property
    def fields(self) -> dict[str, Any]:
        """Return the contrast as an entry of report.json, with the effect as `ratio` or `difference`."""
        names = {"effect": "ratio" if self.scale.is_ratio else "difference"}
        return {names.get(key, key): value for key, value in vars(self).items() if key != "scale"}

    @property
    def interval(self) -> tuple[float, float]:
        """Confidence interval (low, high) of the effect; (-inf, inf) if the noise is unknown."""
        return (-math.inf, math.inf) if self.low is None or self.high is None else (self.low, self.high)

    def exceeds(self, limit: float) -> str:
        """Return the verdict on "a is at least `limit` times b"."""
        if self.verdict == NOT_MEASURABLE:
            return NOT_MEASURABLE
        low, high = self.interval
        if low >= limit:
            return SUPPORTED
        return NOT_SUPPORTED if high < limit else INCONCLUSIVE


def estimate(rows: Iterable[Row], pairs: Sequence[tuple[str, str]], scale: Scale = RATIO) -> list[Estimate]:
    """Estimate the difference on `scale` for each pair of configurations (a, b), without differences between repeats."""
    # Values outside the domain of the scale, such as values <= 0 for a ratio, are ignored.
    known = [(name, block, shift) for name, block, value in rows if math.isfinite(shift := scale.to(value))]
    counts = Counter(name for name, *_ in known)
    named: list[tuple[str, object]] = [("point", row[0]) for row in known] + [("block", row[1]) for row in known]
    columns = {name: column for column, name in enumerate(dict.fromkeys(named))}
    design = np.zeros((len(known), len(columns)))
    for line, (name, block, _) in zip(design, known, strict=True):
        line[[columns["point", name], columns["block", block]]] = 1
    values = np.array([value for *_, value in known])
    middle = float(values.mean()) if known else 0.0
    values -= middle
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
            # a and b are the same column if a configuration is compared with itself.
            weights[columns["point", b]] -= 1
        # No block ran both a and b, and no chain of blocks connects them through other configurations.
        if not n or np.abs(information @ (inverse @ weights) - weights).max() > 1e-6:
            estimates.append(Estimate(a, b, n))
            continue
        error = noise * math.sqrt(float(weights @ inverse @ weights))
        blocks = [effects[column] for (kind, _), column in columns.items() if kind == "block"]
        level = middle + float(effects[columns["point", b]] + np.mean(blocks))
        difference = float(weights @ effects)
        estimates.append(Estimate(a, b, n, difference, error, freedom, noise, len(counts), scale, level))
    return estimates


def decide(
    estimates: Sequence[Estimate], smallest_difference: float = SMALLEST_DIFFERENCE, level: float = LEVEL
) -> list[Contrast]:
    """Return a contrast (effect, interval and verdict) for each estimate. The chance that any verdict is wrong is at most `level`.

    Holm's rule: compare the smallest of m p-values with level / m, the next with level / (m - 1), and so on, until one
    fails; test the rest at that level. Each interval has the level of its test, so that interval and verdict agree.
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


def _contrast(e: Estimate, level: float, share: float) -> Contrast:
    if e.difference is None:
        return Contrast(e.a, e.b, None, None, None, e.n, NOT_MEASURABLE, scale=e.scale)
    effect = e.scale.effect(e.level, e.difference)
    if not e.freedom:
        return Contrast(e.a, e.b, effect, None, None, e.n, INCONCLUSIVE, scale=e.scale)
    reach = float(stdtrit(e.freedom, 1 - level / 2)) * e.error
    power = float(stdtrit(e.freedom, POWER)) * e.error
    low, high = (e.scale.effect(e.level, e.difference + side * reach) for side in (-1, 1))
    detectable = abs(e.scale.effect(e.level, e.scale.sign * (reach + power)) - e.scale.none)
    smallest = e.scale.smallest_shift(e.level, share)
    if e.better + reach < smallest:
        verdict = NOT_SUPPORTED
    elif e.better - reach > 0:
        verdict = SUPPORTED
    else:
        verdict = INCONCLUSIVE
    needed = _blocks_needed(e, level, smallest) if verdict == INCONCLUSIVE else None
    return Contrast(e.a, e.b, effect, low, high, e.n, verdict, detectable, needed, e.scale)


def _blocks_needed(e: Estimate, level: float, smallest: float) -> int | None:
    """Return the number of repeats that would give a verdict if the estimate stayed the same; None if more than MOST_BLOCKS."""
    margin = max(e.better, smallest - e.better)
    if margin <= 0:
        return None

    def enough(blocks: int) -> bool:
        freedom = max(1, (blocks - 1) * (e.points - 1))
        reach = stdtrit(freedom, 1 - level / 2) + stdtrit(freedom, POWER)
        return bool(2 * (reach * e.noise / margin) ** 2 <= blocks)

    candidates = range(e.n + 1, MOST_BLOCKS + 1)
    index = bisect_left(candidates, True, key=enough)
    return candidates[index] if index < len(candidates) else None


def mean_interval(values: Iterable[float], scale: Scale) -> tuple[float, float] | None:
    """Return the 95 % confidence interval (Student's t on `scale`) of the mean of values; None for fewer than two."""
    shifts = np.array([scale.to(value) for value in values])
    if len(shifts) < 2:
        return None
    reach = float(stdtrit(len(shifts) - 1, 1 - LEVEL / 2) * shifts.std(ddof=1)) / math.sqrt(len(shifts))
    return scale.back(float(shifts.mean()) - reach), scale.back(float(shifts.mean()) + reach)


@dataclass(frozen=True)
class Summary:
    """Median, smallest and largest value, and number of repeated measurements. Serves display; verdicts do not use it."""

    median: float
    low: float
    high: float
    count: int


def summarize(values: Iterable[float | None]) -> Summary | None:
    finite = [value for value in values if value is not None and math.isfinite(value)]
    return Summary(median(finite), min(finite), max(finite), len(finite)) if finite else None

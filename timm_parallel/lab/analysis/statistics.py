"""Confidence intervals and verdicts for ratios and differences of repeated measurements. Pure
functions.

The model is that of randomized complete blocks; a block is one repeat of all configurations. On a
scale (for speed the logarithm, see scales.py), value = configuration + block + noise. The
intra-block analysis (Cochran and Cox, Experimental Designs, 1957, chapter 9) allows blocks in which
a configuration is missing or occurs twice. Holm's rule (1979) keeps the chance that any verdict is
wrong at `level`.

The noise is equal for all configurations, or each has its own. A variance from few repeats is
itself noisy, so the own variances are moderated: drawn toward their common value, the more the less
they differ among each other (Smyth, 2004). A configuration that is noisier than the others is drawn
less, as in the robust form of that method (Phipson et al., 2016), because too small a variance
would make a verdict wrong. With two configurations this is the paired t test.
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
from scipy.special import (
    digamma,
    fdtrc,
    polygamma,
    stdtr,
    stdtrit,
)  # scipy.stats takes a second to import

from timm_parallel.lab.analysis.scales import RATIO, Scale

SUPPORTED, NOT_SUPPORTED = "supported", "not supported"
INCONCLUSIVE, NOT_MEASURABLE = "inconclusive", "not measurable"
SMALLEST_DIFFERENCE = 0.03  # a smaller difference does not matter for the choice of a strategy
LEVEL = 0.05  # chance that any verdict of a report is wrong
POWER = 0.8  # share of sweeps in which a detectable difference is found
MOST_BLOCKS = 1000  # the report never advises more
# A configuration counts as noisier than the others if chance would make it so in less than
# (SUSPECT[0] + SUSPECT[1] / configurations) / degrees of freedom of the cases. Chosen by
# simulation, see docs/dev/report_method.md: larger values find fewer differences where noise is
# equal, smaller ones state false ones where it is not.
SUSPECT = (0.25, 3.5)
ROUNDS = 2  # of weighting by the noise; more change little

Array = np.ndarray

Row = tuple[str, object, float]  # label of a configuration, block, measured value


@dataclass(frozen=True)
class Estimate:
    """Estimated difference of configurations a and b on `scale`: for speed log(a / b). The
    difference is None if unknown.
    """

    a: str
    b: str
    n: int  # measurements of a or of b in the same blocks, the smaller number
    difference: float | None = None
    error: float = 0.0  # standard error of the difference
    freedom: float = 0  # residual degrees of freedom; 0: the rows do not show the noise
    noise: float = 0.0  # residual standard deviation of one measurement
    scale: Scale = RATIO
    level: float = 0.0  # of b on the scale, a mean over the blocks
    rounding: float = (
        0.0  # smallest difference that the measure can have, such as one image of those evaluated
    )
    # How much lower and higher the difference may be because runs were lost, which may have been
    # the worst or the best.
    slack: tuple[float, float] = (0.0, 0.0)

    @property
    def better(self) -> float:
        """Difference with its sign chosen so that it is positive if a is better than b."""
        assert self.difference is not None
        return self.scale.sign * self.difference

    @property
    def p(self) -> float:
        """Two-sided p-value of the difference. Needs at least one degree of freedom."""
        assert self.difference is not None
        certain = max(self.difference - self.slack[0], -self.difference - self.slack[1], 0.0)
        if self.error == 0:
            return 0.0 if certain else 1.0
        return float(2 * stdtr(self.freedom, -certain / self.error))

    def is_shown_better(self, level: float) -> bool:
        """Return True if a is better than b by at least `rounding`,
        in a one-sided test at `level`.
        """
        if self.difference is None:
            return False
        effect = self.scale.effect(self.level, self.difference) - self.scale.none
        return self.better > 0 and self.p / 2 <= level and abs(effect) >= self.rounding


@dataclass(frozen=True)
class Contrast:
    """Ratio or difference of configurations a and b, its confidence interval, and the verdict on "a
    is better than b".
    """

    a: str
    b: str
    effect: float | None  # a ratio or a difference, see `scale`
    low: (
        float | None
    )  # of the interval at the level that Holm's rule leaves to this contrast; None: noise unknown
    high: float | None
    n: int
    verdict: str
    detectable: float | None = (
        None  # smallest difference (of a ratio 0.1: 10 %) that POWER of such sweeps show
    )
    blocks_needed: int | None = (
        None  # if inconclusive: repeats for a verdict, if the estimate stays; None: unknown
    )
    scale: Scale = RATIO

    @property
    def ratio(self) -> float | None:
        return self.effect if self.scale.is_ratio else None

    @property
    def fields(self) -> dict[str, Any]:
        """Return the contrast as an entry of report.json, with the effect as `ratio` or
        `difference`.
        """
        names = {"effect": "ratio" if self.scale.is_ratio else "difference"}
        return {names.get(key, key): value for key, value in vars(self).items() if key != "scale"}

    @property
    def interval(self) -> tuple[float, float]:
        """Confidence interval (low, high) of the effect; (-inf, inf) if the noise is unknown."""
        return (
            (-math.inf, math.inf)
            if self.low is None or self.high is None
            else (self.low, self.high)
        )

    def exceeds(self, limit: float) -> str:
        """Return the verdict on "a is at least `limit` times b"."""
        if self.verdict == NOT_MEASURABLE:
            return NOT_MEASURABLE
        low, high = self.interval
        if low >= limit:
            return SUPPORTED
        return NOT_SUPPORTED if high < limit else INCONCLUSIVE


@dataclass(frozen=True)
class _Fit:
    """Weighted least squares of value = configuration + block."""

    information: Array
    inverse: Array
    effects: Array
    variances: Array  # of the noise of each configuration; 0 if the rows do not show it
    freedoms: Array  # residual degrees of freedom by configuration; their sum is that of all rows


class Model:
    """Measured values on `scale` as configuration + block + noise, from which pairs of
    configurations are compared.

    `equal_noise`: of all configurations. `rounding`: smallest difference that two values can have.
    """

    def __init__(
        self, rows: Iterable[Row], scale: Scale, equal_noise: bool = True, rounding: float = 0.0
    ) -> None:
        self.scale, self.rounding, self.total = scale, rounding, 0
        # Values outside the domain of the scale, such as values <= 0 for a ratio, are ignored.
        known = [
            (name, block, shift)
            for name, block, value in rows
            if math.isfinite(shift := scale.to(value))
        ]
        self.points = {
            name: column for column, name in enumerate(dict.fromkeys(name for name, *_ in known))
        }
        blocks = {
            block: column
            for column, block in enumerate(dict.fromkeys(block for _, block, _ in known))
        }
        self.counts: dict[str, Counter[object]] = {name: Counter() for name in self.points}
        for name, block, _ in known:
            self.counts[name][block] += 1
        if not known:
            return
        rows_of, lines = len(self.points), np.arange(len(known))
        self.design = np.zeros((len(known), rows_of + len(blocks)))
        self.design[lines, [self.points[name] for name, *_ in known]] = 1
        self.design[lines, [rows_of + blocks[block] for _, block, _ in known]] = 1
        self.of_point = self.design[:, :rows_of]
        values = np.array([value for *_, value in known])
        self.middle = float(values.mean())
        values -= self.middle
        self.weights = np.ones(len(known))
        self.fit = _fit(self.design, values, self.of_point, self.weights)
        self.total = round(float(self.fit.freedoms.sum()))
        smallest = scale.step(scale.back(self.middle), rounding) ** 2 / 12 if rounding else 0.0
        self.variances, self.freedoms = _moderated(self.fit, self.total, smallest, equal_noise)
        for _ in range(0 if equal_noise or not self.variances.any() else ROUNDS):
            # A noisy configuration says little about the blocks.
            self.weights = self.of_point @ (
                1 / np.maximum(self.variances, self.variances.max() * 1e-6)
            )
            self.weights /= self.weights.max()
            self.fit = _fit(self.design, values, self.of_point, self.weights)
            self.variances, self.freedoms = _moderated(self.fit, self.total, smallest, equal_noise)

    def compare(self, a: str, b: str) -> Estimate:
        """Estimate the difference of configurations a and b on the scale, without differences
        between blocks.
        """
        if a not in self.points or b not in self.points:
            return Estimate(a, b, 0)
        n = (self.counts[a] & self.counts[b]).total()
        fit, contrast = self.fit, np.zeros(self.design.shape[1])
        contrast[self.points[a]] += 1
        # a and b are the same column if a configuration is compared with itself.
        contrast[self.points[b]] -= 1
        solution = fit.inverse @ contrast
        # No block ran both a and b, and no chain of blocks connects them through other
        # configurations.
        if np.abs(fit.information @ solution - contrast).max() > 1e-6:
            return Estimate(a, b, n)
        of_row = (self.design @ solution) * self.weights
        parts = self.variances * (of_row**2 @ self.of_point)
        variance, freedom = float(parts.sum()), float(self.total)
        if variance and self.total:
            # Satterthwaite (1946): a sum of variances with unlike degrees of freedom.
            freedom = min(
                freedom, variance**2 / float((parts**2 / np.maximum(self.freedoms, 1e-9)).sum())
            )
        noise = math.sqrt(variance / float(of_row @ of_row)) if variance else 0.0
        level = self.middle + float(
            fit.effects[self.points[b]] + fit.effects[len(self.points) :].mean()
        )
        difference, error = float(contrast @ fit.effects), math.sqrt(variance)
        return Estimate(
            a, b, n, difference, error, freedom, noise, self.scale, level, self.rounding
        )


def estimate(
    rows: Iterable[Row], pairs: Sequence[tuple[str, str]], scale: Scale = RATIO
) -> list[Estimate]:
    """Estimate the difference on `scale` for each pair of configurations (a, b), with equal noise
    of all configurations.
    """
    model = Model(rows, scale)
    return [model.compare(a, b) for a, b in pairs]


def _fit(design: Array, values: Array, of_point: Array, weights: Array) -> _Fit:
    weighted = design * weights[:, None]
    information = design.T @ weighted
    inverse = np.linalg.pinv(information, hermitian=True, rcond=1e-9)
    effects = inverse @ weighted.T @ values
    leverages = ((weighted @ inverse) * design).sum(axis=1)
    freedoms = (1 - leverages) @ of_point
    # A configuration with one value, or alone in all of its blocks, shows no noise.
    freedoms[freedoms < 1e-6] = 0.0
    squares = (values - design @ effects) ** 2 @ of_point
    variances = np.divide(squares, freedoms, out=np.zeros_like(squares), where=freedoms > 0)
    return _Fit(information, inverse, effects, variances, freedoms)


def _moderated(fit: _Fit, total: int, smallest: float, equal_noise: bool) -> tuple[Array, Array]:
    """Return the variance of each configuration's noise, and its degrees of freedom. No variance is
    below `smallest`.
    """
    freedoms, shown = fit.freedoms, fit.freedoms > 0
    if not total:
        return np.full(len(freedoms), smallest), freedoms
    pooled = max(float(fit.variances @ freedoms) / total, smallest)
    if equal_noise or not pooled:
        return np.full(len(freedoms), pooled), np.full(len(freedoms), float(total))
    variances = np.maximum(fit.variances, max(smallest, pooled * 1e-9))
    common, prior = _common_variance(variances[shown], freedoms[shown], pooled, total)
    # Compare each with the others, not with itself.
    rest = np.maximum(total - freedoms, 1e-9)
    others = np.maximum((total * pooled - freedoms * variances) / rest, smallest)
    tail = fdtrc(np.maximum(freedoms, 1e-9), rest, variances / np.minimum(others, common))
    # With few repeats or few others, a noisy configuration is less conspicuous, so it takes less to
    # count as one.
    suspect = SUSPECT[0] + SUSPECT[1] / len(freedoms)
    drawn = np.minimum(prior, rest) * np.where(
        shown, np.minimum(1.0, tail * freedoms / suspect), 1.0
    )
    both = drawn + freedoms
    return (drawn * common + freedoms * variances) / both, both


def _common_variance(
    variances: Array, freedoms: Array, pooled: float, total: int
) -> tuple[float, float]:
    """Return the value toward which variances are drawn, and its degrees of freedom: `total` if
    they differ by chance only.
    """
    logs = np.log(variances) - digamma(freedoms / 2) + np.log(freedoms / 2)
    excess = float(logs.var(ddof=1) - polygamma(1, freedoms / 2).mean()) if len(logs) > 1 else 0.0
    if excess <= 0:
        return pooled, float(total)
    # Newton's method for trigamma(half) = excess.
    half = 0.5 + 1 / excess
    for _ in range(8):
        trigamma = float(polygamma(1, half))
        half += trigamma * (1 - trigamma / excess) / float(polygamma(2, half))
    common = math.exp(min(float(logs.mean()) + float(digamma(half)) - math.log(half), 700.0))
    return common, min(2 * half, float(total))


def decide(
    estimates: Sequence[Estimate],
    smallest_difference: float = SMALLEST_DIFFERENCE,
    level: float = LEVEL,
) -> list[Contrast]:
    """Return a contrast (effect, interval and verdict) for each estimate. The chance that any
    verdict is wrong is at most `level`.

    Holm's rule: compare the smallest of m p-values with level / m, the next with level / (m - 1),
    and so on, until one fails; test the rest at that level. Each interval has the level of its
    test, so that interval and verdict agree.
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
    shifts = (e.difference - reach - e.slack[0], e.difference + reach + e.slack[1])
    low, high = (e.scale.effect(e.level, shift) for shift in shifts)
    # No measure shows a difference below one image.
    low, high = min(low, effect - e.rounding), max(high, effect + e.rounding)
    # Near 100 %, only a difference downward is large enough.
    signs = (-1, 1) if e.scale.is_proportion else (e.scale.sign,)
    detectable = max(
        abs(e.scale.effect(e.level, sign * (reach + power)) - e.scale.none) for sign in signs
    )
    smallest = e.scale.smallest_shift(e.level, share)
    of_interest = abs(e.scale.effect(e.level, e.scale.sign * smallest) - e.scale.none)
    least, most = sorted(e.scale.sign * (end - e.scale.none) for end in (low, high))
    if most < of_interest:
        verdict = NOT_SUPPORTED
    elif least > 0:
        verdict = SUPPORTED
    else:
        verdict = INCONCLUSIVE
    needed = _blocks_needed(e, level, smallest) if verdict == INCONCLUSIVE else None
    return Contrast(
        e.a, e.b, effect, low, high, e.n, verdict, max(detectable, e.rounding), needed, e.scale
    )


def _blocks_needed(e: Estimate, level: float, smallest: float) -> int | None:
    """Return the number of repeats that would give a verdict if the estimate stayed the same; None
    if more than MOST_BLOCKS.
    """
    margin = max(e.better, smallest - e.better)
    if margin <= 0:
        return None
    of_a_block = e.freedom / max(e.n - 1, 1)

    def enough(blocks: int) -> bool:
        freedom = max(1.0, (blocks - 1) * of_a_block)
        reach = stdtrit(freedom, 1 - level / 2) + stdtrit(freedom, POWER)
        return bool(2 * (reach * e.noise / margin) ** 2 <= blocks)

    candidates = range(e.n + 1, MOST_BLOCKS + 1)
    index = bisect_left(candidates, True, key=enough)
    return candidates[index] if index < len(candidates) else None


def mean_interval(
    values: Iterable[float], scale: Scale, rounding: float = 0.0
) -> tuple[float, float] | None:
    """Return the 95 % confidence interval of the mean of `values`, by Student's t on `scale`; None
    for fewer than two values. The interval extends at least `rounding` below and above the mean.
    """
    shifts = np.array([scale.to(value) for value in values])
    if len(shifts) < 2:
        return None
    middle = float(shifts.mean())
    reach = float(stdtrit(len(shifts) - 1, 1 - LEVEL / 2) * shifts.std(ddof=1)) / math.sqrt(
        len(shifts)
    )
    mean = scale.back(middle)
    return min(scale.back(middle - reach), mean - rounding), max(
        scale.back(middle + reach), mean + rounding
    )


@dataclass(frozen=True)
class Summary:
    """Median, minimum, maximum and count of repeated measurements. They are only displayed;
    verdicts do not use them.
    """

    median: float
    low: float
    high: float
    count: int


def summarize(values: Iterable[float | None]) -> Summary | None:
    finite = [value for value in values if value is not None and math.isfinite(value)]
    return Summary(median(finite), min(finite), max(finite), len(finite)) if finite else None

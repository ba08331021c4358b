"""Confidence intervals and verdicts for ratios and differences of repeated measurements, the choice
of the best configuration, and an estimate of its value without the bias that comes from choosing
the best. All functions are pure.

A scale transforms the values of a measure so that their noise is about equal for all
configurations.

- Ratio: logarithm; the result is a ratio. For images/s, seconds and counts.
- Proportion: arcsine of the square root, which makes the variance of a binomial proportion equal
  near 0, 1/2 and 1 (Bartlett, 1947). The result is a difference of proportions.
- Level: logarithm for a positive measure whose spread grows with its value, such as a loss, else
  the value itself. The result is a difference in the unit of the measure.

The model is that of randomized complete blocks. A block is one repeat of all configurations. On a
scale, value = configuration + block + noise. The intra-block analysis (Cochran and Cox,
Experimental Designs, 1957, chapter 9) allows blocks in which a configuration is missing or occurs
twice. Holm's rule (1979) keeps the chance that any verdict is wrong at `level`.

The noise is either equal for all configurations, or each has its own. A variance from few repeats
is itself noisy. So the own variances are moderated: each is drawn toward their common value, and
more so if they differ little from each other (Smyth, 2004). A configuration that is noisier than
the others is drawn less, because too small a variance would make a verdict wrong. This is the
robust form of that method (Phipson et al., 2016). With two configurations, the result is the paired
t test.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Literal

import numpy as np

# Import from scipy.special, because an import of scipy.stats takes a second.
from scipy.special import digamma, fdtrc, polygamma, stdtr, stdtrit

SUPPORTED, NOT_SUPPORTED = "supported", "not supported"
INCONCLUSIVE, NOT_MEASURABLE = "inconclusive", "not measurable"
# Smallest relative difference that matters for the choice of a strategy.
SMALLEST_DIFFERENCE = 0.03
# Chance that any verdict of a report is wrong.
LEVEL = 0.05
# A difference is called detectable if this share of sweeps would show it.
POWER = 0.8
# Largest number of repeats that a report recommends.
MOST_BLOCKS = 1000
# Limits for calling a configuration noisier than the others. It is called so if chance alone has a
# probability below (SUSPECT[0] + SUSPECT[1] / configurations) / degrees of freedom. The values come
# from a simulation, see docs/dev/report_method.md. With larger values, a report finds fewer
# differences where noise is equal. With smaller ones, it states false differences where noise is
# not equal.
SUSPECT = (0.25, 3.5)
# How often the measurements are weighted again by the estimated noise. More rounds change little.
ROUNDS = 2

Array = np.ndarray

# Measured value: label of the configuration, repeat, value.
Row = tuple[str, object, float]

# Kind of numbers in which a comparison is stated: a ratio, a difference of proportions, or a
# difference in the unit of the measure.
Unit = Literal["ratio", "proportion", "number"]


@dataclass(frozen=True)
class Scale:
    """Transformation of a measure, such as a logarithm. In its methods, `level` is a transformed
    value, and `shift` is a difference of two transformed values.
    """

    name: str
    # Function that transforms a value. It returns NaN for a value without a transformed value.
    to: Callable[[float], float]
    # Function that converts a transformed value back to a value of the measure.
    back: Callable[[float], float]
    # True if results are stated as ratios, else as differences.
    is_ratio: bool = False
    lower_is_better: bool = False
    is_proportion: bool = False

    @property
    def sign(self) -> int:
        return -1 if self.lower_is_better else 1

    @property
    def unit(self) -> Unit:
        if self.is_ratio:
            return "ratio"
        return "proportion" if self.is_proportion else "number"

    @property
    def none(self) -> float:
        """Effect of two equal configurations: 1 if effects are ratios, 0 if they are
        differences.
        """
        return 1.0 if self.is_ratio else 0.0

    @property
    def in_units(self) -> Scale:
        """The scale of the untransformed values of the measure."""
        return replace(self, name="identity", to=float, back=float)

    def step(self, value: float, size: float) -> float:
        """Return how much the transformed value changes, as a positive number, if `value` changes
        by `size`.
        """
        shifts = (abs(self.to(value + change) - self.to(value)) for change in (size, -size))
        return next((shift for shift in shifts if math.isfinite(shift)), 0.0)

    def smallest_shift(self, level: float, share: float) -> float:
        """Return the smallest relevant improvement as a positive number: on the scale for a ratio,
        else in the unit of the measure.

        `level`: value before the change. `share`: smallest relevant improvement as a fraction of
        the value, or of the error rate if the measure is an accuracy. With 0.03, an accuracy of
        0.90 must reach 0.903, which is 3 % fewer errors.
        """
        if self.is_ratio:
            return math.log1p(share)
        return share * (
            1 - level if self.is_proportion and not self.lower_is_better else abs(level)
        )


def _log(value: float) -> float:
    return math.log(value) if 0 < value < math.inf else math.nan


def _exp(shift: float) -> float:
    # Avoid the OverflowError of math.exp, which wide intervals from few measurements would cause.
    return math.exp(shift) if shift < 700 else math.inf


def _arcsine(value: float) -> float:
    return math.asin(math.sqrt(value)) if 0 <= value <= 1 else math.nan


def _sine(angle: float) -> float:
    """Convert an arcsine of a square root back to a proportion. Angles outside of its range give 0
    or 1.
    """
    return math.sin(min(max(angle, 0.0), math.pi / 2)) ** 2


RATIO = Scale("ratio", _log, _exp, is_ratio=True)


def scale_of(
    values: Collection[float], lower_is_better: bool = False, is_proportion: bool = False
) -> Scale:
    """Return the scale for the values of a metric."""
    if is_proportion and all(0 <= value <= 1 for value in values):
        return Scale("arcsine", _arcsine, _sine, False, lower_is_better, is_proportion)
    # Use logarithms for a loss, because its spread grows with its value.
    if lower_is_better and min(values) > 0:
        return Scale("log", _log, _exp, lower_is_better=lower_is_better)
    return Scale("identity", float, float, lower_is_better=lower_is_better)


@dataclass(frozen=True)
class Estimate:
    """Estimated difference of the configurations `a` and `b` on a scale. For speed, this is log(a /
    b). The difference is None if it is unknown.
    """

    a: str
    b: str
    # Number of measurements of the two configurations in common repeats. The smaller number counts.
    n: int
    difference: float | None = None
    # Standard error of the estimated difference of two configurations.
    error: float = 0.0
    # Residual degrees of freedom of the model. 0 if the measurements do not show the noise.
    freedom: float = 0
    # Residual standard deviation of one measurement.
    noise: float = 0.0
    scale: Scale = RATIO
    # Mean of configuration b over the repeats, on the scale.
    level: float = 0.0
    # Smallest difference that the measure can have, such as the share of one image.
    rounding: float = 0.0
    # How much lower and how much higher the difference may be because of lost runs, which may have
    # been the worst or the best.
    slack: tuple[float, float] = (0.0, 0.0)
    # The same difference in the unit of the measure. None if the scale has that unit, or is one of
    # ratios, which are equal in any unit.
    plain: Estimate | None = None

    @property
    def in_units(self) -> Estimate:
        """The estimate that is printed: in the unit of the measure, or the logarithm of a ratio."""
        return self.plain or self

    def ends(self, level: float) -> tuple[float, float]:
        """Return the confidence interval of the difference with the error rate `level`. It allows
        for lost runs.
        """
        assert self.difference is not None
        reach = float(stdtrit(self.freedom, 1 - level / 2)) * self.error
        return self.difference - reach - self.slack[0], self.difference + reach + self.slack[1]

    @property
    def better(self) -> float:
        """Difference with the sign chosen so that it is positive if configuration a is better than
        b.
        """
        assert self.difference is not None
        return self.scale.sign * self.difference

    @property
    def p(self) -> float:
        """Two-sided p-value of the difference. At least one degree of freedom is needed."""
        assert self.difference is not None
        certain = max(self.difference - self.slack[0], -self.difference - self.slack[1], 0.0)
        if self.error == 0:
            return 0.0 if certain else 1.0
        return float(2 * stdtr(self.freedom, -certain / self.error))

    def is_shown_better(self, level: float) -> bool:
        """Return True if configuration a is shown to be better than b in a one-sided test at
        `level`. The difference must also be at least as large as the measure can show.
        """
        effect = self.in_units.difference or 0.0
        return self.better > 0 and self.p / 2 <= level and abs(effect) >= self.rounding


@dataclass(frozen=True)
class Contrast:
    """Ratio or difference of two configurations a and b, with its confidence interval and the
    verdict on the claim "a is better than b".
    """

    a: str
    b: str
    # A ratio or a difference, depending on the scale. None if it is unknown.
    effect: float | None
    # Ends of the confidence interval at the level that Holm's rule sets. None if the noise is
    # unknown.
    low: float | None
    high: float | None
    n: int
    verdict: str
    # Smallest difference that 80 of 100 such sweeps would show. For a ratio, 0.1 means 10 %.
    detectable: float | None = None
    # Number of repeats that an inconclusive comparison needs, if the estimate stays the same. None
    # if it is unknown.
    blocks_needed: int | None = None
    scale: Scale = RATIO

    @property
    def fields(self) -> dict[str, Any]:
        """Return the comparison of two configurations as an entry of report.json. The effect is
        named `ratio` or `difference`.
        """
        names = {"effect": "ratio" if self.scale.is_ratio else "difference"}
        values = {key: value for key, value in vars(self).items() if key != "scale"}
        return {names.get(key, key): value for key, value in values.items()} | {
            "unit": self.scale.unit
        }

    @property
    def interval(self) -> tuple[float, float]:
        """Confidence interval (low, high) of the effect, or (-inf, inf) if the noise is unknown."""
        return (
            (-math.inf, math.inf)
            if self.low is None or self.high is None
            else (self.low, self.high)
        )

    def exceeds(self, limit: float) -> str:
        """Return the verdict on the claim that configuration a reaches at least `limit` times the
        value of b.
        """
        if self.verdict == NOT_MEASURABLE:
            return NOT_MEASURABLE
        low, high = self.interval
        if low >= limit:
            return SUPPORTED
        return NOT_SUPPORTED if high < limit else INCONCLUSIVE


class Model:
    """Statistical model of measured values on a scale, value = configuration + block + noise. Pairs
    of configurations are compared with it.

    `equal_noise`: True if all configurations have the same noise. `rounding`: smallest difference
    that two values can have.
    """

    def __init__(
        self, rows: Sequence[Row], scale: Scale, equal_noise: bool = True, rounding: float = 0.0
    ) -> None:
        self.scale, self.rounding, self.total = scale, rounding, 0
        # The same model in the unit of the measure, for the intervals of a report.
        self.plain = (
            None
            if scale.is_ratio or scale == scale.in_units
            else Model(rows, scale.in_units, equal_noise, rounding)
        )
        # Ignore values that the scale cannot transform, such as values <= 0 on a scale of ratios.
        known = [
            (name, block, shift)
            for name, block, value in rows
            if math.isfinite(shift := scale.to(value))
        ]
        names, blocks = [name for name, *_ in known], [block for _, block, _ in known]
        # Label of a configuration -> its column of the design.
        self.points = {name: column for column, name in enumerate(dict.fromkeys(names))}
        self.counts = {name: Counter(b for n, b, _ in known if n == name) for name in self.points}
        if not known:
            return
        self.design = np.hstack([_indicators(names), _indicators(blocks)])
        self.of_point = self.design[:, : len(self.points)]
        values = np.array([value for *_, value in known])
        self.middle = float(values.mean())
        smallest = scale.step(scale.back(self.middle), rounding) ** 2 / 12 if rounding else 0.0
        # Variance of the noise of each configuration.
        self.variances = np.ones(len(self.points))
        for _ in range(1 if equal_noise else 1 + ROUNDS):
            # Give little weight to a noisy configuration, because it says little about the
            # differences between blocks.
            least = self.variances.max() * 1e-6
            self.weights = self.of_point @ (1 / np.maximum(self.variances, least))
            self.weights /= self.weights.max()
            fitted = self._fit(values - self.middle)
            self.variances, self.freedoms = _moderated(*fitted, smallest, equal_noise)
            if not self.variances.any():
                return

    def _fit(self, values: Array) -> tuple[Array, Array]:
        """Fit the model to the values by weighted least squares. Return for each configuration the
        variance of its noise, which is 0 if the values do not show it, and its residual degrees of
        freedom, whose sum is that of all values.
        """
        weighted = self.design * self.weights[:, None]
        self.information = self.design.T @ weighted
        self.inverse = np.linalg.pinv(self.information, hermitian=True, rcond=1e-9)
        self.effects = self.inverse @ weighted.T @ values
        leverages = ((weighted @ self.inverse) * self.design).sum(axis=1)
        freedoms = (1 - leverages) @ self.of_point
        # A configuration shows no noise if it has a single value, or is alone in all of its blocks.
        freedoms[freedoms < 1e-6] = 0.0
        self.total = round(float(freedoms.sum()))
        squares = (values - self.design @ self.effects) ** 2 @ self.of_point
        zeros = np.zeros_like(squares)
        return np.divide(squares, freedoms, out=zeros, where=freedoms > 0), freedoms

    def compare(self, a: str, b: str) -> Estimate:
        """Estimate the difference of the configurations a and b on the scale, after removing the
        differences between blocks.
        """
        if a not in self.points or b not in self.points:
            return Estimate(a, b, 0)
        n = (self.counts[a] & self.counts[b]).total()
        contrast = np.zeros(self.design.shape[1])
        contrast[self.points[a]] += 1
        # Add and subtract, because a and b have the same column if a configuration is compared with
        # itself.
        contrast[self.points[b]] -= 1
        solution = self.inverse @ contrast
        # The difference is unknown if no block ran both configurations, and no chain of blocks with
        # other configurations connects them.
        if np.abs(self.information @ solution - contrast).max() > 1e-6:
            return Estimate(a, b, n)
        of_row = (self.design @ solution) * self.weights
        parts = self.variances * (of_row**2 @ self.of_point)
        variance, freedom = float(parts.sum()), float(self.total)
        if variance and self.total:
            # Degrees of freedom of a sum of variances that have different degrees of freedom
            # (Satterthwaite, 1946).
            freedom = min(
                freedom, variance**2 / float((parts**2 / np.maximum(self.freedoms, 1e-9)).sum())
            )
        noise = math.sqrt(variance / float(of_row @ of_row)) if variance else 0.0
        of_blocks = self.effects[len(self.points) :]
        level = self.middle + float(self.effects[self.points[b]] + of_blocks.mean())
        difference, error = float(contrast @ self.effects), math.sqrt(variance)
        # Equal values differ by the rounding of floating-point numbers only.
        if abs(difference) < 1e-12 * max(abs(self.middle), float(np.abs(self.effects).max())):
            difference = 0.0
        return Estimate(
            a,
            b,
            n,
            difference,
            error,
            freedom,
            noise,
            self.scale,
            level,
            self.rounding,
            plain=self.plain.compare(a, b) if self.plain else None,
        )


def estimate(
    rows: Sequence[Row], pairs: Sequence[tuple[str, str]], scale: Scale = RATIO
) -> list[Estimate]:
    """Estimate the difference on a scale for each pair of configurations. All configurations are
    assumed to have equal noise.
    """
    model = Model(rows, scale)
    return [model.compare(a, b) for a, b in pairs]


def _indicators(column: Sequence[object]) -> Array:
    """Return a matrix with a column for each distinct entry, which is 1 in the rows of the entry
    and else 0.
    """
    distinct = list(dict.fromkeys(column))
    return np.array([[float(entry == other) for other in distinct] for entry in column])


def _moderated(
    variances: Array, freedoms: Array, smallest: float, equal_noise: bool
) -> tuple[Array, Array]:
    """Return (variance of the noise, degrees of freedom) of each configuration. Variances from few
    values are drawn toward their common value, and none is below `smallest`.
    """
    total, shown = round(float(freedoms.sum())), freedoms > 0
    if not total:
        return np.full(len(freedoms), smallest), freedoms
    pooled = max(float(variances @ freedoms) / total, smallest)
    if equal_noise or not pooled:
        return np.full(len(freedoms), pooled), np.full(len(freedoms), float(total))
    variances = np.maximum(variances, max(smallest, pooled * 1e-9))
    common, prior = _common_variance(variances[shown], freedoms[shown], pooled, total)
    # Compare the variance of each configuration with that of the others, not with its own.
    rest = np.maximum(total - freedoms, 1e-9)
    others = np.maximum((total * pooled - freedoms * variances) / rest, smallest)
    tail = fdtrc(np.maximum(freedoms, 1e-9), rest, variances / np.minimum(others, common))
    # Call a noisy configuration suspect sooner if there are few repeats or few other
    # configurations, because its noise is then less conspicuous.
    suspect = SUSPECT[0] + SUSPECT[1] / len(freedoms)
    drawn = np.minimum(prior, rest) * np.where(
        shown, np.minimum(1.0, tail * freedoms / suspect), 1.0
    )
    both = drawn + freedoms
    return (drawn * common + freedoms * variances) / both, both


def _common_variance(
    variances: Array, freedoms: Array, pooled: float, total: int
) -> tuple[float, float]:
    """Estimate the common value toward which the variances of the configurations are drawn, and its
    degrees of freedom.

    `pooled`, `total`: pooled variance and its degrees of freedom. They are returned if the
    variances differ only by chance.
    """
    logs = np.log(variances) - digamma(freedoms / 2) + np.log(freedoms / 2)
    excess = float(logs.var(ddof=1) - polygamma(1, freedoms / 2).mean()) if len(logs) > 1 else 0.0
    if excess <= 0:
        return pooled, float(total)
    # Solve trigamma(half) = excess by Newton's method.
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
    """Turn the estimated differences of pairs of configurations into effects, confidence intervals
    and verdicts. The chance that any of the verdicts is wrong is at most `level`.

    Holm's rule: compare the smallest of m p-values with level / m, the next with level / (m - 1),
    and so on, until a p-value is too large. Test all remaining pairs at the level of that p-value.
    Each interval has the level of its test, so that interval and verdict agree.
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
    unit, scale = e.in_units, e.scale
    if e.difference is None or unit.difference is None:
        return Contrast(e.a, e.b, None, None, None, e.n, NOT_MEASURABLE, scale=scale)
    back = unit.scale.back
    effect = back(unit.difference)
    if not e.freedom or not unit.freedom or not level:
        return Contrast(e.a, e.b, effect, None, None, e.n, INCONCLUSIVE, scale=scale)
    low, high = map(back, unit.ends(level))
    if e.plain is not None:
        # The scale decides if the difference is certain, because its noise is about equal.
        shares = [end / e.difference if e.difference else 0.0 for end in e.ends(level)]
        low = _with_sign_of(e.ends(level)[0], low, effect * shares[0])
        high = -_with_sign_of(-e.ends(level)[1], -high, -effect * shares[1])
    # Extend the interval to the smallest difference that the measure can show, such as one image.
    low, high = min(low, effect - e.rounding), max(high, effect + e.rounding)
    if scale.is_proportion:
        low, high = max(low, -1.0), min(high, 1.0)
    power = float(stdtrit(unit.freedom, 1 - level / 2) + stdtrit(unit.freedom, POWER)) * unit.error
    detectable = back(power + max(unit.slack)) - scale.none
    smallest = unit.scale.smallest_shift(unit.level, share)
    least, most = sorted(scale.sign * (end - scale.none) for end in (low, high))
    if most < back(smallest) - scale.none:
        verdict = NOT_SUPPORTED
    elif least > 0:
        verdict = SUPPORTED
    else:
        verdict = INCONCLUSIVE
    needed = _blocks_needed(unit, level, smallest) if verdict == INCONCLUSIVE else None
    return Contrast(
        e.a, e.b, effect, low, high, e.n, verdict, max(detectable, e.rounding), needed, scale
    )


def _with_sign_of(on_scale: float, end: float, instead: float) -> float:
    """Return the lower end of an interval in the unit of the measure. It is positive only if the
    lower end on the scale is.

    `instead`: end that has the same relation to the estimate as on the scale, used if the signs of
    `on_scale` and `end` differ.
    """
    if (on_scale > 0) == (end > 0):
        return end
    return instead if on_scale > 0 else min(instead, 0.0)


def _blocks_needed(e: Estimate, level: float, smallest: float) -> int | None:
    """Return the number of repeats that would give a verdict if the estimate stayed the same.
    Return None if that takes more than MOST_BLOCKS repeats, or if lost runs prevent a verdict.
    """
    margin = max(e.better, smallest - e.better) - max(e.slack)
    if margin <= 0:
        return None
    blocks = np.arange(e.n + 1, MOST_BLOCKS + 1)
    freedom = np.maximum(1.0, (blocks - 1) * (e.freedom / max(e.n - 1, 1)))
    reach = stdtrit(freedom, 1 - level / 2) + stdtrit(freedom, POWER)
    enough = blocks[2 * (reach * e.noise / margin) ** 2 <= blocks]
    return int(enough[0]) if enough.size else None


def mean_interval(
    values: Iterable[float], scale: Scale, rounding: float = 0.0, level: float = LEVEL
) -> tuple[float, float] | None:
    """Return the confidence interval of the mean of `values` with the error rate `level`, by
    Student's t on a scale such as the logarithm. Return None for fewer than two values.

    `rounding`: smallest difference that the measure can show. The interval extends at least that
    far below and above the mean, but not beyond 0 and 1 if the values are proportions.
    """
    shifts = np.array([scale.to(value) for value in values])
    if len(shifts) < 2:
        return None
    middle = float(shifts.mean())
    reach = float(stdtrit(len(shifts) - 1, 1 - level / 2) * shifts.std(ddof=1)) / math.sqrt(
        len(shifts)
    )
    mean = scale.back(middle)
    low = min(scale.back(middle - reach), mean - rounding)
    high = max(scale.back(middle + reach), mean + rounding)
    return (max(low, 0.0), min(high, 1.0)) if scale.is_proportion else (low, high)


def choose(
    rows: Sequence[Row],
    simplest_first: Sequence[str],
    smallest_difference: float = SMALLEST_DIFFERENCE,
) -> tuple[str, Contrast | None, list[str]] | None:
    """Choose the simplest configuration whose confidence interval shows that it is at most
    `smallest_difference` slower than the fastest one.

    `rows`: measured speeds. `simplest_first`: configurations from the simplest to the most complex
    one. Return (configuration, its comparison with the fastest one, other configurations). The
    comparison is None if the configuration is the fastest. The other configurations share no repeat
    with the fastest, so that they cannot be compared with it. Return None without rows.
    """
    # The rule "take the simplest configuration that is not shown to be slower" is not used here.
    # One disturbed run widens all intervals, and the rule would then choose too simple a
    # configuration.
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


def best(rows: Sequence[Row], scale: Scale) -> str | None:
    """Return the configuration with the best mean, after removing the differences between repeats.
    Return None without rows.
    """
    values: dict[str, dict[object, float]] = {}
    for name, block, value in rows:
        values.setdefault(name, {})[block] = scale.sign * scale.to(value)
    names = list(values)
    if all(of.keys() == values[names[0]].keys() for of in values.values()):
        return max(names, key=lambda name: sum(values[name].values()), default=None)
    # Leave out configurations that share no repeat with the first one, because they cannot be
    # compared.
    estimates = estimate(rows, [(name, names[0]) for name in names], scale)
    known = {e.a: e.better for e in estimates if e.difference is not None}
    return max(known, key=lambda name: known[name], default=None)


def corrected_values(rows: Sequence[Row], scale: Scale) -> dict[object, tuple[str, float]]:
    """For each repeat, choose the configuration that is best in all other repeats, and take its
    value in this repeat. Return a dictionary from repeat to (configuration, value), which is empty
    for a single repeat.

    The mean of these values estimates the value of the best configuration in new runs. The mean
    over the repeats that made the choice would be too good, because chance helped (Stone, 1974).
    """
    scores = {}
    for block in dict.fromkeys(block for _, block, _ in rows):
        here = {name: value for name, of, value in rows if of == block}
        chosen = best([row for row in rows if row[1] != block and row[0] in here], scale)
        if chosen is not None:
            scores[block] = chosen, here[chosen]
    return scores


@dataclass(frozen=True)
class Summary:
    """Median, minimum, maximum and number of repeated measurements, for the tables of a report.
    Verdicts are computed from the single measurements instead.
    """

    median: float
    low: float
    high: float
    count: int


def summarize(values: Iterable[float | None]) -> Summary | None:
    finite = [value for value in values if value is not None and math.isfinite(value)]
    return Summary(median(finite), min(finite), max(finite), len(finite)) if finite else None

"""Scales for statistical tests. A scale transforms the values of a measure so that their noise is
about equal for all configurations.

- Ratio: logarithm; the result is a ratio. For images/s, seconds and counts.
- Proportion: arcsine of the square root, which makes the variance of a binomial proportion equal
  near 0, 1/2 and 1 (Bartlett, 1947). The result is a difference of proportions.
- Level: logarithm for a positive measure whose spread grows with its value, such as a loss, else
  the value itself. The result is a difference in the unit of the measure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Literal

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

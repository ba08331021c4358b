"""Medians, ranges, and when two measurements may be ranked. Pure functions over numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from statistics import median

# With 3 repeats each, two ranges drawn from one and the same distribution lie apart in 10 % of cases; with 5, in 0.8 %.
FEWEST_REPEATS = 3


@dataclass(frozen=True)
class Summary:
    """Repeats of one measurement: their median, smallest, largest and number."""

    median: float
    low: float
    high: float
    count: int

    @property
    def spread(self) -> float | None:
        """(largest - smallest) / median; None where the median is 0."""
        return (self.high - self.low) / abs(self.median) if self.median else None


class Order(Enum):
    """How a first measurement stands to a second one."""

    HIGHER = "higher"
    LOWER = "lower"
    OVERLAP = "ranges overlap"
    TOO_FEW = "too few repeats"


def summarise(values: Iterable[float | None]) -> Summary | None:
    """None where nothing finite was measured: never a 0 in place of a missing number."""
    finite = [value for value in values if value is not None and math.isfinite(value)]
    if not finite:
        return None
    return Summary(median(finite), min(finite), max(finite), len(finite))


def ratio(first: Summary | None, second: Summary | None) -> Summary | None:
    """first / second of two positive measurements; the range holds the ratio of every pair of repeats."""
    if first is None or second is None or first.low < 0 or second.low <= 0:
        return None
    return Summary(
        first.median / second.median,
        first.low / second.high,
        first.high / second.low,
        min(first.count, second.count),
    )


def scaled(summary: Summary | None, factor: float) -> Summary | None:
    if summary is None:
        return None
    low, high = sorted((summary.low * factor, summary.high * factor))
    return Summary(summary.median * factor, low, high, summary.count)


def speed_up(speed: Summary | None, single: Summary | None) -> Summary | None:
    """Images/s over the images/s of one device. Holds for strong and for weak scaling, which differ in the batch."""
    return ratio(speed, single)


def efficiency(gain: Summary | None, devices: int) -> Summary | None:
    """Speed-up over the number of devices: 1 is linear."""
    return scaled(gain, 1 / devices)


def overlap(first: Summary, second: Summary) -> bool:
    """Ranges that only touch overlap too."""
    return first.low <= second.high and second.low <= first.high


def compare(first: Summary, second: Summary) -> Order:
    if min(first.count, second.count) < FEWEST_REPEATS:
        return Order.TOO_FEW
    if overlap(first, second):
        return Order.OVERLAP
    return Order.HIGHER if first.low > second.high else Order.LOWER


def compare_with(summary: Summary, limit: float) -> Order:
    """HIGHER when all repeats lie above `limit` or on it, LOWER when all lie below."""
    if summary.count < FEWEST_REPEATS:
        return Order.TOO_FEW
    if summary.low >= limit:
        return Order.HIGHER
    return Order.LOWER if summary.high < limit else Order.OVERLAP


def rank(summaries: Mapping[str, Summary]) -> list[list[str]]:
    """Names in tiers, highest first: tiers lie wholly apart, and within a tier overlaps forbid an order.

    Two names that do not overlap share a tier when a third one's range bridges them.
    """
    tiers: list[list[str]] = []
    floor = math.inf
    for name, summary in sorted(summaries.items(), key=lambda item: -item[1].high):
        if tiers and summary.high >= floor:
            tiers[-1].append(name)
            floor = min(floor, summary.low)
        else:
            tiers.append([name])
            floor = summary.low
    return [sorted(tier, key=lambda name: -summaries[name].median) for tier in tiers]


def figure(value: float) -> str:
    """A number as a person reads it: three digits, or all digits before the point."""
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    text = f"{value:#.3g}"
    return text if "e" not in text else f"{value:.1e}"


def with_range(summary: Summary, unit: str = "") -> str:
    """Median, unit and, where they differ in what is shown, (smallest–largest)."""
    low, high = figure(summary.low), figure(summary.high)
    return figure(summary.median) + unit + (f" ({low}–{high})" if low != high else "")

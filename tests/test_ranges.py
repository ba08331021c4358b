"""What the comparison may say of repeated measurements, for all numbers."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from src.engine.report.ranges import (
    Order,
    Summary,
    compare,
    compare_with,
    efficiency,
    overlap,
    rank,
    ratio,
    scaled,
    speed_up,
    summarise,
)

positive = st.floats(min_value=1e-3, max_value=1e6)
repeats = st.lists(positive, min_size=1, max_size=9)
enough = st.lists(positive, min_size=3, max_size=9)


def known(values: list[float]) -> Summary:
    summary = summarise(values)
    assert summary is not None
    return summary


def test_summary_of_three() -> None:
    assert summarise([3.0, 1.0, 2.0]) == Summary(2.0, 1.0, 3.0, 3)
    assert known([1.0, 2.0, 3.0]).spread == 1.0


def test_nothing_measured_is_none_and_zero_is_a_measurement() -> None:
    assert summarise([None, math.nan, math.inf]) is None
    assert summarise([]) is None
    assert summarise([0.0, None]) == Summary(0.0, 0.0, 0.0, 1)
    assert known([0.0]).spread is None


@given(repeats, st.randoms())
def test_order_of_repeats_does_not_matter(values: list[float], random: object) -> None:
    assert summarise(values) == summarise(sorted(values))


@given(repeats)
def test_median_lies_in_the_range(values: list[float]) -> None:
    summary = known(values)
    assert summary.low <= summary.median <= summary.high


@given(repeats, repeats)
def test_ratio_holds_every_pair(first: list[float], second: list[float]) -> None:
    found = ratio(summarise(first), summarise(second))
    assert found is not None
    assert all(found.low <= a / b <= found.high for a in first for b in second)
    assert found.count == min(len(first), len(second))


def test_ratio_to_nothing_or_to_zero_is_none() -> None:
    one = Summary(1, 1, 1, 3)
    assert ratio(None, one) is None and ratio(one, None) is None
    assert ratio(one, Summary(0, 0, 1, 3)) is None


@given(repeats)
def test_speed_up_over_oneself_is_one(values: list[float]) -> None:
    found = speed_up(known(values), known(values))
    assert found is not None
    assert found.median == 1 and found.low <= 1 <= found.high


@given(repeats, st.integers(1, 1024))
def test_linear_scaling_has_efficiency_one(values: list[float], devices: int) -> None:
    found = efficiency(speed_up(scaled(known(values), devices), known(values)), devices)
    assert found is not None
    assert found.median == pytest.approx(1)


def test_article_example() -> None:
    found = efficiency(speed_up(Summary(320, 320, 320, 3), Summary(100, 100, 100, 3)), 4)
    assert found is not None
    assert found.median == pytest.approx(0.8)


@given(enough, enough)
def test_comparison_is_antisymmetric(first: list[float], second: list[float]) -> None:
    mirrored = {Order.HIGHER: Order.LOWER, Order.LOWER: Order.HIGHER, Order.OVERLAP: Order.OVERLAP}
    assert compare(known(second), known(first)) == mirrored[compare(known(first), known(second))]


@given(enough, enough)
def test_higher_means_every_repeat_is(first: list[float], second: list[float]) -> None:
    assert (compare(known(first), known(second)) is Order.HIGHER) == (min(first) > max(second))


@given(st.lists(positive, min_size=1, max_size=2), enough)
def test_too_few_repeats_are_never_ordered(few: list[float], many: list[float]) -> None:
    assert compare(known(few), known(many)) is Order.TOO_FEW
    assert compare(known(many), known(few)) is Order.TOO_FEW
    assert compare_with(known(few), 0) is Order.TOO_FEW


def test_touching_ranges_overlap() -> None:
    assert overlap(Summary(1, 0, 2, 3), Summary(3, 2, 4, 3))
    assert not overlap(Summary(1, 0, 2, 3), Summary(3, 2.001, 4, 3))


def test_comparison_with_a_limit() -> None:
    summary = Summary(1.0, 0.9, 1.1, 3)
    assert compare_with(summary, 0.9) is Order.HIGHER
    assert compare_with(summary, 1.0) is Order.OVERLAP
    assert compare_with(summary, 1.2) is Order.LOWER


@given(st.dictionaries(st.text(min_size=1, max_size=3), enough, max_size=8))
def test_tiers_lie_apart_and_keep_everyone(measured: dict[str, list[float]]) -> None:
    summaries = {name: known(values) for name, values in measured.items()}
    tiers = rank(summaries)
    assert sorted(name for tier in tiers for name in tier) == sorted(summaries)
    for above, below in pairwise(tiers):
        assert min(summaries[name].low for name in above) > max(summaries[name].high for name in below)
    for tier in tiers:
        medians = [summaries[name].median for name in tier]
        assert medians == sorted(medians, reverse=True)
        if len(tier) > 1:
            assert all(
                any(overlap(summaries[name], summaries[other]) for other in tier if other != name) for name in tier
            )

"""Ratios, intervals and verdicts of repeated measurements, against textbook formulas, by hand, and by simulation."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from src.engine.report.statistics import (
    FAILS,
    HOLDS,
    LEVEL,
    UNDECIDED,
    UNMEASURED,
    Estimate,
    choose,
    decide,
    estimate,
    summarise,
)
from src.engine.report.wording import doubt, figure, times

pytestmark = pytest.mark.portable

Row = tuple[str, object, float]


def table(values: dict[str, list[float]]) -> list[Row]:
    """Complete blocks: the n-th value of every point is of block n."""
    return [(name, block, value) for name, column in values.items() for block, value in enumerate(column)]


def noisy(points: dict[str, float], blocks: int, seed: int, noise: float = 0.05) -> list[Row]:
    draw = np.random.default_rng(seed)
    return [
        (name, block, speed * math.exp(noise * draw.standard_normal()))
        for block in range(blocks)
        for name, speed in points.items()
    ]


def test_two_points_in_blocks_are_a_paired_t_test() -> None:
    rows = noisy({"a": 110, "b": 100}, 6, seed=1)
    a, b = ([math.log(row[2]) for row in rows if row[0] == name] for name in "ab")
    expected = stats.ttest_rel(a, b).confidence_interval(1 - LEVEL)
    [found] = decide(estimate(rows, [("a", "b")]))
    assert (found.low, found.high) == pytest.approx((math.exp(expected.low), math.exp(expected.high)))
    assert found.ratio == pytest.approx(math.exp(np.mean(a) - np.mean(b)))


def test_without_blocks_it_is_an_unpaired_t_test() -> None:
    rows = [(name, "all", value) for name, _, value in noisy({"a": 110, "b": 100}, 6, seed=2)]
    a, b = ([math.log(row[2]) for row in rows if row[0] == name] for name in "ab")
    expected = stats.ttest_ind(a, b).confidence_interval(1 - LEVEL)
    [found] = decide(estimate(rows, [("a", "b")]))
    assert (found.low, found.high) == pytest.approx((math.exp(expected.low), math.exp(expected.high)))


@given(st.integers(0, 10_000))
def test_blocks_with_missing_and_doubled_points_agree_with_least_squares(seed: int) -> None:
    draw = np.random.default_rng(seed)
    full = noisy({"a": 110, "b": 100, "c": 90}, 5, seed)
    rows = [row for row in full for _ in range(draw.choice([0, 1, 1, 2]))]
    rows = [(name, block, value * draw.uniform(0.9, 1.1)) for name, block, value in rows]
    design = np.array([[r[0] == p for p in "abc"] + [r[1] == b for b in range(5)] for r in rows], dtype=float)
    if len(rows) < 9 or np.linalg.matrix_rank(design) < 7:
        return
    y = np.log([row[2] for row in rows])
    fitted, *_ = np.linalg.lstsq(design, y, rcond=None)
    freedom = len(rows) - 7
    noise = math.sqrt(float(((y - design @ fitted) ** 2).sum()) / freedom)
    weights = np.array([1.0, 0, -1, 0, 0, 0, 0, 0])
    [found] = estimate(rows, [("a", "c")])
    assert found.freedom == freedom
    assert found.difference == pytest.approx(fitted[0] - fitted[2])
    assert found.error == pytest.approx(noise * math.sqrt(weights @ np.linalg.pinv(design.T @ design) @ weights))


def test_block_effects_are_taken_out() -> None:
    speeds = {"a": [110, 55, 221], "b": [100, 50.4, 200]}  # blocks differ fourfold, the ratio hardly
    [found] = decide(estimate(table(speeds), [("a", "b")]))
    assert found.verdict == HOLDS and found.low is not None and found.low > 1.08


@given(st.integers(0, 10_000))
def test_the_reverse_pair_says_the_reverse(seed: int) -> None:
    rows = noisy({"a": 103, "b": 100, "c": 99}, 3, seed)
    [one], [other] = decide(estimate(rows, [("a", "b")])), decide(estimate(rows, [("b", "a")]))
    assert one.low and one.high and one.ratio
    assert (other.low, other.ratio, other.high) == pytest.approx((1 / one.high, 1 / one.ratio, 1 / one.low))


def test_the_four_words() -> None:
    steady = table({"a": [110, 111, 109], "b": [100, 101, 99.5], "c": [100.2, 100.6, 99.8]})
    verdicts = [c.verdict for c in decide(estimate(steady, [("a", "b"), ("b", "a"), ("c", "b"), ("a", "d")]))]
    assert verdicts == [HOLDS, FAILS, FAILS, UNMEASURED]
    shaky = table({"a": [110, 90, 115], "b": [100, 105, 85]})
    [found] = decide(estimate(shaky, [("a", "b")]))
    assert found.verdict == UNDECIDED
    assert found.detectable and found.detectable > 0.1
    assert found.blocks_needed and found.blocks_needed > 3


def test_a_difference_too_small_to_matter_does_not_hold() -> None:
    small = estimate(table({"a": [101.0, 101.01, 101.0], "b": [100.0, 100.01, 100.01]}), [("a", "b")])
    [found] = decide(small)
    assert found.low and found.low > 1 and found.verdict == FAILS
    [found] = decide(small, 0.001)
    assert found.verdict == HOLDS


def test_one_block_shows_no_noise_and_decides_nothing() -> None:
    [found] = decide(estimate(table({"a": [190], "b": [100]}), [("a", "b")]))
    assert (found.verdict, found.low, found.detectable) == (UNDECIDED, None, None)
    assert found.ratio == pytest.approx(1.9)


def test_an_interval_as_wide_as_numbers_go_is_still_one() -> None:
    """Two blocks and a large family: the quantile of t is in the thousands, and its exponential has no end."""
    [found] = decide(estimate(table({"a": [100.0, 150.0], "b": [100.0, 80.0]}), [("a", "b")]), level=1e-5)
    assert (found.low, found.high, found.detectable) == (0.0, math.inf, math.inf)
    assert found.verdict == UNDECIDED
    assert "0.00 to inf" not in times(found) and "inf %" not in doubt(found)


@pytest.mark.parametrize(("value", "text"), [(99.96, "100"), (99.94, "99.9"), (0.05, "0.0500"), (1234.5, "1,234")])
def test_figures_have_three_digits(value: float, text: str) -> None:
    assert figure(value) == text


def test_points_of_blocks_that_never_meet_are_not_compared() -> None:
    rows: list[Row] = [("a", 0, 100.0), ("a", 0, 101.0), ("b", 1, 200.0), ("b", 1, 201.0)]
    [found] = decide(estimate(rows, [("a", "b")]))
    assert (found.verdict, found.ratio) == (UNMEASURED, None)


def test_holm_by_hand() -> None:
    def one(p: float) -> Estimate:
        return Estimate("a", "b", 11, float(stats.t.isf(p / 2, 10)), 1.0, 10, 1.0)

    def excluded(*ps: float) -> list[bool]:
        return [c.low is not None and c.low > 1 for c in decide([one(p) for p in ps])]

    assert excluded(0.04) == [True]
    assert excluded(0.04, 0.03) == [False, False]  # Bonferroni's first step fails: nothing is stated
    assert excluded(0.04, 0.024) == [True, True]  # it passes: the next is held against the whole level
    assert excluded(0.03, 0.016, 0.2) == [False, True, False]


@pytest.mark.parametrize("values", [[math.nan, 1.0], [0.0, 1.0], [-1.0, 1.0], []])
def test_what_has_no_logarithm_is_left_out(values: list[float]) -> None:
    rows = [*table({"a": values}), *table({"b": [1.0, 2.0]})]
    [found] = estimate(rows, [("a", "b")])
    assert found.n == sum(value > 0 for value in values)


def test_more_blocks_as_advised_decide() -> None:
    """The advice is about right: of sweeps with as many blocks as advised, about 80 % decide (here, 60 of 100 at least)."""
    [first] = decide(estimate(noisy({"a": 105, "b": 100, "c": 100}, 4, seed=5), [("a", "b")]))
    needed = first.blocks_needed
    assert first.verdict == UNDECIDED and needed is not None and first.ratio is not None
    found = [
        decide(estimate(noisy({"a": 100 * first.ratio, "b": 100, "c": 100}, needed, seed), [("a", "b")]))[0].verdict
        for seed in range(100)
    ]
    assert sum(verdict != UNDECIDED for verdict in found) >= 60


def test_the_highest_leads_unless_a_simpler_one_is_shown_to_be_as_fast() -> None:
    def lead(**speeds: Any) -> str:
        found = choose(table(speeds), ["single", "dp", "ddp"])
        assert found is not None
        return found[0]

    assert lead(single=[1000, 1010, 990], dp=[1500, 1500, 1490], ddp=[1900, 1910, 1920]) == "ddp"
    assert lead(single=[1000, 1000.5, 999], dp=[1001, 1001, 1000.5], ddp=[1004, 1004, 1003.5]) == "single"
    assert lead(single=[1000, 800, 1200], dp=[1500, 1200, 1800], ddp=[1506, 1203, 1807]) == "dp"
    assert lead(single=[1000, 1000, 1000], dp=[1500, 1500, 1500], ddp=[1900, 1910, 980]) == "ddp"  # one slow repeat
    assert (
        lead(single=[1000, 1010, 990], dp=[800, 806, 799], ddp=[500, 505, 499]) == "single"
    )  # the simplest is highest
    assert choose([], ["single"]) is None


def test_nothing_measured_is_none_and_zero_is_a_measurement() -> None:
    assert summarise([None, math.nan, math.inf]) is None
    found = summarise([0.0, None])
    assert found is not None and (found.median, found.low, found.high, found.count) == (0.0, 0.0, 0.0, 1)

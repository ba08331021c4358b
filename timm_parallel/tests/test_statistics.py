"""Test ratios, intervals and verdicts against textbook formulas, manual calculations and
simulations.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from timm_parallel.lab.analysis.headline import Finding
from timm_parallel.lab.analysis.statistics import (
    INCONCLUSIVE,
    LEVEL,
    NOT_MEASURABLE,
    NOT_SUPPORTED,
    SUPPORTED,
    Estimate,
    choose,
    decide,
    estimate,
    summarize,
)
from timm_parallel.lab.report.sentences import effect_text, figure, sentence

pytestmark = pytest.mark.portable

Row = tuple[str, object, float]


def table(values: dict[str, list[float]]) -> list[Row]:
    """Build rows (configuration, repeat, value). The n-th value of every configuration belongs
    to repeat n.
    """
    return [
        (name, block, value)
        for name, column in values.items()
        for block, value in enumerate(column)
    ]


def noisy(points: dict[str, float], blocks: int, seed: int, noise: float = 0.05) -> list[Row]:
    draw = np.random.default_rng(seed)
    return [
        (name, block, speed * math.exp(noise * draw.standard_normal()))
        for block in range(blocks)
        for name, speed in points.items()
    ]


@pytest.mark.parametrize(
    ("in_repeats", "textbook"), [(True, stats.ttest_rel), (False, stats.ttest_ind)]
)
def test_interval_of_a_speed_ratio_equals_the_paired_or_the_unpaired_t_test(
    in_repeats: bool, textbook: Any
) -> None:
    noise = noisy({"a": 110, "b": 100}, 6, seed=1)
    rows = [(name, block if in_repeats else "all", value) for name, block, value in noise]
    a, b = ([math.log(row[2]) for row in rows if row[0] == name] for name in "ab")
    ends = textbook(a, b).confidence_interval(1 - LEVEL)
    [result] = decide(estimate(rows, [("a", "b")]))
    assert (result.low, result.high) == pytest.approx((math.exp(ends.low), math.exp(ends.high)))
    assert result.effect == pytest.approx(math.exp(np.mean(a) - np.mean(b)))


@given(st.integers(0, 10_000))
def test_log_speed_difference_from_incomplete_repeats_equals_the_least_squares_estimate(
    seed: int,
) -> None:
    draw = np.random.default_rng(seed)
    full = noisy({"a": 110, "b": 100, "c": 90}, 5, seed)
    rows = [row for row in full for _ in range(draw.choice([0, 1, 1, 2]))]
    rows = [(name, block, value * draw.uniform(0.9, 1.1)) for name, block, value in rows]
    design = np.array(
        [[r[0] == p for p in "abc"] + [r[1] == b for b in range(5)] for r in rows], dtype=float
    )
    if len(rows) < 9 or np.linalg.matrix_rank(design) < 7:
        return
    y = np.log([row[2] for row in rows])
    fitted, *_ = np.linalg.lstsq(design, y, rcond=None)
    freedom = len(rows) - 7
    noise = math.sqrt(float(((y - design @ fitted) ** 2).sum()) / freedom)
    weights = np.array([1.0, 0, -1, 0, 0, 0, 0, 0])
    [result] = estimate(rows, [("a", "c")])
    assert result.freedom == freedom
    assert result.difference == pytest.approx(fitted[0] - fitted[2])
    assert result.error == pytest.approx(
        noise * math.sqrt(weights @ np.linalg.pinv(design.T @ design) @ weights)
    )


def test_speed_ratio_is_supported_when_speeds_vary_fourfold_but_the_ratio_is_stable() -> None:
    # The speeds of the repeats differ by a factor of four, but the ratio of a to b hardly changes.
    speeds: dict[str, list[float]] = {
        "a": [110, 55, 221],
        "b": [100, 50.4, 200],
    }
    [result] = decide(estimate(table(speeds), [("a", "b")]))
    assert result.verdict == SUPPORTED and result.low is not None and result.low > 1.08


@given(st.integers(0, 10_000))
def test_speed_ratio_of_b_to_a_has_the_reciprocal_interval_of_a_to_b(seed: int) -> None:
    rows = noisy({"a": 103, "b": 100, "c": 99}, 3, seed)
    [one], [other] = decide(estimate(rows, [("a", "b")])), decide(estimate(rows, [("b", "a")]))
    assert one.low and one.high and one.effect
    assert (other.low, other.effect, other.high) == pytest.approx(
        (1 / one.high, 1 / one.effect, 1 / one.low)
    )


def test_speed_ratio_verdict_is_supported_not_supported_inconclusive_or_not_measurable() -> None:
    steady = table({"a": [110, 111, 109], "b": [100, 101, 99.5], "c": [100.2, 100.6, 99.8]})
    verdicts = [
        c.verdict
        for c in decide(estimate(steady, [("a", "b"), ("b", "a"), ("c", "b"), ("a", "d")]))
    ]
    assert verdicts == [SUPPORTED, NOT_SUPPORTED, NOT_SUPPORTED, NOT_MEASURABLE]
    shaky = table({"a": [110, 90, 115], "b": [100, 105, 85]})
    [result] = decide(estimate(shaky, [("a", "b")]))
    assert result.verdict == INCONCLUSIVE
    assert result.detectable and result.detectable > 0.1
    assert result.blocks_needed and result.blocks_needed > 3


def test_speed_ratio_is_inconclusive_when_its_confidence_interval_overflows() -> None:
    """With two repeats and many comparisons, the t quantile is in the thousands. Its exponential
    overflows a float.
    """
    [result] = decide(
        estimate(table({"a": [100.0, 150.0], "b": [100.0, 80.0]}), [("a", "b")]), level=1e-5
    )
    assert (result.low, result.high, result.detectable) == (0.0, math.inf, math.inf)
    assert result.verdict == INCONCLUSIVE
    text = effect_text(result) + sentence(Finding("pair", {"contrast": result.fields}))
    assert "0.00 to inf" not in text and "inf %" not in text


@pytest.mark.parametrize(
    ("value", "text"), [(99.96, "100"), (99.94, "99.9"), (0.05, "0.0500"), (1234.5, "1,234")]
)
def test_report_formats_a_number_with_three_significant_digits(value: float, text: str) -> None:
    assert figure(value) == text


def test_configurations_that_were_never_measured_in_the_same_repeat_have_no_speed_ratio() -> None:
    rows: list[Row] = [("a", 0, 100.0), ("a", 0, 101.0), ("b", 1, 200.0), ("b", 1, 201.0)]
    [result] = decide(estimate(rows, [("a", "b")]))
    assert (result.verdict, result.effect) == (NOT_MEASURABLE, None)


def test_holm_correction_of_several_comparisons_equals_a_manual_calculation() -> None:
    def one(p: float) -> Estimate:
        return Estimate("a", "b", 11, float(stats.t.isf(p / 2, 10)), 1.0, 10, 1.0)

    def excluded(*ps: float) -> list[bool]:
        return [c.low is not None and c.low > 1 for c in decide([one(p) for p in ps])]

    assert excluded(0.04) == [True]
    # Holm's method first compares the smaller p-value with 0.05 / 2. The value 0.03 is larger, so
    # the method states no difference.
    assert excluded(0.04, 0.03) == [
        False,
        False,
    ]
    # The smaller p-value 0.024 is below 0.05 / 2. Therefore Holm's method compares the other
    # p-value with 0.05.
    assert excluded(0.04, 0.024) == [
        True,
        True,
    ]
    assert excluded(0.03, 0.016, 0.2) == [False, True, False]


@pytest.mark.parametrize("values", [[math.nan, 1.0], [0.0, 1.0], [-1.0, 1.0], []])
def test_speed_ratio_estimate_ignores_nan_zero_and_negative_speeds(values: list[float]) -> None:
    rows = [*table({"a": values}), *table({"b": [1.0, 2.0]})]
    [result] = estimate(rows, [("a", "b")])
    assert result.n == sum(value > 0 for value in values)


def test_sweep_with_the_recommended_repeats_reaches_a_verdict_in_60_of_100_simulations() -> None:
    """About 80 % of sweeps with the recommended number of repeats reach a verdict. The test
    requires 60 of 100, so that chance practically never fails it.
    """
    [first] = decide(estimate(noisy({"a": 105, "b": 100, "c": 100}, 4, seed=5), [("a", "b")]))
    needed = first.blocks_needed
    assert first.verdict == INCONCLUSIVE and needed is not None and first.effect is not None
    result = [
        decide(
            estimate(
                noisy({"a": 100 * first.effect, "b": 100, "c": 100}, needed, seed), [("a", "b")]
            )
        )[0].verdict
        for seed in range(100)
    ]
    assert sum(verdict != INCONCLUSIVE for verdict in result) >= 60


def test_fastest_strategy_is_recommended_unless_a_simpler_strategy_is_about_as_fast() -> None:
    def lead(**speeds: Any) -> str:
        result = choose(table(speeds), ["single", "dp", "ddp"])
        assert result is not None
        return result[0]

    assert lead(single=[1000, 1010, 990], dp=[1500, 1500, 1490], ddp=[1900, 1910, 1920]) == "ddp"
    assert (
        lead(single=[1000, 1000.5, 999], dp=[1001, 1001, 1000.5], ddp=[1004, 1004, 1003.5])
        == "single"
    )
    assert lead(single=[1000, 800, 1200], dp=[1500, 1200, 1800], ddp=[1506, 1203, 1807]) == "dp"
    # One slow repeat of ddp must not change the recommendation.
    assert lead(single=[1000, 1000, 1000], dp=[1500, 1500, 1500], ddp=[1900, 1910, 980]) == "ddp"
    # Here the simplest strategy is also the fastest.
    assert lead(single=[1000, 1010, 990], dp=[800, 806, 799], ddp=[500, 505, 499]) == "single"
    assert choose([], ["single"]) is None


def test_summary_of_repeated_values_is_none_without_finite_values_and_includes_zeros() -> None:
    assert summarize([None, math.nan, math.inf]) is None
    result = summarize([0.0, None])
    assert result is not None and (result.median, result.low, result.high, result.count) == (
        0.0,
        0.0,
        0.0,
        1,
    )

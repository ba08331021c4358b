"""Test ratios, intervals and verdicts against textbook formulas, manual calculations and
simulations with known speeds, whose settings are those of scripts/maintain/simulate_sweeps.py.

`python timm_parallel/tests/test_statistics.py` prints the table of docs/dev/report_method.md.
"""

from __future__ import annotations

import math
from functools import cache
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
    Summary,
    choose,
    decide,
    estimate,
    mean_interval,
    scale_of,
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


@pytest.mark.parametrize(("values", "end"), [([0.94, 1, 1], 1), ([0, 0, 0.06], 0)])
def test_interval_of_a_mean_proportion_ends_at_0_or_1(values: list[float], end: int) -> None:
    # The difference that two images make would reach further.
    ends = mean_interval(values, scale_of(values, is_proportion=True), rounding=2 / 30)
    assert ends is not None and ends[end] == end and 0 <= ends[0] < ends[1] <= 1


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
    assert excluded(0.04, 0.03) == [False, False]
    # The smaller p-value 0.024 is below 0.05 / 2. Therefore Holm's method compares the other
    # p-value with 0.05.
    assert excluded(0.04, 0.024) == [True, True]
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
    assert summarize([0.0, None]) == Summary(0.0, 0.0, 0.0, 1)


Key = tuple[str, int]
NOISE, DRIFT, SLOW_SHARE = 0.05, 0.10, 0.05
SWEEPS, BLOCKS = 2000, (3, 5, 8, 10, 20)
THREE: tuple[Key, ...] = (("single", 1), ("dp", 2), ("ddp", 2))
SEVEN: tuple[Key, ...] = (("single", 1), *((s, n) for s in ("dp", "ddp") for n in (2, 4, 8)))
AGAINST_SINGLE = {points: [(p, points[0]) for p in points[1:]] for points in (THREE, SEVEN)}
# A simulated sweep of 3 configurations has 2 comparisons, one of 7 configurations has 9. With 3
# configurations, the comparison of ddp with dp is left out.
PAIRS = {
    THREE: AGAINST_SINGLE[THREE],
    SEVEN: AGAINST_SINGLE[SEVEN] + [(("ddp", n), ("dp", n)) for n in (2, 4, 8)],
}


def sweep_of(
    speeds: dict[Key, float], blocks: int, drift: float, draw: np.random.Generator, slow: float = 0
) -> list[Row]:
    """Simulate runs, in random order within each repeat. `slow` is the fraction of runs at half
    speed.
    """
    points = list(speeds)
    noise = draw.standard_normal((blocks, len(points))) * NOISE
    halved = draw.random((blocks, len(points))) < slow
    total, rows = blocks * len(points), list[Row]()
    for block in range(blocks):
        for place in draw.permutation(len(points)):
            change = (
                noise[block, place] - drift * len(rows) / total - halved[block, place] * np.log(2)
            )
            speed = speeds[points[place]] * float(np.exp(change))
            rows.append((name_of(points[place]), block, speed))
    return rows


def name_of(point: Key) -> str:
    return f"{point[0]} × {point[1]}"


def names(pairs: list[tuple[Key, Key]]) -> list[tuple[str, str]]:
    return [(name_of(a), name_of(b)) for a, b in pairs]


@cache
def stated_wrongly(
    points: tuple[Key, ...], blocks: int, drift: float, sweeps: int = SWEEPS
) -> float:
    """Compute the fraction of simulated sweeps in which the report states a difference although
    all speeds are equal.
    """
    draw, pairs, wrong = np.random.default_rng([1, len(points), blocks]), names(PAIRS[points]), 0
    for _ in range(sweeps):
        rows = sweep_of(dict.fromkeys(points, 1000.0), blocks, drift, draw)
        results = decide(estimate(rows, pairs))
        wrong += any(
            c.low is not None and c.high is not None and not c.low <= 1 <= c.high for c in results
        )
    return wrong / sweeps


@cache
def found_of_a_tenth(
    points: tuple[Key, ...], blocks: int, drift: float, sweeps: int = SWEEPS
) -> float:
    """Compute the fraction of true differences of 10 % that the report states."""
    draw, pairs = np.random.default_rng([2, len(points), blocks]), names(PAIRS[points])
    faster = points[1:] if points == SEVEN else points[2:]
    speeds = {point: 1100.0 if point in faster else 1000.0 for point in points}
    differ = [place for place, (a, b) in enumerate(PAIRS[points]) if speeds[a] > speeds[b]]
    results = 0
    for _ in range(sweeps):
        decided = decide(estimate(sweep_of(speeds, blocks, drift, draw), pairs))
        results += sum(decided[place].verdict == SUPPORTED for place in differ)
    return results / sweeps / len(differ)


@cache
def badly_led(blocks: int, drift: float, sweeps: int = SWEEPS) -> float:
    """Compute the fraction of simulated sweeps in which the report does not recommend the
    fastest configuration. 5 % of the runs have half speed.
    """
    draw, wrong = np.random.default_rng([3, blocks]), 0
    speeds: dict[Key, float] = dict(zip(THREE, (1000.0, 1250.0, 1900.0), strict=True))
    for _ in range(sweeps):
        rows = sweep_of(speeds, blocks, drift, draw, SLOW_SHARE)
        led = choose(rows, [name_of(point) for point in THREE])
        wrong += led is None or led[0] != "ddp × 2"
    return wrong / sweeps


@pytest.mark.slow(seconds=1)
@pytest.mark.parametrize("points", [THREE, SEVEN], ids=["3 points", "7 points"])
def test_speed_verdicts_have_expected_error_rate_and_power_in_a_small_simulation(
    points: tuple[Key, ...],
) -> None:
    assert stated_wrongly(points, 5, DRIFT, 200) <= 0.1
    assert found_of_a_tenth(points, 5, DRIFT, 200) > 0.4
    assert found_of_a_tenth(points, 10, DRIFT, 200) > 0.85
    assert badly_led(3, DRIFT, 200) <= 0.03


if __name__ == "__main__":
    print(
        "| blocks | "
        + " | ".join(f"{words}, {n} points" for n in (3, 7) for words in ("wrong", "results"))
        + " | bad lead |"
    )
    print("|---:" * 6 + "|")
    for blocks in BLOCKS:
        cells = []
        for points in (THREE, SEVEN):
            for measure in (stated_wrongly, found_of_a_tenth):
                cells.append(
                    " / ".join(
                        f"{100 * measure(points, blocks, drift):.1f}" for drift in (0.0, DRIFT)
                    )
                )
        cells.append(" / ".join(f"{100 * badly_led(blocks, drift):.1f}" for drift in (0.0, DRIFT)))
        print(f"| {blocks} | " + " | ".join(cells) + " |", flush=True)

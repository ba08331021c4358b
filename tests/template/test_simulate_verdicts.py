"""Error rate, cost and power of verdicts on invented runs. docs/dev/report_method.md shows the
results of larger simulations with scripts/maintain/simulate_verdicts.py.
"""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import ttest_1samp

from scripts.maintain.simulate_verdicts import (
    FIRST,
    LIMIT,
    ROWS,
    decide_all,
    most_false,
    records,
    row,
    sweep_row,
)
from timm_parallel.lab.analysis.sequential import (
    BETTER,
    LEVEL,
    WORSE,
    levels,
)
from timm_parallel.lab.analysis.statistics import LEVEL as SWEEP_LEVEL
from timm_parallel.lab.analysis.verdict import BASE, HEAD, Record, judge


@pytest.mark.slow(seconds=1)
@pytest.mark.parametrize("name", ROWS)
def test_verdict_that_may_stop_after_each_pair_is_rarely_false_and_its_interval_holds(
    name: str,
) -> None:
    series = 4000
    false, pairs, one_sd, two_sd, _, covered = row(name, ROWS[name], series)
    assert false <= most_false(series)
    assert covered >= 1 - most_false(series)
    assert pairs <= (7.0 if "diverge" in name else 5.5)
    if name == "normal":
        # Eight pairs, a fixed number, find one standard deviation in 24 of 100 cases.
        assert one_sd >= 0.23 and two_sd >= 0.85


@pytest.mark.parametrize("name", ["normal", "20 % of runs diverge", "99.6 % of 270 images"])
@pytest.mark.parametrize("difference", [0, 2])
def test_simulated_verdict_ends_like_the_function_that_decides(name: str, difference: int) -> None:
    count = 8
    series = ROWS[name](np.random.default_rng(3), count, difference=difference)
    outcome = decide_all(series)
    words = {BETTER: 1, WORSE: -1}
    for number in range(count):
        for pairs in range(FIRST, LIMIT + 1):
            verdict = judge(records(series, number, pairs), Record(BASE, HEAD, 1))
            if not verdict.is_open:
                break
        assert words.get(verdict.word, 0) == outcome.words[number]
        assert pairs == outcome.pairs[number]


def test_more_pairs_after_a_stop_do_not_make_verdicts_false() -> None:
    outcome = decide_all(ROWS["normal"](np.random.default_rng(1), 10_000), persists=True)
    assert float((outcome.words != 0).mean()) <= most_false(10_000)
    assert float(outcome.pairs.mean()) > 11


@pytest.mark.slow(seconds=1)
@pytest.mark.parametrize("settings", [1, 3, pytest.param(9, marks=pytest.mark.nightly)])
def test_sweep_that_stops_by_itself_is_rarely_false_and_its_intervals_hold(settings: int) -> None:
    count = 2000
    false, seeds, _, found, _, covered = sweep_row(settings, count)
    assert false <= most_false(count, SWEEP_LEVEL)
    assert covered >= 1 - most_false(count, SWEEP_LEVEL)
    assert seeds <= 5.5
    assert found >= 0.65


@pytest.mark.parametrize("limit", [FIRST, 12, 30])
def test_levels_of_all_stops_together_are_the_level(limit: int) -> None:
    draw = np.random.default_rng(2).standard_normal((20_000, limit))
    table = levels(limit)
    assert list(table) == list(range(FIRST, limit + 1))
    false = np.zeros(len(draw), bool)
    for pairs, level in table.items():
        false |= ttest_1samp(draw[:, :pairs], 0, axis=1).pvalue <= level
    assert false.mean() == pytest.approx(LEVEL, abs=0.003)

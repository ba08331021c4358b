"""Error rate of verdicts on invented runs. docs/dev/report_method.md shows the results of larger
simulations with scripts/maintain/simulate_verdicts.py.
"""

from __future__ import annotations

import pytest

from scripts.maintain.simulate_verdicts import (
    SEEDS,
    count_equal,
    count_false_families,
    most_false,
    power,
)


@pytest.mark.parametrize(
    "verdicts",
    [pytest.param(200), pytest.param(1000, marks=pytest.mark.nightly)],
)
@pytest.mark.parametrize("seeds", SEEDS)
def test_verdict_rarely_calls_equal_code_better_or_worse(verdicts: int, seeds: int) -> None:
    word, table = count_equal(verdicts, seeds)
    assert word <= table <= most_false(verdicts) * verdicts


@pytest.mark.nightly
@pytest.mark.slow(seconds=3)
@pytest.mark.parametrize(
    "families",
    [pytest.param(60), pytest.param(500, marks=pytest.mark.nightly)],
)
@pytest.mark.parametrize("seeds", SEEDS)
def test_twenty_successive_verdicts_on_equal_code_are_rarely_false(
    families: int, seeds: int
) -> None:
    assert count_false_families(families, seeds) <= most_false(families) * families


def test_early_verdict_on_a_base_detects_a_large_difference_more_often_than_a_late_verdict() -> (
    None
):
    first, fifth, twentieth = (power(100, (number, 8, 3)) for number in (1, 5, 20))
    assert first >= 0.95
    assert first > fifth > twentieth

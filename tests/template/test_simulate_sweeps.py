"""Error rate and bias of the report on simulated sweeps."""

from __future__ import annotations

import math

import numpy as np
import pytest

from scripts.maintain.simulate_sweeps import ROWS, UNDECIDABLE, lower_bound, simulate

MOST_FALSE, MOST_FALSELY_NAMED = 0.06, 0.05


@pytest.mark.slow(seconds=1)
@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("10x5 one better by 0 SE", 0.09),
        ("10x5 baseline sd x5", 0.09),
        ("10x5 equal, worst 3 of 5 seeds of 5 settings failed", 0.03),
        ("2x2 equal, run noise 1 image(s) of 270", 0.03),
        ("2 x 5 folds x 5 seeds, setting-by-fold sd 1.0", 0.12),
    ],
)
def test_report_rarely_states_a_false_difference_for_simulated_sweeps(
    name: str, most: float
) -> None:
    assert np.mean([verdict.any_false for verdict in simulate(name, 100)]) <= most


def test_report_states_the_value_of_the_chosen_setting_without_selection_bias() -> None:
    verdicts = simulate("10x5 slope", 100)
    assert abs(np.nanmean([verdict.stated for verdict in verdicts])) <= 0.3
    assert np.mean([verdict.plain for verdict in verdicts]) > 0.6


@pytest.mark.slow(seconds=1)
@pytest.mark.parametrize(
    "name",
    ["2x5 60 against 98 %", "2x5 binomial n=270 0.95 against 1.0", "2x5 loss 1.0 against 0.1"],
)
def test_interval_of_a_large_difference_holds_the_true_difference(name: str) -> None:
    verdicts = simulate(name, 100)
    assert all(verdict.named for verdict in verdicts)
    assert np.mean([verdict.covered for verdict in verdicts]) >= 0.88


def test_report_on_a_diverged_baseline_rarely_states_a_false_difference_without_that_run() -> None:
    verdicts = simulate("10x5 loss equal, one seed of the baseline diverged", 60)
    assert np.mean([verdict.any_false for verdict in verdicts]) <= 0.12


def test_report_names_the_best_setting_when_one_seed_of_another_setting_diverged() -> None:
    verdicts = simulate("10x5 loss .24 against .30, one seed of another diverged", 40)
    assert np.mean([verdict.named for verdict in verdicts]) > 0.8


@pytest.mark.slow(seconds=3)
@pytest.mark.parametrize(
    "name", [name for name in ROWS if not any(part in name for part in UNDECIDABLE)]
)
@pytest.mark.sample(72)
def test_report_error_rate_is_at_most_6_percent_for_every_simulated_kind_of_sweep(
    name: str,
) -> None:
    verdicts = simulate(name, 300)
    false, named = (
        sum(getattr(v, key) for v in verdicts) for key in ("any_false", "falsely_named")
    )
    assert lower_bound(false, len(verdicts)) <= MOST_FALSE
    assert lower_bound(named, len(verdicts)) <= MOST_FALSELY_NAMED
    assert all(math.isfinite(verdict.plain) for verdict in verdicts)
    # Two points below the level, and chance: each sweep counts once, because its intervals depend.
    covered = [verdict.all_covered for verdict in verdicts if math.isfinite(verdict.all_covered)]
    assert np.mean(covered) >= 0.93 - 2 * math.sqrt(0.05 * 0.95 / len(covered)) if covered else True

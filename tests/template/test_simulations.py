"""Error rate, cost, bias and power of verdicts and reports on invented runs.
docs/dev/report_method.md shows the results of larger simulations with the same scripts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import ttest_1samp

from scripts.maintain.simulate_sweeps import ROWS as SWEEPS
from scripts.maintain.simulate_sweeps import UNDECIDABLE, lower_bound, simulate
from scripts.maintain.simulate_verdicts import (
    FIRST,
    LIMIT,
    ROWS,
    SAMPLES,
    Series,
    decide_all,
    most_false,
    records,
    row,
    sweep_row,
)
from timm_parallel.lab.analysis.groups import with_contrasts
from timm_parallel.lab.analysis.runs import RunRecord
from timm_parallel.lab.analysis.sequential import BETTER, LEVEL, WORSE, levels, word_of
from timm_parallel.lab.analysis.settings import setting_groups
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


def sweep_runs(values: Mapping[str, np.ndarray]) -> list[RunRecord]:
    """Build the runs of a sweep that adds repeats, from the accuracies of each learning rate."""
    of_sweep = {"sweep.repeats": "auto", "sweep.max_repeats": LIMIT, "sweep.baseline": "optim.lr=0"}
    metrics = {"metrics.acc.lower_is_better": False, "metrics.acc.is_proportion": True}
    return [
        RunRecord(
            name=f"{rate}_{block}",
            folder=Path(f"{rate}_{block}"),
            status="done",
            block=block,
            overrides=(f"optim.lr={rate}",),
            result={**metrics, "val.acc": float(value), "val.samples": SAMPLES, "devices": 1},
            config={
                **of_sweep,
                "optim.lr": rate,
                "seed": block,
                "checkpoint.metric": "val/acc",
            },
        )
        for rate, of_rate in values.items()
        for block, value in enumerate(of_rate)
    ]


@pytest.mark.parametrize("difference", [0, 2])
def test_simulated_sweep_ends_like_the_functions_that_decide(difference: int) -> None:
    settings, draw = ("1", "2", "3"), np.random.default_rng(5)
    for _ in range(4):
        base = 0.7 + 0.01 * draw.standard_normal((1, LIMIT))
        heads = [0.7 + 0.01 * (difference + draw.standard_normal((1, LIMIT))) for _ in settings]
        outcomes = {
            name: decide_all(Series(base, head, 0.0), level=SWEEP_LEVEL / len(settings))
            for name, head in zip(settings, heads, strict=True)
        }
        pairs = dict.fromkeys(("0", *settings), FIRST)
        while True:
            values = dict(zip(pairs, (base, *heads), strict=True))
            runs = sweep_runs({name: values[name][0, : pairs[name]] for name in pairs})
            [group] = with_contrasts(setting_groups(runs))
            if not group.undecided:
                break
            pairs["0"] += 1
            for setting in group.undecided:
                pairs[setting.settings["optim.lr"]] += 1
        assert {name: pairs[name] for name in settings} == {
            name: outcome.pairs[0] for name, outcome in outcomes.items()
        }
        words = {BETTER: 1, WORSE: -1}
        assert [words.get(word_of(contrast), 0) for contrast in group.contrasts] == [
            outcome.words[0] for outcome in outcomes.values()
        ]


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
    "name", [name for name in SWEEPS if not any(part in name for part in UNDECIDABLE)]
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

"""Error rate, cost and power of verdicts on invented runs. docs/dev/report_method.md shows the
results of larger simulations with scripts/maintain/simulate_verdicts.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import ttest_1samp

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

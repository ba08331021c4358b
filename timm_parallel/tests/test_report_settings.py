"""Test the report on a sweep over settings: which settings and which baseline are compared, by
which metric, and the first sentence, the table and the plots.
"""

from __future__ import annotations

import csv
import json
import math
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import sem, t

from timm_parallel.lab.analysis.sequential import levels
from timm_parallel.lab.analysis.statistics import (
    INCONCLUSIVE,
    LEVEL,
    NOT_SUPPORTED,
    SUPPORTED,
    decide,
    estimate,
    scale_of,
)
from timm_parallel.lab.report.report import compare
from timm_parallel.lab.sweep.board import show_headline
from timm_parallel.record.result import SEARCH
from timm_parallel.testing.report_sweeps import Sweep, findings, read

PROPORTIONS = scale_of([0.5], is_proportion=True)
RATES = {"0.001": 0.70, "0.003": 0.80, "0.01": 0.60}


pytestmark = pytest.mark.usefixtures("without_plots")


def sweep_over_rates(
    folder: Path,
    rates: dict[str, float] | None = None,
    seeds: int = 4,
    metric: str = "val/acc",
    noise: float = 0.004,
    config: dict[str, Any] | None = None,
    **changes: Any,
) -> Sweep:
    """Build the files of a sweep over optim.lr. `rates` is a dictionary from learning rate to
    the mean of the metric. Small noise differs between runs.
    """
    values = {
        rate: [mean + 0.01 * seed + noise * ((place + seed * 2) % 3 - 1) for seed in range(seeds)]
        for place, (rate, mean) in enumerate((rates or RATES).items())
    }
    return of_values(folder, values, metric, config=config, **changes)


def add(sweep: Sweep, overrides: list[str], config: dict[str, Any], **changes: Any) -> Path:
    folder = sweep.add("single", 1, config=config, **changes)
    sweep.jobs[-1]["overrides"] = overrides
    return folder


def of_values(
    folder: Path,
    values: dict[str, list[float]],
    metric: str = "val/loss",
    first_seed: int = 0,
    samples: int | None = None,
    config: dict[str, Any] | None = None,
    **changes: Any,
) -> Sweep:
    """Build the files of a sweep over optim.lr from the value of each learning rate and seed. A
    repeat has the jobs of one seed.
    """
    sweep = Sweep(folder)
    for block in range(max(map(len, values.values()))):
        for rate, of_seeds in values.items():
            seed = first_seed + block
            keys = {"optim": {"lr": float(rate)}, "checkpoint": {"metric": metric}, "seed": seed}
            if block < len(of_seeds):
                val = {metric.partition("/")[2]: of_seeds[block], "samples": samples}
                add(
                    sweep,
                    [f"optim.lr={rate}"],
                    keys | (config or {}),
                    block=seed,
                    val=val,
                    **changes,
                )
    return sweep


def change(sweep: Sweep, *jobs: int, **fields: Any) -> None:
    """Change fields in result.json of some jobs."""
    for job in jobs:
        path = sweep.folder / str(job) / "result.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def compared(plain: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return a dictionary from the label of each compared setting to its contrast with the
    baseline, for the first metric of the report.
    """
    metric = plain["settings"][0]["metric"]
    return {
        contrast["a"]: contrast for contrast in plain["contrasts"] if contrast["measure"] == metric
    }


@pytest.mark.parametrize(
    ("configs", "question"),
    [
        ([{"data": {"batch_size": size}} for size in (64, 128)], "metric"),
        ([{"data": {"batch_size_per_device": size}} for size in (32, 64)], "speed"),
        ([{"parallel": {"bucket_cap_mb": size}} for size in (1, 25)], "speed"),
        (
            [
                {"optim": {"lr": lr}, "sweep": {"timed": True}, "train": {"max_steps": 9}}
                for lr in (0.1, 0.2)
            ],
            "speed",
        ),
    ],
)
def test_report_compares_speed_or_metric_depending_on_the_swept_keys(
    tmp_path: Path, configs: list[dict[str, Any]], question: str
) -> None:
    sweep = Sweep(tmp_path / "s")
    for config in configs:
        sweep.add("single", 1, config={"seed": 1} | config)
    assert read(sweep.write())[2]["question"] == question


def test_report_recommends_the_best_learning_rate_with_its_accuracy_gain_and_a_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = sweep_over_rates(tmp_path / "s").write()
    html, markdown, plain = read(folder)
    lead, contrast = plain["lead"], plain["lead"]["contrast"]
    assert (lead["point"], contrast["a"], contrast["b"]) == (
        "optim.lr=0.003",
        "optim.lr=0.003",
        "optim.lr=0.001",
    )
    assert lead["command"] == "python train.py optim.lr=0.003"
    assert (
        contrast["low"] < contrast["difference"] < contrast["high"]
        and contrast["verdict"] == SUPPORTED
    )
    found = findings(lead)
    better, expected = found["better"], found["expected"]
    assert (better["setting"]["label"], better["contrast"]) == ("optim.lr=0.003", contrast)
    means = {setting["label"]: setting["mean"] for setting in plain["settings"][0]["settings"]}
    assert contrast["difference"] == pytest.approx(means[contrast["a"]] - means[contrast["b"]])
    low, high = lead["value_interval"]
    assert low < lead["value"] < high
    assert (expected["value"], expected["interval"]) == (lead["value"], [low, high])
    assert expected["settings"] == 3 and found["not_worse"]["rivals"] == 0
    for number in (contrast["difference"], contrast["low"], lead["value"], low, high):
        assert f"{100 * number:.1f}" in lead["sentence"]
    assert [setting["may_be_best"] for setting in plain["settings"][0]["settings"]] == [
        False,
        True,
        False,
    ]
    # The expected value has its own paragraph.
    first, expect, rest = lead["sentence"].partition(" Expect")
    assert expect and f'<p class="lead">{first}<br>' in html and f"<p>Expect{rest}</p>" in html
    # The speed is in a part that is folded, below the comparison.
    fold, end = html.index('<details class="fold">'), html.index("Jobs without figures")
    assert html.index('<p class="lead">') < fold < html.index("strong scaling, global batch") < end
    assert lead["command"] in markdown and "| 0.003 | 4 | 81.5 % |" in markdown
    for text in (html, markdown):
        assert r"\begin{tabular}{lrrrrr" in text
        # LaTeX needs a backslash before the percent sign, which would otherwise begin a comment.
        assert r"0.003 & 4 & 81.5 \% & " in text.replace("&amp;", "&")
    assert compared(plain)["optim.lr=0.01"]["verdict"] == NOT_SUPPORTED
    assert [row["optim.lr"] for row in plain["table"]] == list(RATES)
    # No energy was measured.
    assert "J per image" not in plain["table"][0]
    assert {point["joules_per_image"] for point in plain["points"]} == {None}
    # The console of the sweep shows the table, the first sentences and the command.
    show_headline(folder)
    output = capsys.readouterr().out
    assert output.endswith(f"{lead['sentence']}\n{lead['command']}\n")
    assert all(f" {rate} " in output for rate in RATES)


def test_report_states_the_detectable_difference_when_no_setting_is_shown_to_be_better(
    tmp_path: Path,
) -> None:
    rates = {"0.001": 0.70, "0.003": 0.702, "0.01": 0.69}
    plain = read(sweep_over_rates(tmp_path / "s", rates, noise=0.03).write())[2]
    lead, contrasts = plain["lead"], compared(plain)
    assert (lead["point"], lead["command"], lead["contrast"]) == (None, "", None)
    assert {contrast["verdict"] for contrast in contrasts.values()} == {INCONCLUSIVE}
    found = findings(lead)
    best = found["best_mean"]
    assert best["baseline"]["label"] == "optim.lr=0.001"
    assert best["contrast"].items() <= contrasts[best["setting"]["label"]].items()
    assert best["contrast"]["detectable"] > 0


def test_report_labels_and_baseline_have_swept_values_as_given(tmp_path: Path) -> None:
    rates = ("0.0012345678", "0.003", "123456789.0")
    labels = [f"optim.lr={rate}" for rate in rates]
    values = dict(zip(rates, (0.7, 0.8, 0.6), strict=True))
    config = {"sweep": {"baseline": labels[0]}}
    plain = read(sweep_over_rates(tmp_path / "s", values, config=config).write())[2]
    [group] = plain["settings"]
    assert [setting["label"] for setting in group["settings"]] == labels
    assert (group["baseline"], group["missing_baseline"]) == (labels[0], "")
    assert plain["lead"]["command"] == "python train.py optim.lr=0.003"


@pytest.mark.parametrize(
    ("metric", "is_lower_better", "winner"),
    [
        ("val/angle_error", True, "optim.lr=0.003"),
        ("val/harmonic_ema", False, "optim.lr=0.01"),
    ],
)
def test_report_reads_in_result_json_if_a_lower_value_of_the_metric_is_better(
    tmp_path: Path, metric: str, is_lower_better: bool, winner: str
) -> None:
    # Two settings are better than the first setting, the baseline, in either direction. Today's
    # code may not have the metric, because it was renamed since.
    rates = (
        {"0.001": 1.0, "0.003": 0.8, "0.01": 0.9}
        if is_lower_better
        else {"0.001": 1.0, "0.003": 1.1, "0.01": 1.3}
    )
    name = metric.removeprefix("val/").removesuffix("_ema")
    known = {name: {"lower_is_better": is_lower_better, "is_proportion": False}}
    sweep = sweep_over_rates(tmp_path / "s", rates, metric=metric, metrics=known)
    lead = read(sweep.write())[2]["lead"]
    assert (lead["point"], lead["findings"][0]["kind"]) == (winner, "better")
    assert (lead["contrast"]["difference"] < 0) == is_lower_better
    assert lead["value"] == pytest.approx(rates[winner.partition("=")[2]] + 0.015, abs=0.01)


@pytest.mark.parametrize("metrics", [{}, {"acc": {"lower_is_better": False}}, {"acc": 1}])
def test_report_does_not_compare_settings_by_a_metric_of_unknown_direction(
    tmp_path: Path, metrics: dict[str, Any]
) -> None:
    plain = read(sweep_over_rates(tmp_path / "s", metrics=metrics).write())[2]
    assert plain["settings"] == []
    assert len(plain["notes"]) == 1


@pytest.mark.parametrize(
    ("changes", "titles"),
    [
        ({"data": {"all": "other"}}, ["data unknown", "data other"]),
        ({"metrics": {"acc": {"lower_is_better": True, "is_proportion": True}}}, ["", ""]),
    ],
)
def test_report_does_not_compare_settings_with_other_images_or_another_definition_of_the_metric(
    tmp_path: Path, changes: dict[str, Any], titles: list[str]
) -> None:
    sweep = sweep_over_rates(tmp_path / "s")
    change(sweep, 0, **changes)
    groups = read(sweep.write())[2]["settings"]
    assert [len(group["settings"]) for group in groups] == [3, 1]
    assert [group["group"] for group in groups] == titles


def test_report_compares_the_accuracy_and_shows_the_energy_even_when_runs_were_disturbed(
    tmp_path: Path,
) -> None:
    flags = ["other programs kept 1.3 of 2 processors busy"]
    energy = {"joules_per_image": 0.25, "kwh": 0.1}
    sweep = sweep_over_rates(tmp_path / "s", flags=flags, neighbours=2, energy=energy)
    plain = read(sweep.write())[2]
    assert plain["lead"]["point"] == "optim.lr=0.003"
    assert all(group["disturbed"] for group in plain["groups"])
    assert [row["J per image"] for row in plain["table"]] == ["0.250"] * len(RATES)
    assert {point["joules_per_image"]["median"] for point in plain["points"]} == {0.25}


def test_report_on_settings_with_one_seed_has_no_interval_and_suggests_sweep_repeats(
    tmp_path: Path,
) -> None:
    plain = read(sweep_over_rates(tmp_path / "s", seeds=1).write())[2]
    [finding] = plain["lead"]["findings"]
    assert (finding["kind"], finding["shared"]) == ("too_few_repeats", 1)
    assert "sweep.repeats=5" in plain["lead"]["sentence"] and plain["lead"]["point"] is None
    assert all(contrast["low"] is None for contrast in compared(plain).values())


@pytest.mark.parametrize(("metric", "best"), [("val/acc", "0.003"), ("val/loss", "0.001")])
def test_report_on_settings_that_share_no_seed_names_the_best_mean_of_its_table(
    tmp_path: Path, metric: str, best: str
) -> None:
    low = of_values(tmp_path / "low", {"0.001": [0.5, 0.52]}, metric)
    high = of_values(tmp_path / "high", {"0.003": [0.8, 0.82]}, metric, first_seed=7)
    low.write()
    lead = read(low.folder, high.write())[2]["lead"]
    few = findings(lead)["too_few_repeats"]
    assert (few["shared"], few["setting"]["label"]) == (0, f"optim.lr={best}")
    assert few["value"] == pytest.approx(0.81 if metric == "val/acc" else 0.51)


def test_report_says_that_settings_with_equal_values_in_every_seed_are_equal(
    tmp_path: Path,
) -> None:
    rates = {"0.001": 0.7, "0.003": 0.7}
    lead = read(sweep_over_rates(tmp_path / "s", rates, noise=0).write())[2]["lead"]
    equal = {"keys": ["optim.lr"], "settings": 2, "repeats": "seed"}
    assert findings(lead) == {"all_equal": equal, "over_seeds": {}}
    assert lead["point"] is None


NEAR = [0.31, 0.29, 0.30, 0.305, 0.295]
BELOW = [0.24, 0.238, 0.242, 0.239, 0.241]


def test_report_states_no_expected_value_outside_of_the_runs_of_the_named_setting(
    tmp_path: Path,
) -> None:
    """Without the wildly better third seed of 0.01, 0.003 is best, so the corrected value is partly
    that of other settings.
    """
    values = {"0.001": NEAR, "0.003": BELOW, "0.01": [0.30, 0.29, 0.0001, 0.31, 0.295]}
    lead = read(of_values(tmp_path / "s", values).write())[2]["lead"]
    expected = findings(lead)["expected"]
    assert expected["others"] == 1 and expected["count"] == 5
    own = values[lead["point"].partition("=")[2]] if lead["point"] else values["0.01"]
    assert lead["value"] is None or min(own) <= lead["value"] <= max(own)


def test_report_on_seeds_that_were_added_in_a_second_sweep_has_a_note(tmp_path: Path) -> None:
    first = of_values(tmp_path / "s", {"0.001": NEAR, "0.003": NEAR[::-1]})
    more = of_values(tmp_path / "t", {"0.001": NEAR, "0.003": NEAR[::-1]}, first_seed=5)
    assert "extended" not in findings(read(first.write())[2]["lead"])
    assert findings(read(first.folder, more.write())[2]["lead"])["extended"] == {"sweeps": 2}
    other = of_values(tmp_path / "u", {"0.01": NEAR})
    assert "extended" not in findings(read(first.folder, other.write())[2]["lead"])


def test_report_names_no_setting_that_has_one_seed(tmp_path: Path) -> None:
    values = {"0.001": NEAR, "0.003": BELOW[:1], "0.01": NEAR[::-1]}
    plain = read(of_values(tmp_path / "s", values).write())[2]
    assert compared(plain)["optim.lr=0.003"]["verdict"] == "not measurable"
    assert compared(plain)["optim.lr=0.003"]["high"] < 0
    assert plain["lead"]["point"] is None


@pytest.mark.parametrize(
    ("named", "baseline"), [(None, "optim.lr=0.001"), ("optim.lr=1e-2", "optim.lr=0.01")]
)
def test_report_baseline_is_the_named_or_the_first_swept_value_in_any_order_of_jobs(
    tmp_path: Path, named: str | None, baseline: str
) -> None:
    sweep = sweep_over_rates(tmp_path / "s", config={"sweep": {"baseline": named}})
    sweep.jobs.reverse()
    for position, job in enumerate(sweep.jobs):
        job["id"] = position
    plain = read(sweep.write())[2]
    assert {contrast["b"] for contrast in compared(plain).values()} == {baseline}
    # hydra.sweep.subdir may give the folders other names, from which no order follows.
    for job in sweep.jobs:
        job["configuration"] = int(job["folder"]) % len(RATES)
        name = f"{job['overrides'][0]}_block_{job['block']}"
        job["folder"] = (sweep.folder / job["folder"]).rename(sweep.folder / name).name
    named_by_keys = compared(read(sweep.write())[2])
    assert list(named_by_keys) == list(compared(plain))
    assert {contrast["b"] for contrast in named_by_keys.values()} == {baseline}


def test_report_treats_swept_seeds_and_folds_as_repeats_of_one_setting(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path / "s")
    for fold, seed in product(range(2), range(3)):
        words, value = [f"seed={seed}", f"data.fold={fold}"], 0.8 + 0.01 * seed + 0.02 * fold
        add(sweep, words, {"seed": seed, "data": {"fold": fold}}, val={"acc": value})
    plain = read(sweep.write())[2]
    [group] = plain["settings"]
    assert (group["blocks"], group["unit_of_repeats"], len(group["settings"])) == (2, "fold", 1)
    assert group["settings"][0]["values"] == pytest.approx([0.81, 0.83]), (
        "seeds of one fold share its images"
    )
    assert plain["lead"]["value"] == pytest.approx(0.82)


def test_intervals_in_the_report_do_not_shrink_when_the_same_seeds_were_run_twice(
    tmp_path: Path,
) -> None:
    """A deterministic run with the same seed repeats the same value. It adds no information
    about chance.
    """
    sweep = sweep_over_rates(tmp_path / "s")
    once = compared(read(sweep.write())[2])
    twice = sweep_over_rates(tmp_path / "again")
    both = compared(read(sweep.folder, twice.write())[2])
    assert {a: c["low"] for a, c in both.items()} == {
        a: pytest.approx(c["low"]) for a, c in once.items()
    }


def test_report_never_recommends_a_setting_whose_runs_ran_out_of_memory(tmp_path: Path) -> None:
    """The setting with the highest accuracy finishes with only one of four seeds."""
    sweep = sweep_over_rates(tmp_path / "s", {"0.001": 0.70, "0.003": 0.72, "0.01": 0.95})
    change(sweep, 2, 5, 8, status="out_of_memory")
    plain = read(sweep.write())[2]
    assert plain["lead"]["point"] != "optim.lr=0.01"
    assert compared(plain)["optim.lr=0.01"]["verdict"] != SUPPORTED
    found = findings(plain["lead"])
    setting = {"label": "optim.lr=0.01", "lost": {"out of memory": 3}, "runs": 4}
    assert found["lost_runs"] == {"settings": [setting], "by_settings": True}


def test_report_counts_failed_runs_and_widens_the_interval_of_a_setting_that_lost_one(
    tmp_path: Path,
) -> None:
    """A failed run says nothing about the quality of the setting. The interval must therefore
    allow for any value of the lost run.
    """
    sweep = sweep_over_rates(tmp_path / "s", {"0.001": 0.70, "0.003": 0.95})
    whole = read(sweep.write())[2]["lead"]
    change(sweep, 1, status="failed")
    html, _, plain = read(sweep.folder)
    assert [(row["seeds"], row["runs lost"]) for row in plain["table"]] == [
        ("4", "—"),
        ("3", "1 of 4"),
    ]
    assert [setting["lost"] for setting in plain["settings"][0]["settings"]] == [[], ["1"]]
    assert "may be too good" in html
    lead = plain["lead"]
    found = findings(lead)
    assert found["better"]["setting"]["lost"] == {"failed": 1}
    assert found["better"]["contrast"]["n"] == lead["contrast"]["n"] == 3
    assert lead["contrast"]["low"] < whole["contrast"]["low"] - 0.05
    assert lead["contrast"]["detectable"] > whole["contrast"]["detectable"] + 0.05
    assert found["not_worse"]["rivals"] == 0


@pytest.mark.parametrize(
    ("wanted", "lost", "missing", "instead"),
    [
        (None, (0, 3, 6, 9), "optim.lr=0.001", "optim.lr=0.003"),
        ("optim.lr=9", (), "sweep.baseline=optim.lr=9", "optim.lr=0.001"),
    ],
)
def test_report_uses_and_notes_another_baseline_when_the_baseline_has_no_finished_run(
    tmp_path: Path, wanted: str | None, lost: tuple[int, ...], missing: str, instead: str
) -> None:
    sweep = sweep_over_rates(tmp_path / "s", config={"sweep": {"baseline": wanted}})
    change(sweep, *lost, status="failed")
    html, _, plain = read(sweep.write())
    [group] = plain["settings"]
    assert (group["baseline"], group["missing_baseline"]) == (instead, missing)
    assert group["settings"][0]["mean"] is None if lost else missing in html
    found = findings(plain["lead"])
    assert found["other_baseline"] == {"missing": missing, "baseline": instead}
    assert found["expected"]["settings"] == len(group["settings"]) == 3


def test_report_names_the_swept_key_and_the_only_setting_that_did_not_diverge(
    tmp_path: Path,
) -> None:
    sweep = sweep_over_rates(tmp_path / "s")
    change(sweep, *(job for job in range(12) if job % 3), status="not_finite")
    html, _, plain = read(sweep.write())
    first = plain["lead"]["findings"][0]
    assert (first["kind"], first["setting"]["label"]) == ("only_setting", "optim.lr=0.001")
    assert first["is_left"] and "Sweep over optim.lr" in html
    assert [row["runs lost"] for row in plain["table"]] == ["—", "4 of 4", "4 of 4"]


def test_report_names_a_diverged_run_and_still_recommends_the_best_setting(
    tmp_path: Path,
) -> None:
    losses = {"0.001": 0.40, "0.003": 0.30, "0.01": 0.41}
    sweep = sweep_over_rates(tmp_path / "s", losses, metric="val/loss", seeds=5)
    change(sweep, 5, val={"loss": 2.3})
    lead = read(sweep.write())[2]["lead"]
    assert lead["point"] == "optim.lr=0.003"
    diverged = {"run": "5", "setting": "optim.lr=0.01", "value": 2.3}
    assert findings(lead)["far_off"]["runs"] == [diverged]


def test_report_says_that_the_baseline_is_the_best_setting(tmp_path: Path) -> None:
    rates = {"0.001": 0.95, "0.003": 0.80, "0.01": 0.85}
    lead = read(sweep_over_rates(tmp_path / "s", rates).write())[2]["lead"]
    assert lead["point"] == "optim.lr=0.001"
    assert lead["command"] == "python train.py optim.lr=0.001"
    assert (lead["contrast"]["a"], lead["contrast"]["high"] < 0) == ("optim.lr=0.01", True)
    first = findings(lead)["better"]
    assert (first["baseline"]["label"], first["best_of"]) == ("optim.lr=0.001", 3)
    assert first["contrast"] == lead["contrast"]


@pytest.mark.parametrize(("images", "verdict"), [(270, INCONCLUSIVE), (10_000, SUPPORTED)])
def test_report_does_not_state_an_accuracy_difference_smaller_than_one_image(
    tmp_path: Path, images: int, verdict: str
) -> None:
    """The accuracies differ by 0.3 percentage points in each of five seeds. One of 270 images is
    0.37 points.
    """
    accuracies = [0.99 - 0.0005 * seed for seed in range(5)]
    values = {"0.1": accuracies, "0.2": [accuracy + 0.003 for accuracy in accuracies]}
    sweep = of_values(tmp_path / "s", values, "val/acc", samples=images)
    [contrast] = compared(read(sweep.write())[2]).values()
    assert contrast["verdict"] == verdict
    assert contrast["high"] - contrast["low"] >= 2 / images - 1e-9


def test_report_on_a_stopped_sweep_with_one_finished_job_still_compares_the_metric(
    tmp_path: Path,
) -> None:
    sweep = sweep_over_rates(tmp_path / "s")
    for job in sweep.jobs[1:]:
        (sweep.folder / job["folder"] / "result.json").unlink()
        job["status"] = "waiting"
    plain = read(sweep.write("interrupted"))[2]
    assert plain["question"] == "metric" and plain["settings"][0]["keys"] == ["optim.lr"]
    assert len(plain["notes"]) == 1 and "11 of 12" in plain["notes"][0]


def test_report_excludes_a_run_whose_seed_in_jobs_json_differs_from_its_config(
    tmp_path: Path,
) -> None:
    sweep = sweep_over_rates(tmp_path / "s")
    for job in sweep.jobs:
        job["seed"] = job["block"]
    sweep.jobs[4]["seed"] = 99
    html, _, plain = read(sweep.write())
    assert [run["run"] for run in plain["runs"] if not run["compared"]] == ["4"]
    assert "not compared: jobs.json says seed 99, config.yaml 1" in html


def test_report_does_not_compare_runs_with_different_uncommitted_changes(tmp_path: Path) -> None:
    sweep = sweep_over_rates(tmp_path / "s", environment={"dirty": True})
    for job in range(12):
        (sweep.folder / str(job) / "code.diff").write_text("+ one" if job < 9 else "+ two")
    plain = read(sweep.write())[2]
    assert [group["blocks"] for group in plain["settings"]] == [3, 1]
    assert len(plain["notes"]) == 1 and "0123abc" in plain["notes"][0]


@pytest.mark.parametrize(
    "metrics",
    [
        {"optimized_metric": "val/acc_best"},
        {"checkpoint": {"metric": "val/acc_ema"}, "optimized_metric": None},
    ],
)
def test_report_on_a_search_compares_trials_by_the_metric_that_the_search_optimized(
    tmp_path: Path, metrics: dict[str, Any]
) -> None:
    sweep = Sweep(tmp_path / "s")
    (sweep.folder / SEARCH).write_text("")
    for place, value in enumerate((0.5, 0.7)):
        config = {"optim": {"lr": place}, **metrics}
        add(sweep, [f"optim.lr={place}"], config, val={"acc": 1 - value, "acc_best": value})
    plain = read(sweep.write())[2]
    assert plain["settings"][0]["metric"] == "val/acc_best"
    [finding] = plain["lead"]["findings"]
    assert (finding["setting"]["label"], finding["value"]) == ("optim.lr=1", 0.7)


def test_command_in_the_report_keeps_max_steps_when_the_runs_are_no_benchmark(
    tmp_path: Path,
) -> None:
    sweep = sweep_over_rates(tmp_path / "s", config={"train": {"max_steps": 60}})
    for job in sweep.jobs:
        job["overrides"].append("train.max_steps=60")
    lead = read(sweep.write())[2]["lead"]
    assert lead["command"] == "python train.py optim.lr=0.003 train.max_steps=60"


@pytest.mark.usefixtures("plots")
@pytest.mark.slow(seconds=3)
def test_report_on_settings_has_plots_of_values_and_curves(tmp_path: Path) -> None:
    sweep = sweep_over_rates(tmp_path / "s")
    # The runs of one setting have logged no curve.
    for job in (job for job in sweep.jobs if "optim.lr=0.01" not in job["overrides"]):
        lines = [
            {"step": step, "val/acc": 0.5 + step / 1000 + job["id"] / 1000}
            for step in range(1, 301)
        ]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (sweep.folder / job["folder"] / "metrics.jsonl").write_text(text)
    html, _, _ = read(sweep.write())
    folder = sweep.folder / "report_plots"
    names = sorted(path.stem for path in folder.glob("*.svg"))
    assert names == ["1_curves", "1_values"] and html.count("<svg") == 2
    curves = list(csv.DictReader((folder / "1_curves.csv").open(encoding="utf-8")))
    of_first = [row for row in curves if row["setting"] == "optim.lr=0.001"]
    assert len(of_first) == 100 and of_first[-1]["step"] == "300"
    last = [float(of_first[-1][name]) for name in ("low", "mean", "high")]
    assert last == pytest.approx([80.0, 80.45, 80.9])
    assert len(list(csv.DictReader((folder / "1_values.csv").open(encoding="utf-8")))) == 12


def test_accuracy_difference_and_its_interval_are_those_of_the_paired_t_test_in_points() -> None:
    rows = [("a", block, value) for block, value in enumerate((0.90, 0.92, 0.94))]
    rows += [("b", block, value) for block, value in enumerate((0.80, 0.83, 0.86))]
    [contrast] = decide(estimate(rows, [("a", "b")], PROPORTIONS))
    assert contrast.effect == pytest.approx(0.09)
    # With three repeats, the t distribution has 2 degrees of freedom. Its 97.5 % quantile is 4.303.
    reach = 4.302653 * np.std([0.10, 0.09, 0.08], ddof=1) / math.sqrt(3)
    assert (contrast.low, contrast.high) == pytest.approx((0.09 - reach, 0.09 + reach))
    assert contrast.detectable == pytest.approx(reach * (1 + 1.06066 / 4.302653), rel=1e-4)


@pytest.mark.parametrize("sign", [1, -1])
def test_interval_in_points_excludes_equality_only_if_the_arcsine_interval_does(sign: int) -> None:
    """Near 100 %, equal steps of accuracy are unequal steps of the arcsine of its square root."""
    draw = np.random.default_rng(3)
    disagreed = 0
    for _ in range(300):
        shares = draw.binomial(50, [[0.9], [0.99]], (2, 3)) / 50
        pair = {"a": shares[0], "b": shares[1]} if sign > 0 else {"b": shares[0], "a": shares[1]}
        rows = [(name, block, float(v)) for name in pair for block, v in enumerate(pair[name])]
        [e] = estimate(rows, [("a", "b")], PROPORTIONS)
        [contrast] = decide([e])
        if e.plain is not None and contrast.low is not None and contrast.high is not None:
            on_scale, in_points = (
                low > 0 or high < 0 for low, high in (e.ends(0.05), e.plain.ends(0.05))
            )
            disagreed += on_scale != in_points
            is_shown = contrast.low > 0 or contrast.high < 0
            assert is_shown <= on_scale
            assert contrast.effect is not None
            assert contrast.low <= contrast.effect <= contrast.high
    assert disagreed > 0


def test_sweep_smallest_difference_is_relative_to_the_error_rate_or_to_the_loss() -> None:
    assert PROPORTIONS.smallest_shift(0.9, 0.03) == pytest.approx(0.003)
    assert scale_of([2.0], lower_is_better=True).smallest_shift(2.0, 0.03) == 0.06


def sweep_that_stops(
    folder: Path,
    values: dict[str, list[float]],
    smallest: float | None = None,
    max_repeats: int = 12,
) -> Path:
    """Build the files of a sweep over optim.lr that added repeats until its comparisons were
    decided. The first learning rate is the baseline.
    """
    keys = {"repeats": "auto", "max_repeats": max_repeats, "smallest": smallest}
    config = {"sweep": {**keys, "baseline": f"optim.lr={next(iter(values))}"}}
    return of_values(folder, values, "val/acc", config=config).write()


NOISE = [0.004 * math.sin(2 + 5 * seed) for seed in range(12)]


def test_intervals_of_a_sweep_that_stops_by_itself_allow_for_its_stops(tmp_path: Path) -> None:
    values = {
        "0.001": [0.7] * 6,
        "0.003": [0.75 + noise for noise in NOISE[:4]],
        "0.01": [0.7 + noise for noise in NOISE[:6]],
    }
    html, markdown, plain = read(sweep_that_stops(tmp_path / "s", values))
    assert [contrast["n"] for contrast in plain["contrasts"][:2]] == [4, 6]
    for contrast, noise in zip(plain["contrasts"], (NOISE[:4], NOISE[:6]), strict=False):
        level = levels(12, LEVEL / 2)[contrast["n"]]
        ends = t.interval(1 - level, len(noise) - 1, np.mean(noise), sem(noise))
        effect = contrast["difference"] - np.mean(noise)
        assert (contrast["low"], contrast["high"]) == pytest.approx(ends + effect, abs=1e-6)
        # Neither is known of a comparison that stopped before the largest number of repeats.
        assert contrast["detectable"] is contrast["blocks_needed"] is None
    assert [contrast["verdict"] for contrast in plain["contrasts"][:2]] == [
        SUPPORTED,
        NOT_SUPPORTED,
    ]
    lead = plain["lead"]
    # No statement on the page rests on a choice among all settings.
    assert [f["kind"] for f in lead["findings"]] == ["better", "until_decided", "over_seeds"]
    assert (lead["point"], lead["value"]) == ("optim.lr=0.003", None)
    for page in (html, markdown):
        assert "until each comparison with the baseline was decided" in page
        assert (
            "group-sequential" in page
            and "Expect" not in page
            and "Holm's rule covers all settings" not in page
        )


def test_report_of_sweeps_that_stop_by_themselves_uses_the_largest_limit(tmp_path: Path) -> None:
    values = {"0.001": [0.7] * 6, "0.003": [0.75 + noise for noise in NOISE[:6]]}
    short = sweep_that_stops(tmp_path / "short", values)
    long = sweep_that_stops(tmp_path / "long", values, max_repeats=40)

    def low(*folders: Path) -> float:
        return float(read(*folders)[2]["contrasts"][0]["low"])

    assert low(long) == pytest.approx(low(long, short)) == pytest.approx(low(short, long))
    assert low(long) < low(short) == low(short, short)
    # A folder that is given twice counts once.
    assert len(compare([short, short]).sweeps) == 1


@pytest.mark.parametrize(
    ("shift", "smallest", "kind", "equal", "may_be_best"),
    [
        (-0.1, None, "better", [], {"optim.lr=0.001"}),
        (-0.003, None, "best_mean", [], {"optim.lr=0.001", "optim.lr=0.003"}),
        (0.001, 5.0, "best_mean", ["optim.lr=0.003"], {"optim.lr=0.001", "optim.lr=0.003"}),
    ],
)
def test_sweep_that_stops_by_itself_says_how_its_comparison_ended(
    tmp_path: Path,
    shift: float,
    smallest: float | None,
    kind: str,
    equal: list[str],
    may_be_best: set[str],
) -> None:
    values = {"0.001": [0.7] * 4, "0.003": [0.7 + shift + noise for noise in NOISE[:4]]}
    plain = read(sweep_that_stops(tmp_path / "s", values, smallest))[2]
    found = findings(plain["lead"])
    assert kind in found and found["until_decided"]["equal"] == equal
    settings = plain["settings"][0]["settings"]
    assert {s["label"] for s in settings if s["may_be_best"]} == may_be_best


def test_sweep_that_was_stopped_before_it_decided_names_its_open_settings(tmp_path: Path) -> None:
    values = {"0.001": [0.7] * 4, "0.003": [0.7, 0.72, 0.7, 0.72]}
    plain = read(sweep_that_stops(tmp_path / "s", values))[2]
    assert findings(plain["lead"])["until_decided"]["undecided"] == ["optim.lr=0.003"]

"""Test the decisions of the report: the recommendation, the comparisons, and which runs count as
repeats, are marked or are excluded.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from timm_parallel.lab.analysis.statistics import (
    INCONCLUSIVE,
    NOT_MEASURABLE,
    NOT_SUPPORTED,
    SUPPORTED,
)
from timm_parallel.testing.report_sweeps import SPEEDS, Sweep, findings, full_sweep, read

pytestmark = pytest.mark.usefixtures("without_plots")


def contrasts(
    plain: dict[str, Any], measure: str = "images_per_sec"
) -> dict[tuple[str, str], dict[str, Any]]:
    return {(c["a"], c["b"]): c for c in plain["contrasts"] if c["measure"] == measure}


def test_report_compares_strategies_and_recommends_one_with_its_speed_ratio_and_command(
    tmp_path: Path,
) -> None:
    html, markdown, plain = read(full_sweep(tmp_path / "s").write())
    results = contrasts(plain)
    single = {(f"{s} × {n}", "single × 1") for s in ("dp", "ddp") for n in (2, 4)}
    assert set(results) == single | {("ddp × 2", "dp × 2"), ("ddp × 4", "dp × 4")}
    assert all(c["n"] == 3 and c["low"] < c["ratio"] < c["high"] for c in results.values())
    lead = plain["lead"]
    contrast = lead["contrast"]
    found = findings(lead)
    assert list(found) == ["faster_than_single"]
    assert found["faster_than_single"]["contrast"] == contrast
    for key in ("ratio", "low", "high"):
        assert f"{contrast[key]:.2f}" in lead["sentence"]
    assert lead["command"] == "python train.py parallel=ddp parallel.devices=4"
    assert lead["contrast"]["verdict"] == SUPPORTED
    assert lead["sentence"] in html and lead["command"] in html and lead["command"] in markdown


def test_report_states_no_gain_from_more_devices_when_single_is_fastest(
    tmp_path: Path,
) -> None:
    speeds = SPEEDS | {("ddp", 4): 500.0, ("ddp", 2): 600.0, ("dp", 2): 700.0, ("dp", 4): 800.0}
    lead = read(full_sweep(tmp_path / "s", speeds).write())[2]["lead"]
    assert lead["point"] == "single × 1"
    [finding] = lead["findings"]
    assert (finding["kind"], finding["point"]["strategy"]) == ("no_gain", "dp")
    assert finding["point"]["devices"] == 4 and finding["contrast"] == lead["contrast"]
    assert lead["contrast"]["ratio"] == pytest.approx(0.8, abs=0.02)


def test_command_in_the_report_on_a_benchmark_has_no_max_steps_and_no_sweep_keys(
    tmp_path: Path,
) -> None:
    sweep = Sweep(tmp_path / "s")
    config = {"train": {"max_steps": 40, "epochs": 3, "evaluate_every": 0}}
    sweep.repeat("single", 1, [1000, 1010], config=config)
    words = "experiment=compare model=vit_tiny"
    for job in sweep.jobs:
        job["overrides"] = [*words.split(), "train.max_steps=40", "sweep.repeats=2"]
    command = read(sweep.write())[2]["lead"]["command"]
    assert command.startswith(f"python train.py {words} train.max_steps=null train.epochs=")
    assert "=40" not in command and "sweep." not in command


def test_report_recommends_dp_only_when_shown_to_be_at_most_3_percent_slower_than_ddp(
    tmp_path: Path,
) -> None:
    results = []
    for name, noise in (("quiet", 0.001), ("noisy", 0.05)):
        sweep = Sweep(tmp_path / name)
        sweep.repeat("dp", 2, [1500 * (1 + noise * k) for k in (0, 1, -1)])
        sweep.repeat("ddp", 2, [1507 * (1 + noise * k) for k in (1, 0, -1)])
        results.append(read(sweep.write())[2]["lead"])
    assert [lead["point"] for lead in results] == ["dp × 2", "ddp × 2"]
    assert results[0]["findings"][0]["kind"] == "simplest"


def test_speedup_of_10_percent_is_not_supported_when_sweep_smallest_difference_is_20_percent(
    tmp_path: Path,
) -> None:
    for smallest, verdict in ((0.03, SUPPORTED), (0.2, NOT_SUPPORTED)):
        sweep = Sweep(tmp_path / f"s{smallest}")
        config = {"sweep": {"smallest_difference": smallest}}
        sweep.repeat("single", 1, [1000, 1001, 999], config=config)
        sweep.repeat("ddp", 2, [1101, 1099, 1100], config=config)
        plain = read(sweep.write())[2]
        assert contrasts(plain)["ddp × 2", "single × 1"]["verdict"] == verdict


def test_report_speed_verdicts_are_inconclusive_when_a_sweep_has_one_repeat(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path / "s")
    for strategy, devices, speed in (("single", 1, 1000), ("dp", 2, 1500), ("ddp", 2, 1900)):
        sweep.add(strategy, devices, speed)
    _, _, plain = read(sweep.write())
    assert {c["verdict"] for c in plain["contrasts"]} == {INCONCLUSIVE}
    contrast = findings(plain["lead"])["faster_than_single"]["contrast"]
    assert (contrast["verdict"], contrast["detectable"]) == (INCONCLUSIVE, None)
    assert "sweep.repeats=" in plain["lead"]["sentence"]


def test_report_gives_no_verdict_when_most_runs_were_disturbed_by_other_programs(
    tmp_path: Path,
) -> None:
    sweep = full_sweep(tmp_path / "s")
    flags = ["another program used 0.9 of a core"]
    for place, (strategy, devices) in enumerate(SPEEDS):
        sweep.repeat(strategy, devices, [1000 * devices + place] * 4, flags=flags)
    html, _, plain = read(sweep.write())
    assert findings(plain["lead"])["disturbed"] == {"count": 20, "runs": 35, "reason": flags[0]}
    assert plain["lead"]["command"] == ""
    assert {c["verdict"] for c in plain["contrasts"]} == {NOT_MEASURABLE}
    claims = {c["number"]: c["verdict"] for c in plain["claims"]}
    assert claims[1] == claims[2] == claims[11] == NOT_MEASURABLE
    assert html.index(flags[0]) < html.index("<h2>")


def test_report_table_shows_the_memory_of_at_most_8_devices(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path / "sweep")
    sweep.add("ddp", 8)
    sweep.add("ddp", 16)
    rows = read(sweep.write())[2]["table"]
    memory = [row["peak memory, GiB, by device"] for row in rows]
    assert [cell.count("4.00") for cell in memory] == [8, 8]
    assert [cell.endswith("… (16)") for cell in memory] == [False, True]


def test_report_keeps_outliers_and_disturbed_runs_but_not_runs_next_to_other_jobs(
    tmp_path: Path,
) -> None:
    sweep = full_sweep(tmp_path / "s")
    sweep.add("single", 1, 1005, block=3)
    sweep.add("ddp", 2, 1905, block=3, flags=["the second half ran 20 % slower"])
    sweep.add("ddp", 2, 980, block=4)
    sweep.add("single", 1, 1002, block=4)
    sweep.add("ddp", 2, 400, block=5, neighbours=2)
    sweep.add("single", 1, 1001, block=5)
    html, _, plain = read(sweep.write())
    assert plain["lead"]["point"] == "ddp × 4"
    assert contrasts(plain)["ddp × 2", "single × 1"]["n"] == 5
    assert "run 16 (ddp × 2): the second half ran 20 % slower." in html
    assert "run 17 (ddp × 2)" not in html
    assert "run 19 (ddp × 2): 2 other jobs ran at the same time." in html
    assert "6, 2 flagged" in html


def test_report_recommends_to_run_single_when_the_sweep_has_no_comparable_single_run(
    tmp_path: Path,
) -> None:
    sweep = Sweep(tmp_path / "s")
    sweep.repeat("ddp", 2, [1900, 1910, 1890])
    for _ in range(2):
        lead = read(sweep.write())[2]["lead"]
        [finding] = lead["findings"]
        assert (finding["kind"], finding["point"]["strategy"]) == ("alone", "ddp")
        assert "parallel=single parallel.devices=1" in lead["sentence"] and lead["contrast"] is None
        # Runs next to another job are not comparable.
        sweep.repeat("single", 1, [1000, 1010, 990], neighbours=1)


def test_runs_do_not_count_as_repeats_when_workers_commit_driver_precision_or_nodes_differ(
    tmp_path: Path,
) -> None:
    unlike: tuple[dict[str, Any], ...] = (
        {},
        {"config": {"data": {"workers": 4, "batch_size": 64}}},
        {"config": {"train": {"precision": "bf16"}}},
        {"environment": {"commit": "aaa"}},
        {"environment": {"dirty": True}},
        {"environment": {"driver": "1"}},
        {"nodes": 2},
    )
    sweep = Sweep(tmp_path / "s")
    for changes in unlike:
        sweep.repeat("ddp", 4, [3600, 3610], **changes)
    points = read(sweep.write())[2]["points"]
    assert [len(point["runs"]) for point in points] == [2] * len(unlike)


def test_report_compares_single_with_ddp_when_their_loader_worker_counts_differ(
    tmp_path: Path,
) -> None:
    sweep = Sweep(tmp_path / "s")
    sweep.repeat("single", 1, [1000, 1010], config={"data": {"workers": 4, "batch_size": 64}})
    sweep.repeat("ddp", 2, [1900, 1910], config={"data": {"workers": 2, "batch_size": 64}})
    assert [len(group["points"]) for group in read(sweep.write())[2]["groups"]] == [2]


def test_report_compares_only_runs_on_the_same_host(tmp_path: Path) -> None:
    """The second host is half as fast as the first. On each host, ddp is 1.9 times as fast as
    single.
    """
    sweep = Sweep(tmp_path / "s")
    for host, factor in (("node1", 1.0), ("node2", 0.5)):
        where = {"environment": {"host": host}}
        sweep.repeat("single", 1, [1000 * factor, 1010 * factor], **where)
        sweep.repeat("ddp", 2, [1900 * factor, 1905 * factor], **where)
    results = contrasts(read(sweep.write())[2])["ddp × 2", "single × 1"]
    assert results["verdict"] == SUPPORTED and results["high"] / results["low"] < 1.1


def test_report_recommendation_excludes_configurations_that_share_no_host_with_single(
    tmp_path: Path,
) -> None:
    def lead(host_of_dp: str) -> dict[str, Any]:
        sweep = Sweep(tmp_path / host_of_dp)
        sweep.repeat("single", 1, [1000, 1005, 995], environment={"host": "node1"})
        sweep.repeat("dp", 2, [1500, 1505, 1495], environment={"host": host_of_dp})
        sweep.repeat("ddp", 2, [1900, 1905, 1895], environment={"host": "node3"})
        return dict(read(sweep.write())[2]["lead"])

    alone = lead("node2")
    assert findings(alone) == {"not_compared": {"others": ["dp × 2", "ddp × 2"]}}
    assert alone["command"] == "" and alone["point"] is None
    compared = lead("node1")
    assert compared["point"] == "dp × 2"
    found = findings(compared)
    assert found["faster_than_single"]["contrast"]["ratio"] == pytest.approx(1.5, abs=0.01)
    assert found["not_compared"] == {"others": ["ddp × 2"]}


def test_report_counts_a_run_once_when_both_the_run_and_its_sweep_are_given(tmp_path: Path) -> None:
    sweep = full_sweep(tmp_path / "s")
    folder = sweep.write()
    _, _, plain = read(folder / "4", folder)
    assert plain["counts"] == "15 of 15 jobs done"
    assert len(plain["runs"]) == 15


def test_report_names_the_first_disturbance_when_20_runs_had_different_disturbances(
    tmp_path: Path,
) -> None:
    """The named disturbance must be the same in every process. The iteration order of a set of
    strings is not.
    """
    sweep = Sweep(tmp_path / "s")
    for number in range(20):
        flags = [f"other programs kept {number} processors busy"]
        sweep.add("single", 1, 1000 + number, block=number, flags=flags)
    html, _, plain = read(sweep.write())
    reason = findings(plain["lead"])["disturbed"]["reason"]
    assert reason == "other programs kept 0 processors busy"
    assert html.count("kept: run") == 12 and "kept: 8 more" in html

"""What the report decides, and from which runs: the lead, the contrasts, what is pooled, marked, and left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from report_sweeps import SPEEDS, Sweep, full_sweep, read

from src.engine.report.statistics import FAILS, HOLDS, UNDECIDED, UNMEASURED

pytestmark = pytest.mark.usefixtures("without_plots")


def contrasts(plain: dict[str, Any], measure: str = "images_per_sec") -> dict[tuple[str, str], dict[str, Any]]:
    return {(c["a"], c["b"]): c for c in plain["contrasts"] if c["measure"] == measure}


def test_first_sentence_has_the_ratio_its_interval_and_the_command(tmp_path: Path) -> None:
    html, markdown, plain = read(full_sweep(tmp_path / "s").write())
    lead = plain["lead"]
    assert lead["sentence"].startswith("ddp on 4 devices trains 3.6")
    assert "(95 %: 3." in lead["sentence"] and "as fast as single." in lead["sentence"]
    assert lead["command"] == "python train.py parallel=ddp parallel.devices=4"
    assert lead["contrast"]["verdict"] == HOLDS
    assert lead["sentence"] in html and lead["command"] in html and lead["command"] in markdown


def test_first_sentence_follows_the_figures(tmp_path: Path) -> None:
    speeds = SPEEDS | {("ddp", 4): 500.0, ("ddp", 2): 600.0, ("dp", 2): 700.0, ("dp", 4): 800.0}
    lead = read(full_sweep(tmp_path / "s", speeds).write())[2]["lead"]
    assert lead["point"] == "single × 1"
    assert lead["sentence"].startswith("Stay with single on 1 device: dp on 4 devices trains 0.80 ×")


def test_the_command_trains_and_does_not_repeat_the_benchmark(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path / "s")
    sweep.repeat("single", 1, [1000, 1010], config={"train": {"max_steps": 40, "epochs": 3, "evaluate_every": 0}})
    for job in sweep.jobs:
        job["overrides"] = ["experiment=compare", "model=vit_tiny", "train.max_steps=40", "sweep.repeats=2"]
    command = read(sweep.write())[2]["lead"]["command"]
    assert command.startswith("python train.py experiment=compare model=vit_tiny train.max_steps=null train.epochs=")
    assert "=40" not in command and "sweep." not in command


def test_one_slow_repeat_does_not_make_the_lead_false(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path / "s")
    sweep.repeat("single", 1, [1000, 1010, 990])
    sweep.repeat("dp", 2, [1500, 1510, 1490])
    sweep.repeat("ddp", 2, [1900, 1910, 980])
    html, _, plain = read(sweep.write())
    assert plain["lead"]["point"] == "ddp × 2"
    assert "Outlier, kept: run 8 (ddp × 2) at 980 images/s" in html


def test_a_simpler_point_leads_only_where_it_is_shown_to_be_as_fast(tmp_path: Path) -> None:
    found = []
    for name, noise in (("quiet", 0.001), ("noisy", 0.05)):
        sweep = Sweep(tmp_path / name)
        sweep.repeat("dp", 2, [1500 * (1 + noise * k) for k in (0, 1, -1)])
        sweep.repeat("ddp", 2, [1507 * (1 + noise * k) for k in (1, 0, -1)])
        found.append(read(sweep.write())[2]["lead"])
    assert [lead["point"] for lead in found] == ["dp × 2", "ddp × 2"]
    assert "at most 3 % slower" in found[0]["sentence"]


def test_only_named_pairs_are_compared(tmp_path: Path) -> None:
    found = contrasts(read(full_sweep(tmp_path / "s").write())[2])
    single = {(f"{s} × {n}", "single × 1") for s in ("dp", "ddp") for n in (2, 4)}
    assert set(found) == single | {("ddp × 2", "dp × 2"), ("ddp × 4", "dp × 4")}
    assert all(c["n"] == 3 and c["low"] < c["ratio"] < c["high"] for c in found.values())


def test_the_smallest_difference_is_the_sweeps_own(tmp_path: Path) -> None:
    found = []
    for smallest in (0.03, 0.2):
        sweep = Sweep(tmp_path / f"s{smallest}")
        for strategy, devices, speeds in (("single", 1, [1000, 1001, 999]), ("ddp", 2, [1101, 1099, 1100])):
            sweep.repeat(strategy, devices, speeds, config={"sweep": {"smallest_difference": smallest}})
        found.append(contrasts(read(sweep.write())[2])["ddp × 2", "single × 1"]["verdict"])
    assert found == [HOLDS, FAILS]


def test_one_block_decides_nothing(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path / "s")
    for strategy, devices, speed in (("single", 1, 1000), ("dp", 2, 1500), ("ddp", 2, 1900)):
        sweep.add(strategy, devices, speed)
    _, _, plain = read(sweep.write())
    assert {c["verdict"] for c in plain["contrasts"]} == {UNDECIDED}
    assert "undecided: without repeats the noise is not known" in plain["lead"]["sentence"]


def test_nothing_is_ranked_in_words_without_a_test(tmp_path: Path) -> None:
    html, markdown, _ = read(full_sweep(tmp_path / "s").write())
    for word in ("soonest", "fastest", "Fastest"):
        assert word not in html and word not in markdown


def test_a_mostly_flagged_sweep_says_so_first_and_decides_nothing(tmp_path: Path) -> None:
    sweep = full_sweep(tmp_path / "s")
    flags = ["another program used 0.9 of a core"]
    for place, (strategy, devices) in enumerate(SPEEDS):
        sweep.repeat(strategy, devices, [1000 * devices + place] * 4, flags=flags)
    html, _, plain = read(sweep.write())
    assert plain["lead"]["sentence"].startswith("No verdict: 20 of 35 runs were disturbed (another program used 0.9")
    assert plain["lead"]["command"] == ""
    assert {c["verdict"] for c in plain["contrasts"]} == {UNMEASURED}
    claims = {c["number"]: c["verdict"] for c in plain["claims"]}
    assert claims[1] == claims[2] == claims[11] == UNMEASURED
    assert html.index("No verdict") < html.index("<h2>")


def test_a_flagged_run_is_marked_and_kept(tmp_path: Path) -> None:
    sweep = full_sweep(tmp_path / "s")
    sweep.add("ddp", 2, 1905, block=3, flags=["the second half ran 20 % slower"])
    sweep.add("single", 1, 1005, block=3)
    html, _, plain = read(sweep.write())
    assert contrasts(plain)["ddp × 2", "single × 1"]["n"] == 4
    assert "Flagged: run 15 (ddp × 2): the second half ran 20 % slower." in html and "4, 1 flagged" in html


def test_a_run_with_neighbours_is_shown_and_never_compared(tmp_path: Path) -> None:
    sweep = full_sweep(tmp_path / "s")
    sweep.add("ddp", 2, 400, block=3, neighbours=2)
    html, _, plain = read(sweep.write())
    assert contrasts(plain)["ddp × 2", "single × 1"]["n"] == 3
    assert "2 other jobs ran beside it" in html


def test_a_lead_without_a_single_to_compare_with_says_what_would_tell(tmp_path: Path) -> None:
    for name, changes in (("none", None), ("beside others", {"neighbours": 1})):
        sweep = Sweep(tmp_path / name)
        sweep.repeat("ddp", 2, [1900, 1910, 1890])
        if changes:
            sweep.repeat("single", 1, [1000, 1010, 990], **changes)
        lead = read(sweep.write())[2]["lead"]
        assert lead["sentence"].startswith("ddp on 2 devices has the highest estimate")
        assert "parallel=single parallel.devices=1" in lead["sentence"] and lead["contrast"] is None


def test_a_slow_rank_is_named_with_its_host(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path / "s")
    ranks = [{"rank": r, "host": f"node{r}", "data_ms": 1.0, "compute_ms": 12.0 if r == 3 else 9.0} for r in range(4)]
    sweep.repeat("ddp", 4, [3600, 3610, 3590], ranks=ranks)
    html, _, plain = read(sweep.write())
    assert plain["groups"][0]["warnings"] == [
        "ddp × 4: rank 3 on node3 needs 30 % longer for its part of a step (data and computing) than the median rank."
    ]
    assert "rank 3 on node3" in html


UNLIKE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "workers": (
        {"config": {"data": {"workers": 0, "batch_size": 64}}},
        {"config": {"data": {"workers": 4, "batch_size": 64}}},
    ),
    "commit": ({"environment": {"commit": "aaa"}}, {"environment": {"commit": "bbb"}}),
    "changes": ({"environment": {"dirty": False}}, {"environment": {"dirty": True}}),
    "driver": ({"environment": {"driver": "1"}}, {"environment": {"driver": "2"}}),
    "precision": ({"config": {"train": {"precision": "fp32"}}}, {"config": {"train": {"precision": "bf16"}}}),
    "nodes": ({"world_size": 4}, {"world_size": 4, "nodes": 2}),
}


@pytest.mark.parametrize("key", UNLIKE)
def test_only_like_is_pooled(tmp_path: Path, key: str) -> None:
    sweep = Sweep(tmp_path / "s")
    for changes in UNLIKE[key]:
        sweep.repeat("ddp", 4, [3600, 3610], **changes)
    points = read(sweep.write())[2]["points"]
    assert [len(point["runs"]) for point in points] == [2, 2]


def test_workers_that_follow_from_the_strategy_part_nothing(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path / "s")
    sweep.repeat("single", 1, [1000, 1010], config={"data": {"workers": 4, "batch_size": 64}})
    sweep.repeat("ddp", 2, [1900, 1910], config={"data": {"workers": 2, "batch_size": 64}})
    assert [len(group["points"]) for group in read(sweep.write())[2]["groups"]] == [2]


def test_hosts_are_blocks_of_their_own_and_said(tmp_path: Path) -> None:
    """The second host is half as fast: within each, ddp is 1.9 times single."""
    sweep = Sweep(tmp_path / "s")
    for host, factor in (("node1", 1.0), ("node2", 0.5)):
        where = {"environment": {"host": host}}
        sweep.repeat("single", 1, [1000 * factor, 1010 * factor], **where)
        sweep.repeat("ddp", 2, [1900 * factor, 1905 * factor], **where)
    html, _, plain = read(sweep.write())
    found = contrasts(plain)["ddp × 2", "single × 1"]
    assert found["verdict"] == HOLDS and found["high"] / found["low"] < 1.1
    assert "Runs on 2 hosts (node1, node2)" in html


def test_points_without_a_common_block_are_not_led_by_one_of_them(tmp_path: Path) -> None:
    found = {}
    for hosts in (("node1", "node2", "node3"), ("node1", "node1", "node2")):
        sweep = Sweep(tmp_path / "".join(hosts))
        for (strategy, devices, speed), host in zip(
            (("single", 1, 1000), ("dp", 2, 1500), ("ddp", 2, 1900)), hosts, strict=True
        ):
            sweep.repeat(strategy, devices, [speed, speed + 5, speed - 5], environment={"host": host})
        found[len(set(hosts))] = read(sweep.write())[2]["lead"]
    assert found[3]["sentence"].startswith(
        "No verdict: no block has run single on 1 device on one host with any of these: dp × 2; ddp × 2."
    )
    assert found[3]["command"] == "" and found[3]["point"] is None
    assert found[2]["sentence"].startswith("dp on 2 devices trains 1.50 ×") and found[2]["point"] == "dp × 2"
    assert found[2]["sentence"].endswith("Not compared, for want of a common block: ddp × 2.")


def test_a_sweep_given_with_one_of_its_runs_counts_it_once(tmp_path: Path) -> None:
    sweep = full_sweep(tmp_path / "s")
    folder = sweep.write()
    _, _, plain = read(folder / "4", folder)
    assert plain["counts"] == "15 of 15 jobs done"
    assert len(plain["runs"]) == 15


def test_baseline_runs_outside_the_blocks_decide_nothing(tmp_path: Path) -> None:
    sweep = full_sweep(tmp_path / "s")
    for speed in (300, 290):
        sweep.add("single", 1, speed)
        sweep.jobs[-1]["block"] = None
    html, _, plain = read(sweep.write())
    assert contrasts(plain)["ddp × 2", "single × 1"]["n"] == 3
    assert plain["points"][0]["images_per_sec"] == {"median": 1000, "low": 990, "high": 1010, "count": 3}
    assert "The baseline, first and last: 300 and 290 images/s." in html


def test_a_sweep_of_which_only_the_first_baseline_run_has_ended_has_a_report(tmp_path: Path) -> None:
    """Of dp on CPU, whose devices share one figure of memory: no repeat has one yet."""
    sweep = Sweep(tmp_path / "s", accelerator="cpu")
    sweep.add("dp", 2)
    sweep.jobs[-1]["block"] = None
    sweep.row("parallel=dp", "parallel.devices=2", status="running")
    html, _, plain = read(sweep.write("running"))
    assert plain["points"][0]["peak_bytes"] == [] and "1 of 2 jobs done" in html


def test_the_baseline_of_each_sweep_is_told_by_itself(tmp_path: Path) -> None:
    folders = []
    for name, first in (("a", 300), ("b", 500)):
        sweep = Sweep(tmp_path / name)
        for speed, block in ((first, None), (1000, 0), (1010, 1), (first - 10, None)):
            sweep.add("single", 1, speed, block=block or 0)
            sweep.jobs[-1] |= {"block": block, "position": len(sweep.jobs)}
        folders.append(sweep.write())
    html = read(*folders)[0]
    assert "The baseline, first and last: 300 and 290 images/s." in html
    assert "The baseline, first and last: 500 and 490 images/s." in html


def test_of_many_disturbances_the_commonest_is_named_else_the_first(tmp_path: Path) -> None:
    """Always the same one: the order of a set differs from command to command."""
    sweep = Sweep(tmp_path / "s")
    for number in range(20):
        sweep.add("single", 1, 1000 + number, block=number, flags=[f"other programs kept {number} processors busy"])
    html, _, plain = read(sweep.write())
    assert "(other programs kept 0 processors busy)" in plain["lead"]["sentence"]
    assert html.count("Flagged: run") == 12 and "Flagged: 8 more, in report.csv." in html


def test_dp_as_threads_is_in_no_comparison_of_speed(tmp_path: Path) -> None:
    found = contrasts(read(full_sweep(tmp_path / "s", accelerator="cpu").write())[2])
    assert set(found) == {("ddp × 2", "single × 1"), ("ddp × 4", "single × 1")}

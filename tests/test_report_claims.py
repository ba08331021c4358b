"""Each claim of the report can fail, through the files of a run, and says so where the figures cannot tell."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from report_sweeps import GIB, SPEEDS, Sweep, full_sweep, read, verdicts

from src.engine.config.resolve import resolve
from src.engine.report.statistics import FAILS, HOLDS, UNDECIDED, UNMEASURED
from src.schema import AugmentConfig, Config

pytestmark = pytest.mark.usefixtures("without_plots")


def test_all_claims_are_there_once_and_in_order(tmp_path: Path) -> None:
    claims = read(full_sweep(tmp_path / "s").write())[2]["claims"]
    assert [claim["number"] for claim in claims] == list(range(1, 18))
    assert {claim["verdict"] for claim in claims} <= {HOLDS, FAILS, UNDECIDED, UNMEASURED}
    assert all(claim["runs"] for claim in claims if claim["verdict"] != UNMEASURED)
    assert all(claim["reason"] for claim in claims if claim["verdict"] == UNMEASURED)


def test_claims_hold_on_figures_that_bear_them_out(tmp_path: Path) -> None:
    expected = dict.fromkeys(range(1, 18), HOLDS) | dict.fromkeys((6, 10, 14, 15), UNMEASURED)
    assert verdicts(full_sweep(tmp_path / "s").write()) == expected


LESS_SPEED = {("ddp", 2): 1200, ("ddp", 4): 1300}
BUSY_PARTS = {"data_ms": 1, "compute_ms": 2, "communication_ms": 16, "other_ms": 1}
# claim -> what is changed in the runs of which strategy, so that the claim no longer holds
FLIPS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "dp fills device 0": (3, "dp", {"memory": [{"device": n, "peak_bytes": GIB} for n in range(2)]}),
    "uneven ddp": (4, "ddp", {"memory": [{"device": n, "peak_bytes": (n + 1) * GIB} for n in range(2)]}),
    "other replicas": (4, "ddp", {"proof": {"hashes_equal": False}}),
    "idle cores": (5, "ddp", {"cpu": {"seconds_per_second": 0.5}}),
    "more bytes": (
        7,
        "ddp",
        {"communication": {"bytes_busiest_link": 1e9, "ms_per_step": 2, "exposed_ms_per_step": 1}},
    ),
    "nothing hidden": (
        7,
        "ddp",
        {"communication": {"bytes_busiest_link": 1e6, "ms_per_step": 2, "exposed_ms_per_step": 2}},
    ),
    "hashes differ": (8, "ddp", {"proof": {"hashes_equal": False}}),
    "drifted": (8, "ddp", {"status": "failed", "reason": "the ranks end with different parameters: no sync"}),
    "index twice": (9, "ddp", {"proof": {"indices_seen": 10, "indices_distinct": 9, "indices_expected": 10}}),
    "index missing": (9, "ddp", {"proof": {"indices_seen": 9, "indices_distinct": 9, "indices_expected": 10}}),
    "quick start": (11, "ddp", {"seconds": {"start_to_first_step": 0.1}}),
    "more files": (12, "ddp", {"proof": {"files_per_rank": {"0": 5, "1": 5}}}),
    "other backend": (13, "ddp", {"backend": "gloo"}),
    "idle ddp": (16, "ddp", {"memory": [{"device": n, "peak_bytes": GIB, "utilisation": 0.1} for n in range(2)]}),
    "busy waiting": (16, "ddp", {"step": BUSY_PARTS}),
    "two optimizers": (17, "dp", {"proof": {"optimizers": 2}}),
    "one optimizer": (17, "ddp", {"proof": {"optimizers": 1}}),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", FLIPS)
def test_verdict_flips_with_its_figure(tmp_path: Path, name: str) -> None:
    number, changed, changes = FLIPS[name]
    found = []
    for altered in ({}, changes):
        sweep = Sweep(tmp_path / f"s{len(found)}")
        for strategy, devices, speeds in (
            ("single", 1, [1000, 1009, 991]),
            ("dp", 2, [1500, 1490, 1510]),
            ("ddp", 2, [1910, 1900, 1890]),
        ):
            sweep.repeat(strategy, devices, speeds, **(altered if strategy == changed else {}))
        found.append(verdicts(sweep.write())[number])
    assert found == [HOLDS, FAILS]


@pytest.mark.parametrize(
    ("speeds", "number", "expected"),
    [
        ({("ddp", 2): 1400, ("ddp", 4): 1600}, 1, FAILS),
        ({("ddp", 4): 1800}, 1, FAILS),  # faster on 4 devices, but its lead has shrunk
        (LESS_SPEED, 5, FAILS),  # more processor time without more images is waiting in a loop
        ({("ddp", 4): 2000}, 2, FAILS),
        ({("ddp", 2): 1900, ("ddp", 4): 3600}, 2, HOLDS),
        (LESS_SPEED, 15, FAILS),
    ],
)
def test_speed_claims_flip_with_speed(
    tmp_path: Path, speeds: dict[tuple[str, int], float], number: int, expected: str
) -> None:
    assert verdicts(full_sweep(tmp_path / "s", SPEEDS | speeds).write())[number] == expected


def test_options_on_as_many_devices_are_no_more_devices(tmp_path: Path) -> None:
    """Both buckets beat dp, the second by less: that says nothing about a lead over more devices."""
    sweep = full_sweep(tmp_path / "s", {("single", 1): 1000, ("dp", 2): 1500})
    for bucket, speeds in ((1, [2500, 2510, 2490]), (25, [1900, 1910, 1890])):
        sweep.repeat("ddp", 2, speeds, options={"bucket_cap_mb": bucket})
    assert verdicts(sweep.write())[1] == HOLDS


def test_noise_leaves_a_claim_undecided_and_says_what_would_do(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path / "s")
    sweep.repeat("single", 1, [1000, 1300, 800])
    sweep.repeat("dp", 2, [1500, 1400, 1700])
    sweep.repeat("ddp", 2, [1800, 1900, 1500])
    claims = {claim["number"]: claim for claim in read(sweep.write())[2]["claims"]}
    assert claims[1]["verdict"] == claims[2]["verdict"] == UNDECIDED
    assert "could have seen a difference of" in claims[1]["reason"] and "blocks would do" in claims[1]["reason"]


def test_small_layers_are_weighed_against_large_ones(tmp_path: Path) -> None:
    def deep(depth: int) -> dict[str, Any]:
        return {"model": {"name": "vit", "kwargs": {"depth": depth}}}

    found = []
    for many in (1100, 1990, 1800):
        sweep = Sweep(tmp_path / f"s{many}")
        for depth, speed in ((24, many), (2, 1800)):
            sweep.repeat("single", 1, [1000, 1011, 993], config=deep(depth))
            sweep.repeat("dp", 2, [speed, speed - 8, speed + 9], config=deep(depth))
        found.append(verdicts(sweep.write())[6])
    assert found == [HOLDS, FAILS, UNDECIDED]


def test_an_rnn_is_weighed_against_large_layers_and_not_against_small_ones(tmp_path: Path) -> None:
    """Between the two transformers in depth: it would hold against the deeper one whatever it does."""
    found = []
    for rnn in (1400, 1990):
        sweep = Sweep(tmp_path / f"s{rnn}")
        for kwargs, speed in (({"depth": 32}, 1200), ({"layers": [4, 4]}, rnn), ({"depth": 2}, 1800)):
            config = {"model": {"name": "model", "kwargs": kwargs}}
            sweep.repeat("single", 1, [1000, 1004, 997], config=config)
            sweep.repeat("dp", 2, [speed, speed - 4, speed + 5], config=config)
        claim = next(c for c in read(sweep.write())[2]["claims"] if c["number"] == 6)
        assert str(claim).count("at depth 2") == 1 and "at depth 8" not in str(claim)
        found.append(claim["verdict"])
    assert found == [HOLDS, FAILS]


def test_unequal_chunks_and_refused_batches_show_claim_10_and_small_batches_break_it(tmp_path: Path) -> None:
    def verdict(change: Callable[[Sweep], object]) -> str:
        sweep = Sweep(tmp_path / f"s{len(list(tmp_path.iterdir()))}")
        sweep.add("dp", 2)
        change(sweep)
        return verdicts(sweep.write())[10]

    def skipped(batch: int, **augment: float) -> Callable[[Sweep], object]:
        """With the very words in which such a job is refused."""
        config = Config()
        config.parallel.strategy, config.parallel.devices, config.data.batch_size = "dp", 4, batch
        config.parallel.accelerator, config.data.augment = "cpu", AugmentConfig(**augment)
        with pytest.raises(ValueError, match="batch_size") as refused:
            resolve(config)
        overrides = ("parallel=dp", "parallel.devices=4")
        return lambda sweep: sweep.row(*overrides, status="skipped", reason=str(refused.value))

    assert verdict(lambda sweep: None) == UNMEASURED
    assert verdict(skipped(9, mixup=0.2)) == UNMEASURED  # refused for its pairs, not for its devices
    assert verdict(skipped(2)) == HOLDS
    assert verdict(lambda sweep: sweep.add("dp", 2, proof={"chunk_sizes": [4, 3]})) == HOLDS
    assert verdict(lambda sweep: sweep.add("dp", 4, batch_size=2)) == FAILS


def test_several_nodes_show_claim_14_and_dp_on_them_breaks_it(tmp_path: Path) -> None:
    def verdict(strategy: str) -> str:
        sweep = Sweep(tmp_path / strategy)
        sweep.add(strategy, 2, nodes=2, world_size=4)
        return verdicts(sweep.write())[14]

    assert (verdict("ddp"), verdict("dp")) == (HOLDS, FAILS)


def test_what_cpu_cannot_show_is_not_claimed_there(tmp_path: Path) -> None:
    found = verdicts(full_sweep(tmp_path / "s", accelerator="cpu").write())
    assert {number for number, verdict in found.items() if verdict == UNMEASURED} == {1, 3, 4, 5, 6, 7, 10, 14, 15, 16}
    assert found[2] == HOLDS  # ddp on CPU is processes: its speed is its own


def test_waiting_kernels_that_cannot_be_told_apart_leave_claim_16_open(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path / "s")
    sweep.repeat("dp", 2, [1500, 1490, 1510])
    sweep.repeat("ddp", 2, [1910, 1900, 1890], step=None)
    assert verdicts(sweep.write())[16] == UNMEASURED


def test_corrections_have_a_figure_where_these_runs_show_one(tmp_path: Path) -> None:
    found = {c["statement"]: c["figure"] for c in read(full_sweep(tmp_path / "s").write())[2]["corrections"]}
    assert "6 of 6 runs" in found["DDP shares one model between processes"]
    assert "dp × 2: 1 process" in found["DataParallel is multi-process"]
    assert found["Windows has no DDP"] == ""  # these runs were on Linux, which proves nothing


@pytest.mark.parametrize(
    ("statement", "strategy", "changes", "figure"),
    [
        ("DP needs equal chunks", "dp", {"proof": {"chunk_sizes": [4, 3]}}, "[4, 3] on 2 devices"),
        ("DP needs equal chunks", "dp", {"proof": {"chunk_sizes": [4, 4]}}, ""),
        ("Under DP only device 0 holds the model", "dp", {}, "6.00, 2.00 GiB"),
        ("Under DP only device 0 holds the model", "ddp", {}, ""),
        (
            "DDP saves memory by accumulation",
            "dp",
            {"config": {"train": {"accumulate": 4}}},
            "dp × 2 with train.accumulate=4",
        ),
        ("DDP saves memory by accumulation", "ddp", {"config": {"train": {"accumulate": 1}}}, ""),
        ("DDP shares one model between processes", "ddp", {"proof": {"hashes_equal": False}}, "0 of 1 runs"),
        ("Windows has no DDP", "ddp", {"backend": "gloo"}, ""),
        ("Windows has no DDP", "ddp", {"backend": "gloo", "environment": {"platform": "Windows-11"}}, "on Windows-11"),
        ("NCCL serves Windows", "ddp", {}, ""),
        ("DP passes parameters through the CPU", "dp", {}, ""),
        ("DP scatters the loss", "dp", {}, ""),
    ],
)
def test_a_correction_takes_its_figure_from_the_runs_files_or_has_none(
    tmp_path: Path, statement: str, strategy: str, changes: dict[str, Any], figure: str
) -> None:
    sweep = Sweep(tmp_path / "s")
    sweep.add(strategy, 2, **changes)
    found = {c["statement"]: c["figure"] for c in read(sweep.write())[2]["corrections"]}
    assert figure in found[statement] and bool(figure) == bool(found[statement])

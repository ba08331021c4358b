"""Test the verdict on each claim in the report, which is computed from the files of runs. Some
tests make each claim fail.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from timm_parallel import app
from timm_parallel.errors import ReplicasDifferError
from timm_parallel.lab.analysis.statistics import (
    INCONCLUSIVE,
    NOT_MEASURABLE,
    NOT_SUPPORTED,
    SUPPORTED,
)
from timm_parallel.testing.report_sweeps import GIB, SPEEDS, Sweep, full_sweep, read, verdicts

pytestmark = pytest.mark.usefixtures("without_plots")


NUMBERS = [1, 2, 3, 4, 5, 6, 7, 8, 11, 16]


def test_report_lists_every_claim_about_dp_and_ddp_as_supported_when_measurements_agree(
    tmp_path: Path,
) -> None:
    claims = read(full_sweep(tmp_path / "s").write())[2]["claims"]
    # Claim 6 needs two models.
    expected = dict.fromkeys(NUMBERS, SUPPORTED) | {6: NOT_MEASURABLE}
    assert [(claim["number"], claim["verdict"]) for claim in claims] == [*expected.items()]
    assert all(claim["reason"] if claim["number"] == 6 else claim["runs"] for claim in claims)


@pytest.mark.parametrize(
    ("points", "has_claims"),
    [
        ([("single", 1), ("dp", 2), ("ddp", 2)], True),
        ([("single", 1), ("ddp", 2)], False),
        ([("single", 1), ("dp", 2)], False),
        ([("dp", 2), ("ddp", 1)], False),
    ],
)
def test_report_lists_claims_about_dp_and_ddp_only_when_both_ran_on_two_devices(
    tmp_path: Path, points: list[tuple[str, int]], has_claims: bool
) -> None:
    sweep = Sweep(tmp_path / "s")
    for strategy, devices in points:
        sweep.add(strategy, devices)
    # A job that was skipped does not count.
    sweep.row("parallel=dp", "parallel.devices=2", status="skipped")
    html, markdown, plain = read(sweep.write())
    assert [claim["number"] for claim in plain["claims"]] == (NUMBERS if has_claims else [])
    for text in (html, markdown):
        assert ("Claims about DataParallel" in text) == has_claims
        assert ("docs/dp_and_ddp.md" in text) == has_claims


def test_report_links_to_the_documentation_page_about_dp_and_ddp_if_the_project_has_it(
    tmp_path: Path,
) -> None:
    # Building an app makes it the current one.
    replace(app.current(), root=tmp_path)
    page = tmp_path / "docs" / "dp_and_ddp.md"
    folder = full_sweep(tmp_path / "a sweep").write()
    html, markdown, _ = read(folder)
    assert "docs/dp_and_ddp.md" in html
    assert not re.search(r'href="[^"]*dp_and_ddp|\]\([^)]*dp_and_ddp', html + markdown)
    page.parent.mkdir()
    page.touch()
    html, markdown, plain = read(folder)
    [address] = set(re.findall(r'<a href="([^"]*dp_and_ddp[^"]*)"', html))
    assert (folder / address).resolve() == page
    assert f"]({address})" in markdown
    assert "corrections" not in plain


BUSY_PARTS = {"data_ms": 1, "compute_ms": 2, "communication_ms": 16, "other_ms": 1}
# Dictionary from a name to the claims that are then not supported, a strategy, and changes to the
# records of the runs with this strategy.
FLIPS: dict[str, tuple[set[int], str, dict[str, Any]]] = {
    "dp fills device 0": (
        {3},
        "dp",
        {"memory": [{"device": n, "peak_bytes": GIB, "utilisation": 0.4} for n in range(2)]},
    ),
    "uneven ddp": (
        {4},
        "ddp",
        {
            "memory": [
                {"device": n, "peak_bytes": (n + 1) * GIB, "utilisation": 0.95} for n in range(2)
            ]
        },
    ),
    "other replicas": ({4, 8}, "ddp", {"proof": {"hashes_equal": False}}),
    "idle cores": ({5}, "ddp", {"cpu": {"seconds_per_second": 0.5}}),
    "nothing hidden": ({7}, "ddp", {"communication": {"ms_per_step": 2, "exposed_ms_per_step": 2}}),
    "quick start": ({11}, "ddp", {"seconds": {"start_to_first_step": 0.1}}),
    "idle ddp": (
        {16},
        "ddp",
        {"memory": [{"device": n, "peak_bytes": 4 * GIB, "utilisation": 0.1} for n in range(2)]},
    ),
    "busy waiting": ({16}, "ddp", {"step": BUSY_PARTS}),
}


@pytest.mark.parametrize("name", FLIPS)
def test_claim_about_dp_and_ddp_is_not_supported_when_a_measurement_contradicts_the_claim(
    tmp_path: Path, name: str
) -> None:
    contradicted, changed, changes = FLIPS[name]
    sweep = Sweep(tmp_path / "s")
    for strategy, devices, speeds in (
        ("single", 1, [1000, 1009, 991]),
        ("dp", 2, [1500, 1490, 1510]),
        ("ddp", 2, [1910, 1900, 1890]),
    ):
        sweep.repeat(strategy, devices, speeds, **(changes if strategy == changed else {}))
    results = verdicts(sweep.write())
    assert {n for n, verdict in results.items() if verdict == NOT_SUPPORTED} == contradicted


def test_claim_that_replicas_stay_equal_is_not_supported_when_a_run_failed_because_they_differed(
    tmp_path: Path,
) -> None:
    sweep = full_sweep(tmp_path / "s")
    sweep.add("ddp", 2, status="failed", failure={"exception": ReplicasDifferError.__name__})
    assert verdicts(sweep.write())[8] == NOT_SUPPORTED


@pytest.mark.parametrize(
    ("peaks", "expected"),
    [
        ([GIB, GIB], SUPPORTED),
        # The second device needs as much memory under fsdp as under ddp. So fsdp has saved no
        # memory on this device.
        ([GIB, 4 * GIB], NOT_SUPPORTED),
        # The devices of ddp are other ones.
        ([GIB] * 4, NOT_MEASURABLE),
    ],
)
def test_claim_that_fsdp_needs_less_memory_than_ddp_depends_on_peak_bytes_per_device(
    tmp_path: Path, peaks: list[int], expected: str
) -> None:
    sweep = Sweep(tmp_path / "s")
    sweep.repeat("ddp", 2, [1910, 1900, 1890])
    memory = [{"device": n, "peak_bytes": p} for n, p in enumerate(peaks)]
    sweep.repeat("fsdp", len(peaks), [1810, 1800, 1790], memory=memory)
    assert verdicts(sweep.write()) == {18: expected}


@pytest.mark.parametrize(
    ("speeds", "number", "expected"),
    [
        ({("ddp", 2): 1400, ("ddp", 4): 1600}, 1, NOT_SUPPORTED),
        # On four devices ddp is still faster than dp, but the advantage is smaller than on two
        # devices.
        ({("ddp", 4): 1800}, 1, NOT_SUPPORTED),
        # If more processor time gives no more images per second, the processors only wait in a
        # loop.
        ({("ddp", 2): 1200, ("ddp", 4): 1300}, 5, NOT_SUPPORTED),
        ({("ddp", 4): 2000}, 2, NOT_SUPPORTED),
        ({("ddp", 2): 1900, ("ddp", 4): 3600}, 2, SUPPORTED),
    ],
)
def test_verdicts_on_speed_claims_about_dp_and_ddp_follow_the_measured_speed_of_ddp(
    tmp_path: Path, speeds: dict[tuple[str, int], float], number: int, expected: str
) -> None:
    assert verdicts(full_sweep(tmp_path / "s", SPEEDS | speeds).write())[number] == expected


def test_claim_that_ddp_gains_with_more_devices_ignores_differences_between_bucket_sizes(
    tmp_path: Path,
) -> None:
    """With both bucket sizes, ddp is faster than dp on two devices. The difference between the
    bucket sizes says nothing about more devices.
    """
    sweep = full_sweep(tmp_path / "s", {("single", 1): 1000, ("dp", 2): 1500})
    for bucket, speeds in ((1, [2500, 2510, 2490]), (25, [1900, 1910, 1890])):
        sweep.repeat("ddp", 2, speeds, options={"bucket_cap_mb": bucket})
    assert verdicts(sweep.write())[1] == SUPPORTED


def test_speed_claim_is_inconclusive_and_states_the_repeats_needed_when_runs_are_noisy(
    tmp_path: Path,
) -> None:
    sweep = Sweep(tmp_path / "s")
    sweep.repeat("single", 1, [1000, 1300, 800])
    sweep.repeat("dp", 2, [1500, 1400, 1700])
    sweep.repeat("ddp", 2, [1800, 1900, 1500])
    claims = {claim["number"]: claim for claim in read(sweep.write())[2]["claims"]}
    assert claims[1]["verdict"] == claims[2]["verdict"] == INCONCLUSIVE
    assert re.search(r"[\d.]+ %; .* \d+ repeats", claims[1]["reason"])


@pytest.mark.slow(seconds=1)
@pytest.mark.parametrize(
    ("models", "expected"),
    [
        ([({"depth": 24}, 1100)], SUPPORTED),
        ([({"depth": 24}, 1990)], NOT_SUPPORTED),
        # The depth of the RNN lies between the depths of the two transformers. If the RNN were
        # compared with the deeper transformer, the claim could not fail.
        ([({"depth": 32}, 1200), ({"layers": [4, 4]}, 1400)], SUPPORTED),
        ([({"depth": 32}, 1200), ({"layers": [4, 4]}, 1990)], NOT_SUPPORTED),
    ],
)
def test_claim_that_dp_is_slow_with_small_layers_compares_each_model_with_the_shallowest(
    tmp_path: Path, models: list[tuple[dict[str, Any], float]], expected: str
) -> None:
    """`models`: size of each deep model, and its speed with dp."""
    sweep = Sweep(tmp_path / "s")
    for kwargs, speed in (*models, ({"depth": 2}, 1800)):
        config = {"model": {"name": "model", "kwargs": kwargs}}
        sweep.repeat("single", 1, [1000, 1011, 993], config=config)
        sweep.repeat("dp", 2, [speed, speed - 8, speed + 9], config=config)
        sweep.repeat("ddp", 2, [1900, 1890, 1910], config=config)
    claim = next(c for c in read(sweep.write())[2]["claims"] if c["number"] == 6)
    assert claim["verdict"] == expected
    assert str(claim).count("at depth 2") == 1 and "at depth 8" not in str(claim)


def test_report_on_a_cpu_has_no_claims_that_need_gpus_and_no_speed_of_dp(tmp_path: Path) -> None:
    plain = read(full_sweep(tmp_path / "s", accelerator="cpu").write())[2]
    results = {claim["number"]: claim["verdict"] for claim in plain["claims"]}
    unmeasured = [number for number, verdict in results.items() if verdict == NOT_MEASURABLE]
    assert unmeasured == [1, 3, 4, 5, 6, 7, 16]
    # On a CPU, ddp runs in separate processes. Its speed is therefore comparable, unlike that of
    # dp.
    assert results[2] == SUPPORTED
    speeds = {(c["a"], c["b"]) for c in plain["contrasts"] if c["measure"] == "images_per_sec"}
    assert speeds == {("ddp × 2", "single × 1"), ("ddp × 4", "single × 1")}


def test_claim_about_idle_devices_is_not_measurable_when_ddp_runs_have_no_step_times(
    tmp_path: Path,
) -> None:
    sweep = Sweep(tmp_path / "s")
    sweep.repeat("dp", 2, [1500, 1490, 1510])
    sweep.repeat("ddp", 2, [1910, 1900, 1890], step=None)
    assert verdicts(sweep.write())[16] == NOT_MEASURABLE

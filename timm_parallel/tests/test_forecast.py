"""Tests of the speed forecast for other numbers of devices. The forecast fits a scaling model to
the measurements of a sweep and reports its error.
"""

from __future__ import annotations

import json
import random
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from timm_parallel.lab.forecast.model import (
    Answer,
    Link,
    Measured,
    Model,
    fit,
    forecast,
    leave_one_out,
    notes_on,
)
from timm_parallel.lab.forecast.table import as_text, forecast_sweep
from timm_parallel.record.jobs import Job, Jobs
from timm_parallel.record.result import Result, write_result

TRUE = Model(
    fixed=0.004, per_image=0.001, hidden=0.3, link=Link(30e-6, 2e9), gradient_bytes=100_000_000
)


def run(
    devices: int, per_device: float, model: Model = TRUE, noise: float = 0.0, ring: bool = True
) -> Measured:
    factor = 1 + noise
    return Measured(
        devices,
        round(devices * per_device),
        model.seconds(devices, per_device) * factor,
        model.gradient_bytes if devices > 1 else 0,
        model.ring(devices) * factor if ring and devices > 1 else None,
    )


def strong(*counts: int, noise: random.Random | None = None, repeats: int = 1) -> list[Measured]:
    draw = (lambda: noise.gauss(0, 0.02)) if noise else (lambda: 0.0)
    return [run(n, 256 / n, noise=draw()) for n in counts for _ in range(repeats)]


def test_forecast_step_time_is_compute_plus_exposed_part_of_ring_all_reduce() -> None:
    assert TRUE.ring(1) == 0
    assert TRUE.ring(4) == pytest.approx(2 * 3 * 30e-6 + 2 * 3 / 4 * 1e8 / 2e9)
    compute = 0.004 + 0.001 * 64
    assert TRUE.seconds(4, 64) == pytest.approx(compute + TRUE.ring(4) - 0.3 * compute)
    hidden = Model(0.0, 0.001, 0.5, Link(0, 1e12), 1000)
    assert hidden.seconds(8, 10) == pytest.approx(0.01), (
        "a ring all-reduce hidden behind the backward pass must cost nothing"
    )


def test_forecast_reproduces_speeds_of_the_scaling_model_that_generated_the_measurements() -> None:
    answer = forecast(strong(1, 2, 4, 8))
    assert answer.error is not None and answer.error < 0.05
    for row in answer.strong:
        assert row.speed == pytest.approx(TRUE.speed(row.devices, 256 / row.devices), rel=0.1)
        assert row.low is not None and row.high is not None and row.low <= row.speed <= row.high
    assert [row.devices for row in answer.strong] == [1, 2, 4, 8, 16, 32, 64, 128, 256], (
        "the forecast must keep at least one image per device"
    )
    assert answer.weak[-1].devices == 1024
    assert answer.strong[0].efficiency == pytest.approx(1)
    efficiencies = [row.efficiency for row in answer.strong]
    assert efficiencies == sorted(efficiencies, reverse=True)
    assert answer.strong[1].measured == pytest.approx(TRUE.speed(2, 128))
    assert answer.strong[4].measured is None


def test_forecast_interval_from_noisy_measurements_contains_true_speed() -> None:
    held = 0
    for seed in range(3):
        answer = forecast(strong(1, 2, 4, noise=random.Random(seed), repeats=3), counts=(2, 8, 16))
        held += all(
            (row.low or 0) <= TRUE.speed(row.devices, 256 / row.devices) <= (row.high or 0)
            for row in answer.strong[1:]
        )
    assert held >= 2


def test_forecast_from_two_device_counts_has_no_error_estimate() -> None:
    answer = forecast(strong(1, 2))
    assert answer.error is None
    assert answer.residual < 0.01
    assert answer.verdict.startswith("unchecked")
    assert answer.strong[1].low is None, "an interval of width zero would claim certainty"


def test_forecast_notes_name_costs_fitted_as_zero_and_count_disturbed_runs() -> None:
    assert notes_on(TRUE, strong(1, 2, 4, 8)) == []
    # Measurements in which a step takes the same time for any batch size, and the all-reduce takes
    # no time.
    flat = [
        Measured(n, 256, 0.02, 1000 if n > 1 else 0, 1e-9 if n > 1 else None) for n in (1, 2, 4)
    ]
    notes = " ".join(notes_on(fit(flat), flat))
    assert "c1 = 0" in notes and "β without limit" in notes
    assert "c0" not in notes and "h = " not in notes
    runs = [replace(run, flagged=run.devices < 8) for run in strong(1, 2, 4, 8)]
    assert [note.partition(" runs")[0] for note in notes_on(TRUE, runs)] == ["3 of 4"]


def test_forecast_warns_when_the_leave_one_out_error_exceeds_15_percent() -> None:
    odd = [*strong(1, 2, 4), Measured(8, 256, 3 * TRUE.seconds(8, 32), TRUE.gradient_bytes, None)]
    answer = forecast(odd)
    assert answer.error is not None and answer.error > 0.15
    assert "do not rely on it" in answer.verdict
    assert leave_one_out(strong(1, 2, 4, 8))[0] == pytest.approx(0, abs=0.05)


def undescribed() -> list[Measured]:
    """Build two repeats of measurements on three numbers of devices. No scaling model of the
    forecast fits them, because the largest batch per device is the fastest.
    """
    runs = [
        Measured(1, 64, 64 / 2789, 0),
        Measured(2, 64, 64 / 1584, 244_000, 0.005),
        Measured(4, 64, 64 / 1400, 244_000, 0.005),
    ]
    return [replace(run, seconds=run.seconds * factor) for run in runs for factor in (0.999, 1.001)]


def test_forecast_warns_and_widens_intervals_when_the_fit_misses_measured_speeds() -> None:
    answer = forecast(undescribed(), counts=(2, 10_000))
    measured = [row for row in answer.strong + answer.weak if row.measured is not None]
    missed = max(abs(row.speed / row.measured - 1) for row in measured if row.measured)
    assert answer.residual == pytest.approx(missed, rel=0.01) and missed > 0.05
    assert answer.verdict.startswith("the model does not describe this sweep")
    assert f"{answer.residual:.0%}" in answer.verdict
    for row in measured:
        assert row.low is not None and row.high is not None and row.measured is not None
        assert row.low <= row.measured * 1.01 and row.measured <= row.high * 1.01, (
            "the interval must contain the measured speed"
        )


def test_forecast_prints_numbers_without_exponents_and_counts_disturbed_runs(
    tmp_path: Path,
) -> None:
    folder = sweep_folder(tmp_path)
    text = "\n".join(as_text(forecast_sweep(folder, counts=(2, 100_000))))
    assert re.search(r"\de[+-]?\d", text) is None, text
    [largest] = [line for line in text.splitlines() if line.split()[:1] == ["100,000"]]
    assert re.fullmatch(
        r"100,000 +64 +[\d,]+ +[\d,]+ +[\d,]+ +[\d.]+% +unknown", largest.strip()
    ), largest
    assert "low and high:" in text
    flagged = json.loads((folder / "0" / "result.json").read_text())
    (folder / "0" / "result.json").write_text(
        json.dumps(flagged | {"flags": ["a hypervisor took 20 %"]})
    )
    assert "1 of 3 runs" in "\n".join(as_text(forecast_sweep(folder)))


def test_forecast_error_is_below_5_percent_for_noise_free_runs_with_different_batch_sizes() -> None:
    """The measurements come from one scaling model without noise, for several values of
    data.batch_size. The fitted model must describe all of them.
    """
    runs = [run(devices, batch / devices) for devices in (1, 2, 4) for batch in (64, 256)]
    answer = forecast(runs)
    assert answer.error is not None and answer.error < 0.05


def test_forecast_predicts_speed_for_a_different_network_link() -> None:
    runs = strong(1, 2, 4, 8)
    slow = forecast(runs, bandwidth=25e6, latency=100e-6)
    truth = Model(TRUE.fixed, TRUE.per_image, TRUE.hidden, Link(100e-6, 25e6), TRUE.gradient_bytes)
    assert slow.strong[1].speed == pytest.approx(truth.speed(2, 128), rel=0.05)
    assert slow.strong[1].measured is None, (
        "the measured device counts used a different network link"
    )
    within = forecast(runs, bandwidth=25e6, devices_per_node=8)
    assert within.strong[3].speed == pytest.approx(forecast(runs).strong[3].speed)
    assert within.strong[4].speed < 0.5 * forecast(runs).strong[4].speed
    assert "not measured" in within.verdict


def test_forecast_is_limited_by_a_slow_data_loader_at_every_device_count() -> None:
    slow = Model(0.0, 0.001, 0.0, Link(1e-6, 1e12), 1000, data_rate=200.0)
    runs = [
        Measured(n, 64 * n, slow.seconds(n, 64), 1000 if n > 1 else 0, None, 0.8) for n in (1, 2, 4)
    ]
    assert fit(runs).data_rate == pytest.approx(200)
    assert forecast(runs).weak[-1].speed == pytest.approx(1024 * 200, rel=0.05)


def sweep_folder(
    folder: Path, neighbours: int = 0, knows_bytes: bool = True, warm_up: int | None = None
) -> Path:
    """Write the files of a sweep over three numbers of devices. If `warm_up` is given, the first
    job is a warm-up run of the baseline on this number of devices. It is ten times as slow.
    """
    jobs = Jobs(folder, "python train.py -m …", [])
    counts = [(devices, 0, 0.0) for devices in (1, 2, 4)]
    for number, (devices, block, noise) in enumerate(
        [(warm_up, None, 9.0), *counts] if warm_up else counts
    ):
        measured, name = run(devices, 64, noise=noise), str(number)
        (folder / name).mkdir(parents=True)
        (folder / name / "config.yaml").write_text("train: {accumulate: 1}\n")
        overrides = [f"parallel.devices={devices}", "model=resnet18", "parallel=ddp"]
        jobs.jobs.append(Job(number, name, name, overrides, block, status="done"))  # type: ignore[arg-type]
        strategy = "ddp" if devices > 1 else "single"
        result = Result(
            "done", strategy=strategy, devices=devices, world_size=devices, processes=devices
        )
        result.batch_size, result.neighbours, result.model = measured.images, neighbours, "resnet18"
        result.throughput = {"images_per_sec": measured.images / measured.seconds}
        result.communication = {
            "bytes_per_step": measured.gradient_bytes if knows_bytes else None,
            "ms_per_step": None if measured.ring is None else 1000 * measured.ring,
        }
        write_result(folder / name, result)
    jobs.write()
    return folder


def test_forecast_of_a_sweep_folder_returns_measured_speeds_per_model_as_text_and_json(
    tmp_path: Path,
) -> None:
    answers = forecast_sweep(sweep_folder(tmp_path), counts=(2, 8))
    assert list(answers) == ["model=resnet18"]
    answer: Answer = answers["model=resnet18"]
    assert answer.weak[1].measured == pytest.approx(TRUE.speed(2, 64))
    assert (
        json.loads(json.dumps(answers, default=asdict))["model=resnet18"]["weak"][1]["devices"] == 2
    )
    text = "\n".join(as_text(answers))
    assert "Gbit/s" in text and "strong" in text and "weak" in text


def test_forecast_ignores_the_warm_up_run_of_a_sweep(tmp_path: Path) -> None:
    [answer] = forecast_sweep(sweep_folder(tmp_path, warm_up=1), counts=(2, 8)).values()
    assert answer.weak[0].measured == pytest.approx(TRUE.speed(1, 64))


@pytest.mark.parametrize(
    "changes", [{"neighbours": 1}, {"knows_bytes": False}], ids=["concurrent jobs", "fsdp"]
)
def test_forecast_is_refused_when_no_run_has_usable_measurements(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match=r"parallel\.devices"):
        forecast_sweep(sweep_folder(tmp_path, **changes))

"""The forecast finds the model that made the figures, says how far it can be trusted, and answers what-if questions."""

from __future__ import annotations

import json
import random
from dataclasses import asdict
from pathlib import Path

import pytest

from src.engine.record.jobs import Job, Jobs
from src.engine.record.result import Result, write_result
from src.engine.report.forecast import Answer, Link, Measured, Model, fit, forecast, leave_one_out
from src.engine.report.forecast_table import as_text, forecast_sweep

TRUE = Model(fixed=0.004, per_image=0.001, hidden=0.3, link=Link(30e-6, 2e9), gradient_bytes=100_000_000)


def run(devices: int, per_device: float, model: Model = TRUE, noise: float = 0.0, ring: bool = True) -> Measured:
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


def test_the_step_is_compute_and_what_of_the_ring_is_not_hidden() -> None:
    assert TRUE.ring(1) == 0
    assert TRUE.ring(4) == pytest.approx(2 * 3 * 30e-6 + 2 * 3 / 4 * 1e8 / 2e9)
    compute = 0.004 + 0.001 * 64
    assert TRUE.seconds(4, 64) == pytest.approx(compute + TRUE.ring(4) - 0.3 * compute)
    hidden = Model(0.0, 0.001, 0.5, Link(0, 1e12), 1000)
    assert hidden.seconds(8, 10) == pytest.approx(0.01), "a ring that fits behind the backward pass costs nothing"


def test_it_finds_the_model_and_other_counts_follow() -> None:
    answer = forecast(strong(1, 2, 4, 8))
    assert answer.error is not None and answer.error < 0.05
    for row in answer.strong:
        assert row.speed == pytest.approx(TRUE.speed(row.devices, 256 / row.devices), rel=0.1)
        assert row.low is not None and row.high is not None and row.low <= row.speed <= row.high
    assert [row.devices for row in answer.strong] == [1, 2, 4, 8, 16, 32, 64, 128, 256], "one image per device at least"
    assert answer.weak[-1].devices == 1024
    assert answer.strong[0].efficiency == pytest.approx(1)
    efficiencies = [row.efficiency for row in answer.strong]
    assert efficiencies == sorted(efficiencies, reverse=True)
    assert answer.strong[1].measured == pytest.approx(TRUE.speed(2, 128))
    assert answer.strong[4].measured is None


def test_noisy_figures_widen_the_interval_that_holds_the_truth() -> None:
    held = 0
    for seed in range(3):
        answer = forecast(strong(1, 2, 4, noise=random.Random(seed), repeats=3), counts=(2, 8, 16))
        held += all(
            (row.low or 0) <= TRUE.speed(row.devices, 256 / row.devices) <= (row.high or 0) for row in answer.strong[1:]
        )
    assert held >= 2


def test_two_counts_are_unchecked_and_one_is_refused() -> None:
    answer = forecast(strong(1, 2))
    assert answer.error is None
    assert answer.verdict.startswith("unchecked")
    assert answer.strong[1].low is None, "an interval without width would say that all is known"
    with pytest.raises(ValueError, match=r"parallel.devices=2: the only count measured"):
        forecast(strong(2))


def test_counts_that_no_such_model_made_are_not_to_be_relied_on() -> None:
    odd = [*strong(1, 2, 4), Measured(8, 256, 3 * TRUE.seconds(8, 32), TRUE.gradient_bytes, None)]
    answer = forecast(odd)
    assert answer.error is not None and answer.error > 0.15
    assert answer.verdict.startswith("do not rely on it")
    assert leave_one_out(strong(1, 2, 4, 8))[0] == pytest.approx(0, abs=0.05)


def test_several_batches_of_one_count_are_each_held_against_the_forecast_for_them() -> None:
    """A sweep over data.batch_size too: the model that made all figures misses none of them."""
    runs = [run(devices, batch / devices) for devices in (1, 2, 4) for batch in (64, 256)]
    answer = forecast(runs)
    assert answer.error is not None and answer.error < 0.05


def test_another_link_is_asked_about() -> None:
    runs = strong(1, 2, 4, 8)
    slow = forecast(runs, bandwidth=25e6, latency=100e-6)
    truth = Model(TRUE.fixed, TRUE.per_image, TRUE.hidden, Link(100e-6, 25e6), TRUE.gradient_bytes)
    assert slow.strong[1].speed == pytest.approx(truth.speed(2, 128), rel=0.05)
    assert slow.strong[1].measured is None, "what was measured had another link"
    within = forecast(runs, bandwidth=25e6, devices_per_node=8)
    assert within.strong[3].speed == pytest.approx(forecast(runs).strong[3].speed)
    assert within.strong[4].speed < 0.5 * forecast(runs).strong[4].speed
    assert "not measured" in within.verdict


def test_a_slow_loader_bounds_every_count() -> None:
    slow = Model(0.0, 0.001, 0.0, Link(1e-6, 1e12), 1000, data_rate=200.0)
    runs = [Measured(n, 64 * n, slow.seconds(n, 64), 1000 if n > 1 else 0, None, 0.8) for n in (1, 2, 4)]
    assert fit(runs).data_rate == pytest.approx(200)
    assert forecast(runs).weak[-1].speed == pytest.approx(1024 * 200, rel=0.05)


def sweep_folder(folder: Path, neighbours: int = 0, warm_up: int | None = None) -> Path:
    """`warm_up`: on as many devices the baseline runs once more, ten times as slow, before all."""
    jobs = Jobs(folder, "python train.py -m …", [])
    counts = [(devices, 0, 0.0) for devices in (1, 2, 4)]
    for number, (devices, block, noise) in enumerate([(warm_up, None, 9.0), *counts] if warm_up else counts):
        measured, name = run(devices, 64, noise=noise), str(number)
        (folder / name).mkdir(parents=True)
        (folder / name / "config.yaml").write_text("train: {accumulate: 1}\n")
        overrides = [f"parallel.devices={devices}", "model=resnet18", "parallel=ddp"]
        jobs.jobs.append(Job(number, name, name, overrides, block, status="done"))
        result = Result("done", strategy="ddp" if devices > 1 else "single", devices=devices, world_size=devices)
        result.batch_size, result.neighbours, result.model = measured.images, neighbours, "resnet18"
        result.throughput = {"images_per_sec": measured.images / measured.seconds}
        result.communication = {
            "bytes_per_step": measured.gradient_bytes,
            "ms_per_step": None if measured.ring is None else 1000 * measured.ring,
        }
        write_result(folder / name, result)
    jobs.write()
    return folder


def test_a_sweep_folder_is_read(tmp_path: Path) -> None:
    answers = forecast_sweep(sweep_folder(tmp_path), counts=(2, 8))
    assert list(answers) == ["model=resnet18"]
    answer: Answer = answers["model=resnet18"]
    assert answer.weak[1].measured == pytest.approx(TRUE.speed(2, 64))
    assert json.loads(json.dumps(answers, default=asdict))["model=resnet18"]["weak"][1]["devices"] == 2
    text = "\n".join(as_text(answers))
    assert "Gbit/s" in text and "strong" in text and "weak" in text


def test_the_run_that_warms_the_machine_up_is_no_ground_for_a_forecast(tmp_path: Path) -> None:
    [answer] = forecast_sweep(sweep_folder(tmp_path, warm_up=1), counts=(2, 8)).values()
    assert answer.weak[0].measured == pytest.approx(TRUE.speed(1, 64))


def test_runs_with_neighbours_are_no_ground_for_a_forecast(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="ran alone"):
        forecast_sweep(sweep_folder(tmp_path, neighbours=1))

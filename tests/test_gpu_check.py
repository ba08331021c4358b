"""`make gpu-check` in dry form: what it makes of what it is told, and the path of its profile on a CPU."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from scripts.maintain import bench_measures, gpu_check, gpu_profile, gpu_wheels
from scripts.maintain.gpu_check import NOT_SEEN, TRAININGS, Row
from src.engine.machine import hardware

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.processes
def test_without_a_device_one_line_says_what_was_not_seen() -> None:
    command = [sys.executable, "scripts/maintain/gpu_check.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30, check=False)
    if not hardware.visible_cuda_devices():
        assert (done.returncode, done.stdout) == (0, NOT_SEEN + "\n"), done.stderr


def test_a_part_that_breaks_or_finds_no_time_left_keeps_nobody_from_running() -> None:
    def breaks(seconds: float) -> list[Row]:
        raise RuntimeError("no\ndriver")

    def sees(seconds: float) -> list[Row]:
        return [Row("seen", f"{seconds:.0f}")]

    found = gpu_check.check((("one", breaks, 9), ("two", sees, 9), ("three", sees, 900), ("four", breaks, 1000)), 100)
    assert [row.wrong for row in found] == [True, False, False, True]
    assert (
        found[0].figure == "broke: RuntimeError: no driver"
        and found[1].figure == "9"
        and found[2].figure in ("100", "99")
    )
    late = gpu_check.check((("late", breaks, 60),), seconds=20)
    assert late == [Row("late", "not seen: no time left")]


def test_what_pytest_said_becomes_rows() -> None:
    said = (
        "PASSED tests/test_a.py::test_one\nFAILED tests/test_a.py::test_two[x] - assert 1\nSKIPPED [1] a.py:3\n1 failed"
    )
    assert gpu_check.outcomes(said) == [("test_a.py::test_one", "passed"), ("test_a.py::test_two[x]", "failed")]


@pytest.mark.parametrize(("ours", "wrong"), [(10000, False), (9800, True)])
def test_the_speed_is_judged_by_the_better_of_the_rounds(ours: int, wrong: bool) -> None:
    training = TRAININGS["ResNet-50"]
    rounds = [
        ({"images_per_sec": rate, "peak_mib": 10.0}, {"images_per_sec": 10000, "peak_mib": 10.0})
        for rate in (9000, ours)
    ]
    rows = gpu_check.compare("r", training, rounds, "NVIDIA H100 80GB HBM3")
    assert [row.wrong for row in rows] == [False, wrong, False, False]
    mfu = float(rows[3].figure)
    assert mfu == pytest.approx(3 * 2 * 4.1e9 * (9000 + ours) / 2 / 989e12, rel=0.03), "He et al.: 4.1e9 multiply-adds"
    assert gpu_check.compare("r", training, rounds, "another")[3].figure == "of an unknown peak"


def test_both_sides_are_asked_for_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands of the comparison, composed and parsed, without a device."""
    commands: list[list[str]] = []

    def call(command: list[str]) -> str:
        commands.append(command)
        raise RuntimeError("not here")

    monkeypatch.setattr(bench_measures, "call", call)
    for training in (*TRAININGS.values(), replace(TRAININGS["ResNet-50"], compile=True)):
        for side in (lambda: training.ours(1, "dp"), lambda: training.by_hand(1)):  # noqa: B023
            with pytest.raises(RuntimeError, match="not here"):
                side()
        ours, by_hand = commands[-2:]
        assert "parallel=dp" in ours and "parallel.accelerator=cuda" in ours and "train.precision=bf16" in ours
        assert f"data.batch_size={training.batch_size}" in ours and str(training.batch_size) in by_hand
        assert {"--accelerator", "cuda", "bf16", "--channels-last"} <= set(by_hand)
        assert ("--compile" in by_hand) == ("model.compile=true" in ours) == training.compile


def test_time_between_kernels_is_what_no_kernel_covers() -> None:
    assert gpu_profile.busy_and_idle([(0, 4), (2, 3), (6, 7), (6.5, 9)]) == (7, 2, 2)
    assert gpu_profile.busy_and_idle([]) == (0, 0, 0)


def test_the_profile_goes_through_the_projects_own_loop() -> None:
    found = gpu_profile.measure("cpu", "model=tiny", "train.precision=bf16")
    assert 0 < found["kernels"] <= found["step"] and found["no kernel runs"] > 0 == found["copies"]


def test_what_is_carried_is_what_an_interpreter_with_torch_lacks() -> None:
    names = gpu_wheels.closure(gpu_wheels.WANTED)
    assert {"hydra-core", "omegaconf", "antlr4-python3-runtime", "optuna", "timm", "pyyaml", "pytest"} <= set(names)
    assert not {"torch", "torchvision", "numpy", "scipy", "pandas"} & set(names)

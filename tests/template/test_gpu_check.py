"""`make gpu-check` without a GPU: parsing of its inputs, and its programs on a CPU."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from typing import Any

import pytest

from scripts.maintain import bench_speed, gpu_check, gpu_rows
from scripts.maintain.bench_speed import WORKLOADS
from scripts.maintain.gpu_check import NOT_SEEN, PARTS
from scripts.maintain.gpu_rows import Done, Part, Row
from tests.template.runs import run_python
from timm_parallel.machine import hardware


@pytest.mark.processes
def test_make_gpu_check_prints_one_line_when_no_gpu_is_visible() -> None:
    if hardware.visible_cuda_devices():
        pytest.skip("a GPU is visible")
    done = run_python("scripts/maintain/gpu_check.py")
    assert (done.returncode, done.stdout) == (
        0,
        NOT_SEEN.format("no CUDA device is visible here") + "\n",
    ), done.stderr


@pytest.mark.processes
def test_every_test_that_gpu_check_names_exists_and_is_marked_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    named: list[str] = []

    def record(words: list[str], seconds: float) -> Done:
        named.extend(word for word in words if "test_" in word)
        return Done(0, "")

    monkeypatch.setattr(gpu_rows, "python", record)
    for part in PARTS:
        if part.run.__qualname__.startswith("tests."):
            part.run(1)
    assert len(named) > 8
    done = run_python("-m", "pytest", "--collect-only", "-n", "0", "-m", "gpu", *named)
    assert done.returncode == 0, done.stdout
    listed = done.stdout.splitlines()
    assert [name for name in named if not any(line.startswith(name) for line in listed)] == []


def test_make_gpu_check_continues_after_a_check_fails_or_times_out() -> None:
    def breaks(seconds: float) -> list[Row]:
        raise RuntimeError("no\ndriver")

    def sees(seconds: float) -> list[Row]:
        return [Row("seen", f"{seconds:.0f}")]

    def hangs(seconds: float) -> list[Row]:
        subprocess.run(["sleep", "100"], timeout=0.2, check=False)
        return []

    expected = {
        "one": [Row("one", "broke: RuntimeError: no driver", True, is_run=False)],
        "two": [Row("two", "not within 8 s", True, is_run=False)],
        "three": [Row("seen", "7")],
    }
    parts = [Part("one", 9, breaks), Part("two", 8, hangs), Part("three", 7, sees)]
    assert gpu_check.check(parts) == expected
    assert gpu_check.check([replace(part, alone=True) for part in parts]) == expected


def test_make_gpu_check_exits_2_before_any_check_when_a_package_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(hardware, "visible_cuda_devices", lambda: (object(),))
    monkeypatch.setattr(gpu_check, "NEEDED", ("torch", "hydra_that_is_not_there"))
    monkeypatch.setattr(
        gpu_check,
        "check",
        lambda parts: pytest.fail("expected no checks when a package is missing"),
    )
    assert gpu_check.main() == 2
    output = capsys.readouterr().out
    assert (
        "hydra_that_is_not_there" in output
        and "make gpu-wheels" in output
        and output.count("\n") == 1
    )


ROUNDS_BY_HAND = [100.0, 50.0, 80.0, 100.0, 200.0]


@pytest.mark.parametrize(
    ("ratios", "wrong"), [([0.98, 1.0, 0.7, 0.99, 0.97], False), ([0.98] * 4 + [1.2], True)]
)
def test_gpu_check_compares_programs_in_the_same_round(ratios: list[float], wrong: bool) -> None:
    """The speed is wrong if three quarters of the rounds miss the target."""
    ours = [ratio * rate for ratio, rate in zip(ratios, ROUNDS_BY_HAND, strict=True)]
    measured: dict[str, Any] = {
        "rates": {bench_speed.BY_HAND: ROUNDS_BY_HAND, bench_speed.OURS: ours},
        "bytes": {bench_speed.BY_HAND: 1000, bench_speed.OURS: 1030},
        "waits": {bench_speed.AUGMENTED: [0.0, 0.2, 0.3]},
        "missing": {bench_speed.LIGHTNING: "not installed"},
    }
    rows = bench_speed.compare("r", WORKLOADS["ResNet-50"], measured, "NVIDIA H100 80GB HBM3")
    figures = {row.what.partition(": ")[2]: row for row in rows}
    assert figures["loop by hand: images/s"].figure == "100 (50 … 200)"
    ratio = figures["train.py over the loop by hand (>= 0.99)"]
    median = sorted(ratios)[2]
    assert ratio.figure == f"{median:.3f} ({min(ratios):.3f} … {max(ratios):.3f})"
    assert ratio.wrong == wrong
    assert figures["peak memory over it (<= 1.02)"].wrong
    assert figures["train.py, flips and crops: share of time that waits for data"].wrong
    assert not figures["Lightning, usual logging"].is_run
    mfu = float(figures["model-FLOPs utilization, bf16"].figure)
    speed = sorted(ours)[2]
    assert mfu == pytest.approx(3 * 2 * 4.1e9 * speed / 989e12, abs=1e-3), (
        "expected 4.1e9 multiply-adds per image, as in He et al."
    )
    launch_bound = WORKLOADS["ResNet-18, 32 pixels"]
    rows = bench_speed.compare("r", launch_bound, measured | {"waits": {}}, "another")
    assert [row.what for row in rows if row.wrong] == ["r: peak memory over it (<= 1.02)"]
    assert "of an unknown peak" in {
        row.figure for row in bench_speed.compare("r", WORKLOADS["ResNet-50"], measured, "another")
    }

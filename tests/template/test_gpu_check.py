"""`make gpu-check` without a GPU."""

from __future__ import annotations

import subprocess
from dataclasses import replace

import pytest

from scripts.maintain import gpu_check, gpu_rows
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

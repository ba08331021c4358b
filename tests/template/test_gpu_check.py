"""`make gpu-check` without a GPU: parsing of its inputs, and its programs on a CPU."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scripts.maintain import bench_speed, gpu_check, gpu_rows, gpu_wheels
from scripts.maintain.bench_speed import WORKLOADS
from scripts.maintain.gpu_check import NOT_SEEN, PARTS
from scripts.maintain.gpu_rows import Done, Part, Row
from timm_parallel.machine import hardware

ROOT = Path(__file__).resolve().parents[2]
# Names of modules in timm_parallel/testing/ that GPU tests import.
SUPPORT = ("warm", "ranks", "configs", "commands", "fixtures", "gpu")


@pytest.mark.processes
def test_make_gpu_check_prints_one_line_when_no_gpu_is_visible() -> None:
    if hardware.visible_cuda_devices():
        pytest.skip("a GPU is visible")
    command = [sys.executable, "scripts/maintain/gpu_check.py"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert (done.returncode, done.stdout) == (
        0,
        NOT_SEEN.format("no CUDA device is visible here") + "\n",
    ), done.stderr


def test_gpu_tests_import_only_packages_that_make_gpu_check_requires() -> None:
    """The ranks of GPU tests are forked from a server that imports warm.py, so its imports count
    too.
    """
    files = (
        *gpu_check.WAITS,
        *gpu_check.ON_DEVICE,
        *(f"timm_parallel/testing/{name}.py" for name in SUPPORT),
        *("tests/conftest.py", "tests/template/conftest.py", "tests/template/runs.py"),
    )
    needed = {
        name.partition(".")[0]
        for file in files
        for node in ast.parse((ROOT / file).read_text(encoding="utf-8")).body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in (
            [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else [entry.name for entry in node.names]
        )
    }
    # torch requires filelock, and torchvision requires Pillow and numpy.
    available = {
        *sys.stdlib_module_names,
        *gpu_check.NEEDED,
        "filelock",
        "PIL",
        "numpy",
        "src",
        "timm_parallel",
        "scripts",
        "tests",
        "train",
    }
    assert needed - available == set()


@pytest.mark.processes
def test_every_test_that_gpu_check_names_exists_and_is_marked_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    named: list[str] = []

    def record(words: list[str], seconds: float) -> Done:
        named.extend(word for word in words if "test_" in word)
        return Done(0, "", 0.0)

    monkeypatch.setattr(gpu_rows, "python", record)
    for part in PARTS:
        if part.run.__qualname__.startswith("tests."):
            part.run(1)
    assert len(named) > 8
    command = [sys.executable, "-m", "pytest", "--collect-only", "-n", "0", "-m", "gpu"]
    done = subprocess.run(
        [*command, *named], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
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


def test_gpu_check_report_lists_failed_checks_and_those_that_were_not_run() -> None:
    done = {
        "speed: a": [Row("a: images/s", "12"), Row("a: other", "not installed", is_run=False)],
        "faults": [Row("exit | code", "2, expected 0", True)],
    }
    text = gpu_check.report(done, {"slow": "FULL=1"}, "GPU", 9)
    head, _, tail = text.partition("## Rows for docs/dev/benchmarks.md")
    assert "- faults: exit | code: 2, expected 0" in head
    assert {"- speed: a: a: other: not installed", "- slow: FULL=1"} <= set(head.splitlines())
    assert "| exit \\| code | 2, expected 0 | **wrong** |" in head
    assert "| a: images/s | 12 |" in tail and "exit" not in tail


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.processes
def test_make_gpu_check_ends_tests_at_the_time_limit_and_reports_earlier_results(
    tmp_path: Path,
) -> None:
    """Start pytest as `make gpu-check` does on a GPU machine."""
    file = tmp_path / "test_made_up.py"
    marked = "import time, pytest\npytestmark = pytest.mark.gpu\n"
    file.write_text(
        marked
        + "def test_one(): pass\ndef test_two(): assert 0\ndef test_three(): time.sleep(100)\n"
    )
    rows = gpu_rows.tests(str(file))(6)
    assert [(row.what.rpartition("::")[2], row.figure, row.wrong) for row in rows] == [
        ("test_one", "passed", False), ("test_two", "failed", True),
        ("test_two", "not within 6 s", True),
    ]  # fmt: skip


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


@pytest.mark.parametrize(
    ("code", "lines", "is_run"), [(0, 2, True), (None, 2, False), (1, 0, False)]
)
def test_gpu_check_keeps_the_rounds_before_the_time_limit(
    monkeypatch: pytest.MonkeyPatch, code: int | None, lines: int, is_run: bool
) -> None:
    empty: dict[str, Any] = {"bytes": {}, "waits": {}, "missing": {}}
    output = "noise\n" + "".join(
        json.dumps({"rates": {bench_speed.FSDP: [7.0, 9.0][: count + 1]}, **empty}) + "\n"
        for count in range(lines)
    )
    monkeypatch.setattr(bench_speed, "python", lambda *_: Done(code, output, 1.0))
    device = SimpleNamespace(name="made up")
    monkeypatch.setattr(hardware, "visible_cuda_devices", lambda: (device,))
    rows = bench_speed.in_turns("ViT-B/16")(60)
    figures = [row.figure for row in rows if row.what.endswith("images/s")]
    assert figures == (["8 (7 … 9)"] if lines else [])
    assert all(row.is_run for row in rows) == is_run == (not any(row.wrong for row in rows))


@pytest.mark.nightly
@pytest.mark.slow(seconds=20)
@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("ViT-B/16", {"model": "test_vit", "pixels": 160}),
        ("ResNet-50, JPEG files", {"model": "test_vit", "pixels": 160}),
        ("tiny ViT", {}),
    ],
)
def test_programs_of_a_workload_train_in_turns_on_a_cpu(
    tmp_path: Path, name: str, model: dict[str, Any]
) -> None:
    """The same code measures a GPU."""
    script = f"""
from dataclasses import replace
from pathlib import Path
from scripts.maintain import bench_rounds
workloads = bench_rounds.WORKLOADS | bench_rounds.CPU_WORKLOADS
workload = replace(workloads[{name!r}], batch=4, steps=2, **{model!r})
bench_rounds.FILES = 8
bench_rounds.measure(workload, "cpu", 2, Path({str(tmp_path)!r}))
"""
    done = gpu_rows.python(["-c", script], 200)
    assert done.code == 0, done.output
    figures = json.loads(done.output.splitlines()[-1])
    programs = (WORKLOADS | bench_speed.CPU_WORKLOADS)[name].programs
    assert {*figures["rates"], *figures["missing"]} == {*programs, *programs.values()}
    assert set(figures["missing"]) <= {bench_speed.TORCHCODEC, bench_speed.LIGHTNING}
    assert all(len(rates) == 2 and min(rates) > 0 for rates in figures["rates"].values())


@pytest.mark.processes
@pytest.mark.parametrize("is_loaded", [False, True])
def test_tests_of_gpu_check_start_where_pytest_timeout_is_installed_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_loaded: bool
) -> None:
    """The image of a GPU machine may have the package, next to the copy in .gpu-wheels/."""
    for file in metadata.distribution("pytest-timeout").files or []:
        if file.suffix != ".pyc":
            target = tmp_path / "wheels" / file
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(str(file.locate()), target)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "wheels"))
    # An empty value lets pytest load all installed plugins.
    plain = gpu_rows.python
    environment = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "" if is_loaded else "1"}
    monkeypatch.setattr(
        gpu_rows, "python", lambda words, seconds: plain(words, seconds, environment)
    )
    made_up = tmp_path / "test_made_up.py"
    made_up.write_text("import pytest\n\n@pytest.mark.gpu\ndef test_one(): pass\n")
    rows = gpu_rows.tests(str(made_up))(60)
    assert [(row.what.rpartition("::")[2], row.figure) for row in rows] == [("test_one", "passed")]


def test_make_gpu_wheels_excludes_packages_that_come_with_torch() -> None:
    names = gpu_wheels.closure(gpu_wheels.WANTED)
    assert {
        "hydra-core",
        "omegaconf",
        "antlr4-python3-runtime",
        "optuna",
        "timm",
        "pyyaml",
        "pytest",
    } <= set(names)
    assert not {"torch", "torchvision", "numpy", "scipy", "pandas"} & set(names)

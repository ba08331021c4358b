"""`make gpu-check` without a GPU: parsing of its inputs, and its profile on a CPU."""

from __future__ import annotations

import ast
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from scripts.maintain import bench_measures, gpu_check, gpu_profile, gpu_rows, gpu_speed, gpu_wheels
from scripts.maintain.gpu_check import NOT_SEEN, PARTS, SECONDS
from scripts.maintain.gpu_rows import Part, Row
from scripts.maintain.gpu_speed import TRAININGS
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
    # filelock is available wherever torch is, because torch requires it.
    available = {
        *sys.stdlib_module_names,
        *gpu_check.NEEDED,
        "filelock",
        "src",
        "timm_parallel",
        "scripts",
        "tests",
        "train",
    }
    assert needed - available == set()


def test_make_gpu_check_continues_after_a_check_fails_or_times_out() -> None:
    def breaks(seconds: float) -> list[Row]:
        raise RuntimeError("no\ndriver")

    def sees(seconds: float) -> list[Row]:
        return [Row("seen", f"{seconds:.0f}")]

    def hangs(seconds: float) -> list[Row]:
        subprocess.run(["sleep", "100"], timeout=0.2, check=False)
        return []

    done = gpu_check.check([Part("one", 9, breaks), Part("two", 8, hangs), Part("three", 7, sees)])
    assert done == {
        "one": [Row("one", "broke: RuntimeError: no driver", True)],
        "two": [Row("two", "not run within 8 s", True)],
        "three": [Row("seen", "7")],
    }


def test_time_limits_of_the_checks_for_one_gpu_add_up_to_at_most_the_total_limit() -> None:
    parts = gpu_check.chosen(1, is_full=False)
    assert parts and sum(part.seconds for part in parts) <= SECONDS


def test_make_gpu_check_adds_checks_when_there_are_several_gpus_or_full_is_1() -> None:
    one, two = gpu_check.chosen(1, is_full=False), gpu_check.chosen(2, is_full=False)
    assert {part.devices for part in one} == {1} and {part.devices for part in two} == {1, 2}
    assert gpu_check.chosen(2, is_full=True) == list(PARTS)
    assert len({part.name for part in PARTS}) == len(PARTS)


def test_make_gpu_check_report_lists_failed_checks_and_has_rows_for_the_benchmarks_page() -> None:
    done = {
        "speed: a": [Row("a: images/s", "12")],
        "faults": [Row("exit | code", "2, expected 0", True)],
    }
    text = gpu_check.report(done, "GPU", 9)
    head, _, tail = text.partition("## Rows for docs/dev/benchmarks.md")
    assert "- faults: exit | code: 2, expected 0" in head
    assert "| exit \\| code | 2, expected 0 | **wrong** |" in head
    assert "| a: images/s | 12 |" in tail and "exit" not in tail


def test_make_gpu_check_measures_speed_a_second_time_only_when_time_remains(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, limits = 0.0, []
    monkeypatch.setattr(gpu_rows, "time", SimpleNamespace(monotonic=lambda: now))

    def side(self: bench_measures.Training, *given: object) -> dict[str, float]:
        nonlocal now
        limits.append(self.limit)
        now += 30
        return {"images_per_sec": 1.0, "peak_mib": 1.0, "first_step": 1.0}

    monkeypatch.setattr(bench_measures.Training, "ours", side)
    monkeypatch.setattr(bench_measures.Training, "by_hand", side)
    monkeypatch.setattr(
        hardware, "visible_cuda_devices", lambda: (SimpleNamespace(name="made up"),)
    )
    part = gpu_speed.against_by_hand("r", TRAININGS["ResNet-50"], 2)
    assert not any(row.wrong for row in part(125)) and limits == [125, 95]
    part(140)
    assert limits[2:] == [140, 110, 80, 50]


def test_make_gpu_check_parses_passed_and_failed_tests_from_pytest_output() -> None:
    output = (
        "tests/test_a.py::test_one PASSED    [ 25%]\ntests/test_a.py::test_two[a b] FAILED   [ "
        "50%]\n"
        "tests/test_a.py::test_three SKIPPED (no)  [ 75%]\nFAILED tests/test_a.py::test_two[a b] "
        "- assert 1\n1 failed"
    )
    assert gpu_rows.outcomes(output) == [
        ("test_a.py::test_one", "passed"),
        ("test_a.py::test_two[a b]", "failed"),
    ]


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
        ("test_one", "passed", False), ("test_two", "failed", True), ("test_two", "not run within "
                                                                                  "6 s", True)
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


@pytest.mark.parametrize(("ours", "wrong"), [(10000, False), (9800, True)])
def test_make_gpu_check_judges_speed_against_handwritten_loop_by_the_better_of_two_rounds(
    ours: int, wrong: bool
) -> None:
    training = TRAININGS["ResNet-50"]
    rounds = [
        (
            {"images_per_sec": rate, "peak_mib": 10.0, "first_step": 3.0},
            {"images_per_sec": 10000, "peak_mib": 10.0},
        )
        for rate in (9000, ours)
    ]
    rows = gpu_speed.compare("r", training, rounds, "NVIDIA H100 80GB HBM3")
    assert [row.wrong for row in rows] == [False, wrong, False, False, False]
    mfu = float(rows[3].figure)
    assert mfu == pytest.approx(3 * 2 * 4.1e9 * (9000 + ours) / 2 / 989e12, rel=0.03), (
        "expected 4.1e9 multiply-adds per image, as in He et al."
    )
    assert gpu_speed.compare("r", training, rounds, "another")[3].figure == "of an unknown peak"


def test_make_gpu_check_gives_train_py_and_handwritten_loop_the_same_settings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Check the commands of the comparison without running them on a device."""
    commands: list[list[str]] = []

    def call(command: list[str], limit: float) -> str:
        commands.append(command)
        raise RuntimeError("not here")

    monkeypatch.setattr(bench_measures, "call", call)
    for training in (*TRAININGS.values(), replace(TRAININGS["ResNet-50"], compile=True)):
        for side in (lambda: training.ours(1, "dp"), lambda: training.by_hand(1)):  # noqa: B023
            with pytest.raises(RuntimeError, match="not here"):
                side()
        ours, by_hand = commands[-2:]
        assert (
            "parallel=dp" in ours
            and "parallel.accelerator=cuda" in ours
            and "train.precision=bf16" in ours
        )
        assert (
            f"data.batch_size={training.batch_size}" in ours and str(training.batch_size) in by_hand
        )
        assert {"--accelerator", "cuda", "bf16", "--channels-last"} <= set(by_hand)
        assert ("--compile" in by_hand) == ("model.compile=true" in ours) == training.compile


def test_make_bench_runs_only_existing_scripts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripts: list[str] = []
    monkeypatch.setattr(bench_measures, "parse_output", lambda command: scripts.append(command[1]))
    for part in bench_measures.parts(tmp_path, 1).values():
        part()
    assert (
        scripts and [name for name in scripts if not (bench_measures.ROOT / name).is_file()] == []
    )


def test_gpu_profile_idle_time_is_time_without_a_running_kernel() -> None:
    assert gpu_profile.busy_and_idle([(0, 4), (2, 3), (6, 7), (6.5, 9)]) == (7, 2, 2)
    assert gpu_profile.busy_and_idle([]) == (0, 0, 0)


@pytest.mark.slow
def test_gpu_profile_on_cpu_measures_kernel_and_idle_time_of_a_training_step() -> None:
    rows = gpu_profile.measure("cpu", "model=tiny", "train.precision=bf16")
    assert 0 < rows["kernels"] <= rows["step"] and rows["no kernel runs"] > 0 == rows["copies"]


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


def test_benchmark_flops_of_a_vision_transformer_include_attention() -> None:
    training = bench_measures.Training("vit_small_patch16_224", {}, 1, 1, image_size=224)
    assert gpu_speed.model_flops(training) == pytest.approx(3 * 9.197e9, rel=1e-3)

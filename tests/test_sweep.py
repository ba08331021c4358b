"""A sweep over strategies and device counts is right: each job proves its world size, and equals the same config run alone."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import train_warm
from hydra._internal.utils import get_args_parser

from src.engine.config.compose import read_frozen
from src.engine.machine import hardware
from src.engine.record.jobs import read_jobs
from src.engine.record.result import read_result
from src.engine.sweep.blocks import freeze_jobs
from src.engine.sweep.points import expand
from src.schema import SweepConfig

ROOT = Path(__file__).parents[1]
SMALL = ("model=tiny", "print_config=false", "train.epochs=1", "optim.warmup_epochs=0", "data.limit_train=128")


def sweep(folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "train.py", "-m", *SMALL, *overrides, f"hydra.sweep.dir={folder}"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)


def results(folder: Path) -> list[dict[str, Any]]:
    jobs = json.loads((folder / "jobs.json").read_text())["jobs"]
    return [json.loads((folder / job["folder"] / "result.json").read_text()) for job in jobs if job["status"] == "done"]


def statuses(folder: Path) -> list[str]:
    return [job.status for job in read_jobs(folder).jobs]


def points(*overrides: str) -> Any:
    return expand(get_args_parser().parse_args(["-m", *SMALL, *overrides]))[1]


def test_impossible_points_are_skipped_with_a_reason() -> None:
    found = points("parallel=single,ddp", "parallel.devices=1,3", "data.batch_size=64")
    assert [bool(point.reason) for point in found] == [False, True, False, True]
    assert "single uses one device" in found[1].reason
    assert "nearest: 63, 66" in found[3].reason


def test_all_cpu_points_get_the_same_threads() -> None:
    found = points("parallel=single,dp,ddp", "parallel.devices=1,2")
    assert len({point.config.parallel.threads_per_device for point in found if not point.reason}) == 1


def test_so_do_those_on_the_cpu_of_a_machine_with_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = hardware.CudaDevice(0, "a GPU", 2**34, "GPU-0")
    monkeypatch.setattr(hardware, "visible_cuda_devices", lambda: (gpu,))
    monkeypatch.setattr(hardware, "cores", lambda: 8)
    found = points("parallel=ddp", "parallel.accelerator=cpu", "parallel.devices=1,2")
    assert [point.config.parallel.threads_per_device for point in found] == [4, 4]


@pytest.mark.parametrize(
    "overrides", [["modle=a,b"], ["parallel=single,dpp"], ["optim.lr=1e-3,abc"], ["train.epochs=0,1"]]
)
def test_what_can_never_be_right_refuses_the_whole_sweep(overrides: list[str]) -> None:
    with pytest.raises(ValueError, match=overrides[0].partition("=")[0]):
        points(*overrides)


def test_a_range_without_a_number_is_refused() -> None:
    with pytest.raises(ValueError, match=r"seed=range\(3,3\): a swept range holds no number"):
        points("seed=range(3,3)")


def test_editing_yaml_changes_nothing_queued(tmp_path: Path) -> None:
    """Jobs run from the config.yaml in their folder; nothing reads conf/ any more."""
    jobs = freeze_jobs(tmp_path, points("optim.lr=1e-3,1e-4"), SweepConfig())
    assert [read_frozen(tmp_path / job.folder).optim.lr for job in jobs.jobs] == [1e-3, 1e-4]
    assert jobs.baseline_repeated == []


@pytest.mark.processes
@pytest.mark.parametrize("strategies", ["single,ddp", pytest.param("single,dp", marks=pytest.mark.slow)])
def test_strategies_and_device_counts(tmp_path: Path, strategies: str) -> None:
    """The sweep that every well-known stack gets wrong; single x 2 is skipped. All at once: test_readme.py.

    A job run alone has the numbers of the sweep, bit for bit.
    """
    folder = tmp_path / "sweep"
    done = sweep(folder, f"parallel={strategies}", "parallel.devices=2,1", "parallel.threads_per_device=1")
    assert done.returncode == 0, done.stderr
    found = results(folder)
    wanted = [("single", 1, 1, 1), ("dp", 2, 2, 1), ("dp", 1, 1, 1), ("ddp", 2, 2, 2), ("ddp", 1, 1, 1)]
    wanted = [row for row in wanted if row[0] in strategies.split(",")]
    assert statuses(folder) == ["skipped", *["done"] * len(wanted)]
    assert [(r["strategy"], r["world_size"], r["devices"], r["processes"]) for r in found] == wanted
    for result in found:
        assert result["val"]["loss"] == pytest.approx(found[0]["val"]["loss"], abs=1e-5)
        assert result["val"]["samples"] == 270
    assert (folder / "report.html").exists()
    assert "single uses one device" in (folder / "report.md").read_text()
    on_two_devices = read_frozen(folder / read_jobs(folder).jobs[2].folder)
    alone = read_result(train_warm(on_two_devices, tmp_path / "alone"))
    assert (alone.val, alone.parameters_hash) == (found[1]["val"], found[1]["parameters_hash"])


@pytest.mark.slow
@pytest.mark.processes
def test_a_failing_job_is_a_row_and_the_rest_run(tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    done = sweep(folder, "model.num_classes=3,10", "parallel=single")
    assert done.returncode == 1
    assert statuses(folder) == ["failed", "done"]
    assert "num_classes=3" in read_jobs(folder).jobs[0].reason
    assert "num_classes=3" in done.stderr


@pytest.mark.slow
@pytest.mark.processes
def test_interrupted_and_resumed(tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    command = [
        sys.executable,
        "train.py",
        "-m",
        *SMALL,
        "parallel=single,ddp,dp",  # ddp is stopped
        "train.epochs=25",
        "train.evaluate_every=0",
        "parallel.threads_per_device=1",
    ]
    running = subprocess.Popen(
        [*command, f"hydra.sweep.dir={folder}"], cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    log = folder / "1" / "metrics.jsonl"
    while not (log.exists() and log.stat().st_size):  # the second job trains
        assert running.poll() is None
        time.sleep(0.02)
    running.send_signal(signal.SIGINT)
    output, _ = running.communicate(timeout=300)
    assert running.returncode == 130, output
    assert statuses(folder) == ["done", "interrupted", "waiting"]
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(folder) in " ".join(p.info["cmdline"] or [])]
    first = (folder / "0" / "result.json").read_text()
    again = subprocess.run(
        [sys.executable, "train.py", "-m", f"sweep.resume={folder}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert again.returncode == 0, again.stderr
    assert statuses(folder) == ["done"] * 3
    assert (folder / "0" / "result.json").read_text() == first

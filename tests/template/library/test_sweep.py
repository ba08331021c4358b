"""Test sweeps over strategies and numbers of devices. Each job must have the right world size,
and equal the same config run alone.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.template.runs import run_python
from timm_parallel.config.compose import load_config
from timm_parallel.errors import BATCH_NOT_DIVISIBLE, BATCH_TOO_SMALL, ONE_DEVICE, ONE_PROCESS
from timm_parallel.keys import DataConfig, SweepConfig
from timm_parallel.lab.jobs.folders import config_folder
from timm_parallel.lab.multirun import count_runs, main, show_points
from timm_parallel.lab.sweep.points import Composer, expand
from timm_parallel.lab.sweep.sweep import freeze_jobs
from timm_parallel.machine import hardware
from timm_parallel.record.result import read_jobs
from timm_parallel.testing.commands import processes_of
from timm_parallel.testing.configs import parse

SMALL = (
    "model=tiny",
    "print_config=false",
    "train.epochs=1",
    "optim.warmup_epochs=0",
    "data.limit_train=128",
)


def sweep(folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    return run_python("train.py", "-m", *SMALL, *overrides, f"hydra.sweep.dir={folder}")


def statuses(folder: Path) -> list[str]:
    return [job.status for job in read_jobs(folder).jobs]


def points(*overrides: str) -> Any:
    return expand(parse("-m", *SMALL, *overrides))[1]


@pytest.mark.slow(seconds=1)
def test_sweep_skips_a_job_with_a_reason_when_devices_do_not_fit_strategy_batch_or_nodes() -> None:
    expanded = points("parallel=single,ddp", "parallel.devices=1,3", "data.batch_size=64")
    assert [bool(point.reason) for point in expanded] == [False, True, False, True]
    assert [point.code for point in expanded] == ["", ONE_DEVICE, "", BATCH_NOT_DIVISIBLE]
    assert "63, 66" in expanded[3].reason
    small = points(
        "parallel=dp", "parallel.devices=4", "data.batch_size=2,64", "parallel.accelerator=cpu"
    )
    assert [point.code for point in small] == [BATCH_TOO_SMALL, ""]
    on_slurm = ("cluster=slurm", "cluster.nodes=2", "cluster.gpus=2", "cluster.submit=false")
    nodes = points("parallel=dp,ddp", "parallel.devices=4", *on_slurm)
    assert [point.code for point in nodes] == [ONE_PROCESS, ""]


def test_progress_bar_of_a_sweep_is_erased_when_the_sweep_is_interrupted_in_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(Console, "is_terminal", True)

    def compose(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Composer, "compose", compose)
    with pytest.raises(KeyboardInterrupt):
        points("seed=1,2,3,4,5,6,7")
    err = capsys.readouterr().err
    assert "0/7" in err
    # The escape codes must erase the line of the progress bar and make the cursor visible again.
    assert err.rindex("\x1b[2K") > err.rindex("0/7") and "\x1b[?25h" in err


@pytest.mark.slow(seconds=3)
def test_sweep_dry_run_counts_the_runs_of_all_repeats(tmp_path: Path) -> None:
    expanded = points("parallel=single,ddp", "parallel.devices=1,2", "data.batch_size=64")
    for repeats in (1, 4):
        settings = SweepConfig(repeats=repeats)
        folder = tmp_path / str(repeats)
        folder.mkdir()
        jobs = freeze_jobs(folder, expanded, settings).jobs
        runs = sum(job.status != "skipped" for job in jobs)
        assert count_runs(expanded, settings).startswith(f"{runs} runs")
    assert count_runs(expanded[:1], SweepConfig()) == "1 run"


@pytest.mark.slow(seconds=2)
def test_sweep_dry_run_lists_only_overrides_that_vary_between_jobs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes: list[object] = []

    def training_size(data: DataConfig) -> int:
        sizes.append(data)
        return 1280

    monkeypatch.setattr("timm_parallel.lab.multirun.training_size", training_size)
    show_points(points("optim.lr=0.1,0.2", "data.batch_size=64"), SweepConfig())
    table, _, last = capsys.readouterr().out.rstrip().rpartition("\n")
    assert len(sizes) == 1
    cells = [text.strip() for text in table.splitlines()[-2].split("│")[1:-1]]
    assert cells == ["1", "optim.lr=0.2", "64", "64", "0.2", "20", "yes"]
    assert last == "2 runs"
    expanded = points("parallel=single", "parallel.devices=2,3")
    show_points(expanded, SweepConfig())
    assert "skipped: " in capsys.readouterr().out


@pytest.mark.slow(seconds=2)
def test_cpu_jobs_of_a_sweep_get_equal_numbers_of_threads_per_device_also_next_to_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = hardware.CudaDevice(0, "a GPU", 2**34, "GPU-0")
    monkeypatch.setattr(hardware, "visible_cuda_devices", lambda: (gpu,))
    monkeypatch.setattr(hardware, "cores", lambda: 8)
    expanded = points("parallel.accelerator=cpu", "parallel=single,dp,ddp", "parallel.devices=1,2")
    threads = [p.config.parallel.threads_per_device for p in expanded if not p.reason]
    assert threads == [4] * 5


@pytest.mark.slow(seconds=2)
def test_sweep_writes_the_config_of_every_job_before_any_job_runs(tmp_path: Path) -> None:
    """Jobs start from these written configs. Later edits in conf/ must not change them."""
    jobs = freeze_jobs(tmp_path, points("optim.lr=1e-3,1e-4"), SweepConfig())
    assert [load_config(config_folder(tmp_path, job)).optim.lr for job in jobs.jobs] == [1e-3, 1e-4]


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.processes
def test_sweep_runs_the_remaining_jobs_and_exits_1_when_a_job_fails(tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    done = sweep(folder, "model.num_classes=3,10", "parallel=single")
    assert done.returncode == 1
    assert statuses(folder) == ["failed", "done"]
    assert "num_classes=3" in read_jobs(folder).jobs[0].reason
    assert "num_classes=3" in done.stderr


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("strategy", ["single", pytest.param("ddp", marks=pytest.mark.nightly)])
def test_interrupted_sweep_runs_only_its_unfinished_jobs_when_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without_plots: None, strategy: str
) -> None:
    folder = tmp_path / "sweep"
    log = folder / "0" / "metrics.jsonl"
    stops: list[int] = []
    sleep = time.sleep

    def stop(seconds: float) -> None:
        """Send SIGINT once, when the first job has begun to train."""
        sleep(seconds)
        if not stops and log.exists() and log.stat().st_size:
            stops.append(signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    words = (
        *SMALL,
        f"parallel={strategy}",
        "seed=1,2",
        "train.epochs=10",
        "train.evaluate_every=0",
        "parallel.threads_per_device=1",
        f"hydra.sweep.dir={folder}",
    )
    monkeypatch.setattr(sys, "argv", ["train.py", "-m", *words])
    with monkeypatch.context() as patch:
        patch.setattr(time, "sleep", stop)
        assert main(parse("-m", *words)) == 128 + signal.SIGINT
    assert statuses(folder) == ["interrupted", "waiting"]
    assert not processes_of(folder)
    assert main(parse("-m", f"sweep.resume={folder}")) == 0
    assert statuses(folder) == ["done"] * 2

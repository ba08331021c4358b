"""Jobs of sweeps: configs, display, an interruption, and concurrent jobs."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.template.runs import run_python
from timm_parallel.config.compose import compose_command, load_config
from timm_parallel.keys import Config, DataConfig, SweepConfig
from timm_parallel.lab.jobs import local_job as child
from timm_parallel.lab.jobs.scheduler import (
    DeviceScheduler,
    Requirement,
    devices_here,
    jobs_at_a_time,
    need_of,
    share_of,
)
from timm_parallel.lab.jobs.warm_server import WarmServer
from timm_parallel.lab.multirun import main, show_points
from timm_parallel.lab.sweep.points import expand
from timm_parallel.lab.sweep.sweep import Sweep, freeze_jobs
from timm_parallel.machine import hardware
from timm_parallel.machine.hardware import CudaDevice
from timm_parallel.record.result import Job, Jobs, read_jobs, read_result
from timm_parallel.testing.commands import processes_of
from timm_parallel.testing.configs import parse
from timm_parallel.testing.ranks import train_warm

SMALL = (
    "model=tiny",
    "print_config=false",
    "train.epochs=1",
    "optim.warmup_epochs=0",
    "data.limit_train=128",
)


def statuses(folder: Path) -> list[str]:
    return [job.status for job in read_jobs(folder).jobs]


def points(*overrides: str) -> Any:
    return expand(parse("-m", *SMALL, *overrides))[1]


@pytest.mark.slow(seconds=1)
def test_sweep_skips_a_job_with_a_reason_when_devices_do_not_fit_strategy_batch_or_nodes() -> None:
    expanded = points("parallel=single,ddp", "parallel.devices=1,3", "data.batch_size=64")
    assert [bool(point.reason) for point in expanded] == [False, True, False, True]
    assert "63, 66" in expanded[3].reason
    small = points(
        "parallel=dp", "parallel.devices=4", "data.batch_size=2,64", "parallel.accelerator=cpu"
    )
    assert [bool(point.reason) for point in small] == [True, False]
    on_slurm = ("cluster=slurm", "cluster.nodes=2", "cluster.gpus=2", "cluster.submit=false")
    nodes = points("parallel=dp,ddp", "parallel.devices=4", *on_slurm)
    assert [bool(point.reason) for point in nodes] == [True, False]


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


GIB = 2**30


def config_of(*overrides: str) -> Config:
    return points("parallel=single", *overrides)[0].config


@pytest.mark.slow(seconds=1)
def test_sweep_job_gets_the_uuids_of_its_gpus_in_cuda_visible_devices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpus = tuple(CudaDevice(number, "H", 80 * GIB, f"GPU-{number}") for number in range(4))
    monkeypatch.setattr(hardware, "visible_cuda_devices", lambda: gpus)
    config = config_of("parallel=ddp", "parallel.devices=2")
    assert need_of(config) == Requirement("cuda", 2)
    # Without assigned devices, a job sees all.
    assert share_of(need_of(config), []) == share_of(Requirement("cpu", 2), []) == ({}, [])
    assert share_of(need_of(config), ["GPU-1", "GPU-3"])[0] == {
        "CUDA_VISIBLE_DEVICES": "GPU-1,GPU-3"
    }
    assert need_of(
        config_of("parallel=ddp", "parallel.devices=2", "parallel.device_ids=[2,3]")
    ).alone
    assert devices_here()["cuda"] == ["GPU-0", "GPU-1", "GPU-2", "GPU-3"]


@pytest.mark.parametrize(
    ("overrides", "key", "cause"),
    [
        (("sweep.timed=true",), "sweep.jobs", r"sweep\.timed=true"),
        (("experiment=compare",), "sweep.jobs", r"sweep\.timed=true"),
        (("optimized_metric=images_per_sec",), "search.n_jobs", "optimized_metric=images_per_sec"),
    ],
)
def test_concurrent_jobs_are_refused_when_a_sweep_measures_speed(
    overrides: tuple[str, ...], key: str, cause: str
) -> None:
    config = compose_command(parse("-m", "model=tiny", *overrides)).config
    with pytest.raises(ValueError, match=f"{key}=9: {cause}"):
        jobs_at_a_time(key, 9, config)
    assert jobs_at_a_time(key, 1, config) == 1


def test_sweep_jobs_auto_runs_as_many_cpu_jobs_as_the_cores_allow() -> None:
    config = config_of("parallel.accelerator=cpu", "parallel.threads_per_device=2")
    assert jobs_at_a_time("sweep.jobs", "auto", config) is None
    scheduler = DeviceScheduler({"cpu": [str(core) for core in range(8)]})
    started = [scheduler.start_next([(number, need_of(config))]) for number in range(5)]
    assert [place is not None for place in started] == [True] * 4 + [False]


# Program of a fake job. It records its cores and its start and end time. Job 1 reports out of
# memory in its first attempt, and job 4 in every attempt.
JOB = """
import json, os, pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
began = time.monotonic()
time.sleep(float(os.environ["JOB_SECONDS"]))
again = (folder / "before").exists()
(folder / "before").touch()
short = folder.name == "1" and not again or folder.name == "4"
ran = {"cores": sorted(os.sched_getaffinity(0)), "began": began, "ended": time.monotonic()}
(folder / "ran.json").write_text(json.dumps(ran))
(folder / "result.json").write_text(json.dumps({"status": "out_of_memory" if short else "done", "reason": ""}))
sys.exit(int(short))
"""  # noqa: E501


@pytest.fixture
def fake_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        child, "job_command", lambda folder: [sys.executable, "-c", JOB, str(folder)]
    )
    monkeypatch.setattr(WarmServer, "takes", lambda server, config: False)
    monkeypatch.setenv("JOB_SECONDS", "0.3")
    monkeypatch.setattr(Sweep, "_close", lambda sweep: 0)


def frozen(folder: Path, *overrides: str) -> Jobs:
    return freeze_jobs(folder, points("parallel=single", *overrides), SweepConfig())


def ran(jobs: Jobs, job: Job) -> dict[str, Any]:
    return json.loads((jobs.folder / job.folder / "ran.json").read_text())  # type: ignore[no-any-return]


@pytest.mark.skipif(hardware.cores() < 2, reason="needs two cores")
@pytest.mark.slow(seconds=6)
def test_concurrent_sweep_jobs_share_no_core_and_run_once_more_alone_when_out_of_memory(
    tmp_path: Path, fake_jobs: None
) -> None:
    cpu = ("parallel.accelerator=cpu", "parallel.threads_per_device=1")
    jobs = frozen(tmp_path, "seed=1,2,3,4,5", *cpu)
    Sweep(jobs, max_jobs=2).run()
    assert [job.status for job in read_jobs(tmp_path).jobs] == ["done"] * 4 + ["out_of_memory"]
    times = [ran(jobs, job) for job in jobs.jobs]
    again = [times.pop(4), times.pop(1)]
    assert all(one["began"] >= time["ended"] for one in again for time in times)
    assert all(len(time["cores"]) == 1 for time in times)
    for started in times:
        running = [
            other["cores"] for other in times if other["began"] <= started["began"] < other["ended"]
        ]
        assert len(running) <= 2
        assert len({core for cores in running for core in cores}) == len(running)
    assert [read_result(tmp_path / job.folder).neighbours for job in jobs.jobs] == [1, 0, 1, 1, 0]


@pytest.mark.slow(seconds=2)
@pytest.mark.skipif(hardware.cores() < 2, reason="needs two cores")
def test_sweep_runs_jobs_one_at_a_time_when_memory_is_short(
    tmp_path: Path, fake_jobs: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware, "available_memory", lambda: GIB // 3)
    jobs = frozen(tmp_path, "seed=1,2", "parallel.threads_per_device=1")
    Sweep(jobs, max_jobs=2).run()
    assert [read_result(tmp_path / job.folder).neighbours for job in jobs.jobs] == [0, 0]


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.skipif(hardware.cores() < 2, reason="needs two cores")
def test_concurrent_sweep_jobs_have_the_same_metrics_and_weights_as_jobs_run_alone(
    tmp_path: Path,
) -> None:
    words = ("parallel=single", "parallel.threads_per_device=1", "sweep.jobs=2", "seed=1,2")
    output = f"hydra.sweep.dir={tmp_path / 'two'}"
    done = run_python("train.py", "-m", *SMALL, *words, "train.epochs=2", output)
    assert done.returncode == 0, done.stdout + done.stderr
    for job in read_jobs(tmp_path / "two").jobs:
        folder = tmp_path / "two" / job.folder
        one, two = (
            read_result(train_warm(load_config(folder), tmp_path / f"one_{job.id}")),
            read_result(folder),
        )
        assert (one.neighbours, two.neighbours) == (0, 1)
        assert (one.parameters_hash, one.val, one.train) == (
            two.parameters_hash,
            two.val,
            two.train,
        )

"""Jobs that a warm server forks act like jobs that start as new processes."""

from __future__ import annotations

import atexit
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from tests.template.runs import ROOT, run_warm, tiny
from timm_parallel.keys import SweepConfig
from timm_parallel.lab.jobs import warm_server
from timm_parallel.lab.jobs.folders import frozen_config, write_job_folder
from timm_parallel.lab.jobs.warm_server import ForkedJob, WarmServer
from timm_parallel.lab.sweep.points import expand
from timm_parallel.lab.sweep.sweep import freeze_jobs
from timm_parallel.launch import job, rank
from timm_parallel.launch.fork_server import ForkedProcess, _check_is_forkable, run_job
from timm_parallel.launch.job import with_project_on_path
from timm_parallel.machine import hardware, signals
from timm_parallel.record.result import read_jobs, read_result
from timm_parallel.testing.commands import processes_of
from timm_parallel.testing.configs import parse

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(sys.platform != "linux", reason="jobs are forked on Linux only"),
]


def server_of_jobs() -> Iterator[WarmServer]:
    server = WarmServer()
    yield server
    if server.jobs:
        server.kill()
    server.close()


server_of_a_test = pytest.fixture(name="server")(server_of_jobs)
# Several tests share this server, because it imports torch, which takes longer than a job.
server_of_several_tests = pytest.fixture(scope="module", name="shared_server")(server_of_jobs)


def frozen(folder: Path, *overrides: str) -> Path:
    folder.mkdir()
    [job] = freeze_jobs(
        folder, expand(parse("-m", *tiny("parallel=single", *overrides)))[1], SweepConfig()
    ).jobs
    (folder / job.folder / "logs").mkdir()
    return write_job_folder(folder, job)


def start(server: WarmServer, folder: Path, **variables: str) -> ForkedJob:
    return server.start(folder, {**with_project_on_path(os.environ), **variables}, [])


@pytest.mark.slow(seconds=15)
def test_job_forked_by_the_warm_server_has_results_and_environment_of_a_new_process(
    tmp_path: Path, shared_server: WarmServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A run takes the name of its host from this variable. The forked job must use its own
    # environment instead of that of the server.
    monkeypatch.setenv("SLURMD_NODENAME", "of-the-server")
    short = ("train.epochs=1", "data.limit_train=64")
    first, second = (frozen(tmp_path / str(seed), f"seed={seed}", *short) for seed in (1, 2))
    assert start(shared_server, first, SLURMD_NODENAME="of-the-job").wait() == 0
    monkeypatch.delenv("SLURMD_NODENAME")
    assert start(shared_server, second).wait() == 0
    assert read_result(first).hosts == ["of-the-job"]
    assert read_result(second).hosts == [socket.gethostname()]
    alone = run_warm(tmp_path / "alone", "parallel=single", "seed=2", *short)
    result = read_result(second)
    assert (result.status, result.parameters_hash) == ("done", read_result(alone).parameters_hash)
    assert read_result(first).parameters_hash != result.parameters_hash
    environment = json.loads((second / "environment.json").read_text())
    assert environment["command"].endswith(f"launch/job.py {second.resolve()}")
    assert "folder       " in (second / "logs" / "console.log").read_text()


@pytest.mark.slow(seconds=8)
def test_forked_job_has_a_separate_session_and_cores_and_saves_a_checkpoint_on_sigterm(
    tmp_path: Path, shared_server: WarmServer
) -> None:
    refused = frozen(tmp_path / "refused", "+model.kwargs.no_such_option=1")
    assert start(shared_server, refused).wait() == 2
    words = ("train.epochs=100000", "train.evaluate_every=0", "train.log_every=1")
    folder, core = frozen(tmp_path / "job", *words), min(os.sched_getaffinity(0))
    before = time.time()
    job = shared_server.start(folder, with_project_on_path(os.environ), [core])
    log, until = folder / "metrics.jsonl", time.monotonic() + 120
    while not (log.exists() and log.stat().st_size):
        shared_server.update()
        assert time.monotonic() < until
        time.sleep(0.02)
    launcher = psutil.Process(int(Path(folder / ".lock").read_text().split()[1]))
    [rank] = launcher.children()
    assert {os.getsid(launcher.pid), os.getsid(rank.pid)} == {launcher.pid}
    assert launcher.cpu_affinity() == rank.cpu_affinity() == [core]
    assert launcher.create_time() >= before - 1
    job.send_signal(signal.SIGTERM)
    assert job.wait() == 128 + signal.SIGTERM
    result = read_result(folder)
    assert (result.status, (folder / "checkpoints" / "last.pt").exists()) == ("interrupted", True)
    assert not processes_of(folder)


@pytest.mark.slow(seconds=2)
def test_jobs_die_with_a_warm_server_that_fails(tmp_path: Path, shared_server: WarmServer) -> None:
    """The sweep would otherwise wait for them, and could send them no signal."""
    folder = frozen(tmp_path / "job", "train.epochs=100000")
    job = start(shared_server, folder)
    while not (log := folder / "metrics.jsonl").exists() or not log.stat().st_size:
        shared_server.update()
        assert job.returncode is None
        time.sleep(0.02)
    shared_server.send({"request": "unknown"})
    until = time.monotonic() + 30
    while job.poll() is None:
        assert time.monotonic() < until
        time.sleep(0.02)
    assert job.is_lost and not processes_of(folder)


@pytest.mark.slow
@pytest.mark.nightly
def test_sweep_resumes_its_jobs_as_new_processes_when_the_warm_server_is_killed(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "sweep"
    words = (
        *("parallel=single", "train.epochs=40"),
        *("train.evaluate_every=0", "checkpoint.every_steps=5"),
    )
    sweep = ("seed=1,2", f"hydra.sweep.dir={folder}")
    command = [sys.executable, "train.py", "-m", *tiny(*words), *sweep]
    running = subprocess.Popen(
        command, cwd=ROOT, text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    until = time.monotonic() + 120
    while not (folder / "0" / "checkpoints" / "last.pt").exists():
        assert running.poll() is None and time.monotonic() < until
        time.sleep(0.02)
    [server] = [
        child for child in psutil.Process(running.pid).children() if "--serve" in child.cmdline()
    ]
    server.kill()
    _, error = running.communicate(timeout=300)
    assert running.returncode == 0, error
    assert [job.status for job in read_jobs(folder).jobs] == ["done", "done"]
    assert "resumed from" in (folder / "0" / "logs" / "console.log").read_text()
    alone = run_warm(tmp_path / "alone", *words, "seed=1")
    assert read_result(folder / "0").parameters_hash == read_result(alone).parameters_hash


@pytest.mark.slow(seconds=1)
def test_forked_job_ends_without_result_json_when_signaled_before_its_server_is_ready(
    tmp_path: Path, server: WarmServer
) -> None:
    folder = frozen(tmp_path / "job")
    job = start(server, folder)
    job.send_signal(signal.SIGINT)
    assert (job.wait(), job.is_lost) == (-signal.SIGINT, False)
    assert not (folder / "result.json").exists()


@pytest.mark.parametrize(
    ("overrides", "is_taken"),
    [
        (("parallel=single",), True),
        (("parallel=dp", "parallel.devices=2"), True),
        (("parallel=ddp", "parallel.devices=2"), False),
        (("parallel=single", "sweep.timed=true"), False),
    ],
)
def test_warm_server_forks_only_jobs_of_one_rank_whose_speed_is_not_measured(
    tmp_path: Path, overrides: tuple[str, ...], is_taken: bool
) -> None:
    config = frozen_config(frozen(tmp_path / "job", *overrides))
    assert WarmServer().takes(config) == is_taken


def test_warm_server_forks_no_job_when_the_code_or_an_openmp_variable_has_changed(
    tmp_path: Path, server: WarmServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server has imported the old code. The files environment.json and code.diff of the job
    would describe the new code.
    """
    code = tmp_path / "copy" / "src" / "model.py"
    code.parent.mkdir(parents=True)
    code.write_text("WIDTH = 1\n")
    os.utime(code, ns=(1, 1))
    monkeypatch.setattr(warm_server, "code_files", lambda: {"src/model.py": code})
    folder = frozen(tmp_path / "job")
    job = start(server, folder)
    assert server.takes(frozen_config(folder))
    with monkeypatch.context() as patch:
        patch.setenv("OMP_WAIT_POLICY", "passive")
        assert not server.takes(frozen_config(folder))
    assert server.takes(frozen_config(folder))
    code.write_text("WIDTH = 2\n")
    assert not server.takes(frozen_config(folder))
    job.send_signal(signal.SIGTERM)


def test_warm_server_refuses_to_fork_with_a_second_thread_or_an_initialized_cuda_driver(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    event = threading.Event()
    thread = threading.Thread(target=event.wait)
    thread.start()
    try:
        with pytest.raises(RuntimeError, match="thread"):
            _check_is_forkable()
    finally:
        event.set()
        thread.join()
    monkeypatch.setattr(os, "listdir", lambda path: ["one thread"])
    # An earlier test may have asked the driver.
    monkeypatch.setattr(hardware, "has_initialized_driver", False)
    _check_is_forkable()
    monkeypatch.setattr(hardware, "_open_driver", lambda: SimpleNamespace(cuInit=lambda flags: 100))
    monkeypatch.setattr(hardware, "_driver_error", lambda *given: "no device")
    hardware.Driver.ask("13.0")
    with pytest.raises(RuntimeError, match="CUDA"):
        _check_is_forkable()


@pytest.mark.slow(seconds=1)
def test_rank_is_forked_from_a_process_that_has_not_initialized_the_cuda_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA works in a forked process only if the parent process had not initialized it before
    the fork.
    """
    folder, seen = frozen(tmp_path / "job"), tmp_path / "seen"

    def ask_driver() -> tuple[()]:
        hardware.has_initialized_driver = True
        return ()

    def run(*given: Any) -> None:
        seen.write_text(f"{os.environ['OF_THE_JOB']} {hardware.has_initialized_driver}")

    monkeypatch.setattr(rank, "train", run)
    monkeypatch.setattr(hardware, "has_initialized_driver", False)
    monkeypatch.setattr(hardware, "visible_cuda_devices", ask_driver)
    environment = {**os.environ, "OF_THE_JOB": "yes"}
    ForkedProcess(run_job, folder, environment, []).wait()
    assert seen.read_text() == "yes False"
    assert json.loads((folder / "environment.json").read_text())["devices"] == []


@pytest.mark.slow(seconds=1)
def test_failure_of_a_forked_rank_reaches_its_launcher_even_when_the_rank_cannot_write_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*given: Any) -> None:
        raise ValueError("the disk is full")

    monkeypatch.setattr(rank, "train", run)
    monkeypatch.setattr(rank, "write_failure", lambda folder, record: None)
    folder = frozen(tmp_path / "job")
    assert ForkedProcess(run_job, folder, os.environ.copy(), []).wait() == 1
    failure = read_result(folder).failure
    assert failure is not None and failure["exception"] == "ValueError"


@pytest.mark.slow(seconds=1)
def test_process_that_prepares_a_forked_job_dies_with_the_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job, "prepare", lambda config, folder: time.sleep(60))
    folder, others = frozen(tmp_path / "job"), set(psutil.Process().children(recursive=True))
    launcher = ForkedProcess(run_job, folder, os.environ.copy(), [])
    until = time.monotonic() + 60
    while len(started := set(psutil.Process().children(recursive=True)) - others) < 2:
        assert time.monotonic() < until
        time.sleep(0.02)
    launcher.send_signal(signal.SIGTERM)
    launcher.wait()
    assert not psutil.wait_procs(started, timeout=10)[1]


@pytest.mark.slow(seconds=1)
def test_forked_rank_skips_the_exit_handlers_of_a_tracker_that_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a handler may wait for a server that does not respond."""
    called = tmp_path / "called"

    def run(*given: Any) -> None:
        signals.exit_handlers_may_block = True
        atexit.register(called.touch)

    monkeypatch.setattr(rank, "train", run)
    folder = frozen(tmp_path / "job")
    ForkedProcess(run_job, folder, os.environ.copy(), []).wait()
    assert (folder / "logs" / "rank_0.log").exists() and not called.exists()


@pytest.mark.slow(seconds=4)
def test_warm_server_reads_exit_codes_of_jobs_when_its_sweep_ignores_the_signal_of_ended_children(
    tmp_path: Path, server: WarmServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some supervisors start commands with SIGCHLD ignored. The kernel then keeps no exit codes."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        job = start(server, frozen(tmp_path / "job", "+model.kwargs.no_such_option=1"))
    finally:
        signal.signal(signal.SIGCHLD, before)
    until = time.monotonic() + 60
    while job.poll() is None:
        assert time.monotonic() < until
        time.sleep(0.02)
    assert job.returncode == 2


@pytest.mark.slow(seconds=4)
def test_warm_server_prints_the_error_and_marks_its_job_lost_when_an_import_fails(
    tmp_path: Path,
    server: WarmServer,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "timm.py").write_text("raise ImportError('no timm here')\n")
    monkeypatch.setattr(
        warm_server,
        "with_project_on_path",
        lambda given: {**given, "PYTHONPATH": f"{broken}:{ROOT}"},
    )
    job = start(server, frozen(tmp_path / "job"))
    job.wait()
    assert job.is_lost
    assert "no timm here" in capfd.readouterr().err

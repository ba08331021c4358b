"""Results of a sweep or search survive a stop, a kill and a refusal of Slurm."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import optuna
import pytest

from tests.template.runs import tiny
from timm_parallel.cluster import slurm
from timm_parallel.errors import UnknownFormatError
from timm_parallel.keys import SweepConfig
from timm_parallel.lab.jobs import local_job as child
from timm_parallel.lab.jobs import slurm as array
from timm_parallel.lab.jobs.scheduler import DeviceScheduler, Requirement
from timm_parallel.lab.jobs.slurm import update
from timm_parallel.lab.jobs.warm_server import ForkedJob, WarmServer
from timm_parallel.lab.multirun import main as multirun
from timm_parallel.lab.search.search import Search
from timm_parallel.lab.sweep.points import expand
from timm_parallel.lab.sweep.sweep import Sweep, freeze_jobs, reset_unfinished
from timm_parallel.machine import hardware
from timm_parallel.machine.hardware import CudaDevice
from timm_parallel.record.result import Job, Jobs, Result, read_jobs, read_result, write_result
from timm_parallel.testing.configs import parse

# Script of a fake sweep job. It counts its starts in a file, writes result.json with status done
# and objective 0.5, and then sleeps for JOB_STAYS seconds.
JOB = """
import json, os, pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
with open(folder / "starts", "a") as file:
    file.write("x")
(folder / "result.json").write_text(json.dumps({"status": "done", "objective": 0.5}))
time.sleep(float(os.environ.get("JOB_STAYS", "0")))
"""


@pytest.fixture(autouse=True)
def fake_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        child, "job_command", lambda folder: [sys.executable, "-c", JOB, str(folder)]
    )
    monkeypatch.setattr(WarmServer, "takes", lambda server, config: False)
    monkeypatch.setattr(Sweep, "_close", lambda sweep: sweep.jobs.exit_code())


def main(*words: str) -> int:
    return multirun(parse("-m", *words))


def frozen(folder: Path, *overrides: str) -> Jobs:
    return freeze_jobs(
        folder, expand(parse("-m", *tiny("parallel=single", *overrides)))[1], SweepConfig()
    )


def starts(folder: Path) -> list[int]:
    """Return how often each of the three fake jobs was started."""
    return [
        len(path.read_text()) if (path := folder / job / "starts").exists() else 0 for job in "012"
    ]


def statuses(folder: Path) -> list[str]:
    return [job.status for job in read_jobs(folder).jobs]


@pytest.mark.parametrize(("content", "status"), [('{"sta', "waiting"), (None, "done")])
def test_sweep_resume_runs_a_job_with_a_damaged_result_again_but_never_one_of_newer_code(
    tmp_path: Path, content: str | None, status: str
) -> None:
    jobs = frozen(tmp_path, "seed=1,2")
    for job in jobs.jobs:
        (tmp_path / job.folder).mkdir(exist_ok=True)
        write_result(tmp_path / job.folder, Result("done"))
        job.status = "done"
    if content is not None:
        (tmp_path / "1" / "result.json").write_text(content)
    reset_unfinished(jobs)
    assert [job.status for job in jobs.jobs] == ["done", status]
    # A job whose result is of newer code would run again and replace its result.
    jobs.jobs[0].status = "running"
    (tmp_path / "0" / "result.json").write_text('{"format": 12, "status": "finished"}')
    with pytest.raises(UnknownFormatError, match="format 12"):
        reset_unfinished(jobs)


@pytest.mark.slow(seconds=3)
def test_finished_sweep_job_does_not_run_again_when_a_killed_sweep_is_resumed(
    tmp_path: Path,
) -> None:
    """The checkpoint of a finished job is at the last step. A second run would train no steps and
    overwrite the measured speed.
    """
    jobs = frozen(tmp_path, "seed=1,2,3")
    for job in jobs.jobs[:2]:
        job.status, job.neighbours = "running", 1
    jobs.write()
    write_result(tmp_path / "0", Result("done", seconds={"total": 7.0}))
    write_result(tmp_path / "1", Result("interrupted"))
    assert main(f"sweep.resume={tmp_path}") == 0
    assert starts(tmp_path) == [0, 1, 1]
    first = read_jobs(tmp_path).jobs[0]
    assert (first.status, first.seconds) == ("done", 7.0)
    assert [read_result(tmp_path / job).neighbours for job in "01"] == [1, 0], (
        "result.json of the first job must keep its number of concurrent jobs"
    )


@pytest.mark.slow(seconds=2)
def test_sweep_job_status_is_done_when_sigint_arrives_after_the_job_wrote_a_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JOB_STAYS", "60")
    jobs = frozen(tmp_path, "seed=1,2,3")

    def stop(seconds: float) -> None:
        sleep(seconds)
        if (tmp_path / "0" / "result.json").exists():
            os.kill(os.getpid(), signal.SIGINT)

    sleep = time.sleep
    monkeypatch.setattr(time, "sleep", stop)
    Sweep(jobs).run()
    assert statuses(tmp_path) == ["done", "waiting", "waiting"]


@pytest.mark.nightly
@pytest.mark.slow(seconds=5)
def test_sweep_prints_the_resume_override_when_a_signal_arrives_during_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Sweep, "_close", lambda sweep: os.kill(os.getpid(), signal.SIGTERM))
    before = signal.getsignal(signal.SIGTERM)
    assert Sweep(frozen(tmp_path, "seed=1,2")).run() == 128 + signal.SIGTERM
    assert f"sweep.resume={tmp_path}" in capsys.readouterr().err
    assert statuses(tmp_path) == ["done"] * 2
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.slow(seconds=4)
def test_sweep_exits_1_with_status_interrupted_when_a_job_was_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = JOB.replace('"done"', '"interrupted" if folder.name == "1" else "done"')
    monkeypatch.setattr(
        child, "job_command", lambda folder: [sys.executable, "-c", stopped, str(folder)]
    )
    jobs = frozen(tmp_path, "seed=1,2")
    assert Sweep(jobs).run() == 1
    assert statuses(tmp_path) == ["done", "interrupted"]
    assert read_jobs(tmp_path).status == "interrupted"


@pytest.mark.slow(seconds=1)
@pytest.mark.parametrize(
    ("number", "is_lost", "has_result", "status", "reason"),
    [
        (signal.SIGKILL, True, True, "done", ""),
        # The fork server still runs, and the job exits with an error after writing its result.
        (signal.SIGKILL, False, True, "failed", ""),
        (signal.SIGKILL, False, False, "failed", "SIGKILL, usually for lack of memory"),
        (signal.SIGSEGV, False, False, "failed", "SIGSEGV"),
    ],
)
def test_killed_sweep_job_is_done_if_only_its_fork_server_died_and_otherwise_names_the_signal(
    tmp_path: Path, number: int, is_lost: bool, has_result: bool, status: str, reason: str
) -> None:
    [job] = frozen(tmp_path, "seed=1").jobs
    server, folder = WarmServer(), tmp_path / "0"
    folder.mkdir(exist_ok=True)
    running = child.LocalJob(job, folder, None, server)
    running._process = ForkedJob(server, 1)
    running._process.returncode, running._process.is_lost = -number, is_lost
    if has_result:
        write_result(folder, Result("done"))
    assert running.has_left()
    running.conclude(None)
    assert job.status == status and reason in job.reason


class Scripted(child.LocalJob):
    """Job that runs a few lines of Python instead of training. It exits with 7 after SIGTERM."""

    lines = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7)); print('ready', flush=True)"

    def command(self) -> list[str]:
        return [sys.executable, "-c", f"import signal, sys, time; {self.lines}; time.sleep(60)"]


@pytest.mark.slow(seconds=1)
@pytest.mark.parametrize(
    ("written", "pruned", "stopped_by", "status", "reason"),
    [
        ("interrupted", True, None, "pruned", "worse"),
        ("done", True, None, "done", ""),
        (None, True, None, "pruned", "worse"),
        (None, False, signal.SIGTERM, "interrupted", "SIGTERM before its first step"),
        ("interrupted", False, signal.SIGTERM, "interrupted", ""),
        (None, False, None, "failed", "exit code 7"),
        ("done", False, None, "failed", "exit code 7"),
    ],
)
def test_job_status_distinguishes_pruning_and_stops_from_failures(
    tmp_path: Path,
    written: str | None,
    pruned: bool,
    stopped_by: int | None,
    status: str,
    reason: str,
) -> None:
    [job] = frozen(tmp_path, "seed=1").jobs
    running = Scripted(job, tmp_path / "0", (lambda: "worse") if pruned else None)
    running.folder.mkdir(exist_ok=True)
    running.start(Requirement("cpu", 1), [])
    until = time.monotonic() + 30
    while running.console.read_text() != "ready\n" and time.monotonic() < until:
        time.sleep(0.01)
    if written is not None:
        write_result(running.folder, Result(written))
    if not pruned:
        running.send(signal.SIGTERM)
    while not running.has_ended() and time.monotonic() < until:
        time.sleep(0.01)
    result = running.conclude(stopped_by)
    assert job.status == status and reason in job.reason
    assert (None if result is None else result.status) == (
        "pruned" if written == "interrupted" and pruned else written
    )


@pytest.mark.slow(seconds=6)
def test_sweep_starts_every_gpu_job_instead_of_skipping_when_gpus_have_disappeared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed job runs again when the sweep is resumed on a machine with GPUs. A skipped job would
    not run again.
    """
    monkeypatch.setattr(
        hardware, "visible_cuda_devices", lambda: (CudaDevice(0, "a GPU", 2**34, "GPU-0"),)
    )
    jobs = frozen(tmp_path, "seed=1,2", "parallel.accelerator=cuda")
    monkeypatch.setattr(hardware, "visible_cuda_devices", lambda: ())
    Sweep(jobs).run()
    assert starts(tmp_path) == [1, 1, 0]
    assert DeviceScheduler({"cuda": []}).start_next([(0, Requirement("cuda", 2))]) == (0, [])


@pytest.mark.slow(seconds=6)
def test_ended_trials_of_a_killed_search_are_recorded_without_a_rerun_on_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    diverges = JOB.replace('"done"', '"not_finite" if folder.name == "0" else "done"')
    monkeypatch.setattr(
        child, "job_command", lambda folder: [sys.executable, "-c", diverges, str(folder)]
    )
    tell = Search._tell

    def killed(search: Search, job: Job, trial: Any) -> None:
        if job.id == 1:
            raise KeyboardInterrupt
        tell(search, job, trial)

    folder = tmp_path / "search"
    monkeypatch.setattr(
        "timm_parallel.lab.search.search.write_search_page", lambda jobs, study, config: jobs.folder
    )
    monkeypatch.setattr(Search, "_tell", killed)
    words = ("search=optuna", "parallel=single", "search.n_trials=3", "search.max_failure_rate=1")
    with pytest.raises(KeyboardInterrupt):
        main(*tiny(*words, f"hydra.sweep.dir={folder}"))
    monkeypatch.setattr(Search, "_tell", tell)
    assert statuses(folder) == ["not_finite", "running", "waiting"]
    for n_trials in (2, 3):
        assert main(f"sweep.resume={folder}", f"search.n_trials={n_trials}") == 0
        assert statuses(folder) == ["not_finite", "done", "done"][:n_trials]
    assert starts(folder) == [1, 1, 1]
    trials = optuna.load_study(study_name=None, storage=f"sqlite:///{folder}/study.db").trials
    assert [(trial.state.name, trial.value) for trial in trials] == [
        ("FAIL", None),
        *[("COMPLETE", 0.5)] * 2,
    ]
    shown = [line.split("  ")[:2] for line in capsys.readouterr().out.splitlines()]
    assert ["trial 0", "not_finite"] in shown and ["trial 2", "val/acc_best 0.5000"] in shown


def on_slurm(folder: Path, *words: str) -> int:
    return main(
        *tiny("parallel=single", "cluster=slurm", "seed=1,2,3", f"hydra.sweep.dir={folder}", *words)
    )


def refuse(script: Path) -> str:
    raise ValueError("cluster=slurm: sbatch refuses the job: the controller is away")


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(array, "sbatch", lambda script: "7")
    monkeypatch.setattr(array, "jobs_in_queue", lambda: {})
    monkeypatch.setattr(slurm.shutil, "which", lambda program: f"/usr/bin/{program}")


@pytest.mark.nightly
@pytest.mark.slow
def test_resumed_sweep_keeps_all_run_folders_when_slurm_rejects_the_submission(
    tmp_path: Path, cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "sweep"
    assert on_slurm(folder) == 0
    # Make all jobs look interrupted by the time limit of Slurm.
    for job in "012":
        write_result(folder / job, Result("interrupted"))
        (folder / job / "checkpoints").mkdir()
        (folder / job / "checkpoints" / "last.pt").touch()
    monkeypatch.setattr(array, "sbatch", refuse)
    with pytest.raises(ValueError, match="the controller is away"):
        main(f"sweep.resume={folder}")
    assert len(list(folder.glob("?/checkpoints/last.pt"))) == 3
    new = tmp_path / "new"
    with pytest.raises(ValueError, match="the controller is away"):
        # The jobs with two devices are skipped, because parallel=single uses one device.
        on_slurm(new, "parallel.devices=1,2")
    assert not new.exists()


@pytest.mark.slow(seconds=2)
def test_slurm_array_task_that_exits_without_a_result_is_listed_as_failed(
    tmp_path: Path, cluster: None
) -> None:
    folder = tmp_path / "sweep"
    on_slurm(folder)
    assert '"$SLURM_ARRAY_TASK_ID" "$code"' in (folder / "job.sbatch").read_text()
    update(folder, 0, 2)
    write_result(folder / "1", Result("interrupted"))
    update(folder, 1, 143)
    assert statuses(folder) == ["failed", "waiting", "waiting"]
    assert "exit code 2" in read_jobs(folder).jobs[0].reason
    write_result(folder / "0", Result("done"))
    update(folder, 0, 0)
    assert statuses(folder) == ["done", "waiting", "waiting"], (
        "a job that was submitted twice is done when its second task has finished"
    )


@pytest.mark.slow(seconds=2)
def test_sweep_resume_is_refused_while_the_slurm_array_of_the_sweep_is_in_the_queue(
    tmp_path: Path, cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the command was killed before it saved the ID of the array."""
    folder = tmp_path / "sweep"
    on_slurm(folder)
    for job in "012":
        (folder / job / "job.id").unlink()
    monkeypatch.setattr(array, "jobs_in_queue", lambda: {f"{folder}/job.sbatch": "7_[0-2]"})
    with pytest.raises(ValueError, match=r"job 7_\[0-2\] of this sweep is in the queue"):
        main(f"sweep.resume={folder}")


@pytest.mark.slow(seconds=2)
def test_cluster_wait_waits_for_every_slurm_array_task_and_returns_1_when_one_failed(
    tmp_path: Path, cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "sweep"
    failed = "JobId=8 ArrayTaskId=0 JobState=FAILED ExitCode=1:0\n"
    answers = [
        f"JobId=7 ArrayTaskId=2 JobState=PENDING ExitCode=0:0\n{failed}",
        f"JobId=7 ArrayTaskId=2 JobState=RUNNING ExitCode=0:0\n{failed}",
        "JobId=7 ArrayTaskId=2 JobState=COMPLETED ExitCode=0:0\n",
    ]

    def scontrol(*words: str) -> str:
        if len(answers) == 1:
            jobs = read_jobs(folder)
            for job, status in zip(jobs.jobs, ("failed", "done", "done"), strict=True):
                job.status = status
            jobs.write()
        return answers.pop(0)

    monkeypatch.setattr(slurm, "_output", scontrol)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    assert on_slurm(folder, "cluster.wait=true") == 1, (
        "a task that Slurm no longer lists must count as failed"
    )
    assert not answers

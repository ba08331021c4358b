"""What a sweep or search has gathered stays: however it is stopped, killed, refused or resumed, and wherever it goes on."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import parse, tiny

from src.engine.launch import slurm
from src.engine.machine import hardware
from src.engine.machine.hardware import CudaDevice
from src.engine.record.jobs import Job, Jobs, read_jobs
from src.engine.record.result import Result, read_result, write_result
from src.engine.sweep import array, child
from src.engine.sweep.array import update
from src.engine.sweep.blocks import freeze_jobs
from src.engine.sweep.board import Board
from src.engine.sweep.packing import Need, Packing
from src.engine.sweep.points import expand
from src.engine.sweep.search import Search
from src.engine.sweep.sweep import Sweep, run_sweep
from src.schema import SweepConfig

# Stands for a job: counts its starts, writes that it is done with an objective of 0.5, and stays for a while.
JOB = """
import json, os, pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
with open(folder / "starts", "a") as file:
    file.write("x")
(folder / "result.json").write_text(json.dumps({"status": "done", "objective": 0.5}))
time.sleep(float(os.environ.get("JOB_STAYS", "0")))
"""


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "job_command", lambda folder: [sys.executable, "-c", JOB, str(folder)])
    monkeypatch.setattr(Sweep, "_close", lambda sweep: sweep.jobs.exit_code())


def main(*words: str) -> int:
    return run_sweep(parse("-m", *words), lambda data: None)


def frozen(folder: Path, *overrides: str) -> Jobs:
    return freeze_jobs(folder, expand(parse("-m", *tiny("parallel=single", *overrides)))[1], SweepConfig())


def starts(folder: Path) -> list[int]:
    """How often each job of three was started."""
    return [len(path.read_text()) if (path := folder / job / "starts").exists() else 0 for job in "012"]


def statuses(folder: Path) -> list[str]:
    return [job.status for job in read_jobs(folder).jobs]


@pytest.mark.processes
def test_a_job_that_was_done_before_a_kill_is_not_run_again(tmp_path: Path) -> None:
    """Its checkpoint is at its last step: run again it would time nothing."""
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
        "a neighbour of the first is not forgotten"
    )


@pytest.mark.processes
def test_a_signal_after_the_result_makes_no_failure_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JOB_STAYS", "60")
    jobs = frozen(tmp_path, "seed=1,2,3")

    def stop(board: Board, now: bool = False) -> None:
        if (tmp_path / "0" / "result.json").exists():
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Board, "update", stop)
    Sweep(jobs).run()
    assert statuses(tmp_path) == ["done", "waiting", "waiting"]


@pytest.mark.processes
def test_a_job_that_somebody_stopped_is_no_success(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = JOB.replace('"done"', '"interrupted" if folder.name == "1" else "done"')
    monkeypatch.setattr(child, "job_command", lambda folder: [sys.executable, "-c", stopped, str(folder)])
    jobs = frozen(tmp_path, "seed=1,2,3")
    assert Sweep(jobs).run() == 1
    assert (statuses(tmp_path), read_jobs(tmp_path).status) == (["done", "interrupted", "done"], "interrupted")


@pytest.mark.processes
def test_a_sweep_of_gpus_goes_on_without_them_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its jobs fail, as they cannot but do, and are run again where the devices are; none is passed over in silence."""
    monkeypatch.setattr(hardware, "visible_cuda_devices", lambda: (CudaDevice(0, "a GPU", 2**34, "GPU-0"),))
    jobs = frozen(tmp_path, "seed=1,2,3", "parallel.accelerator=cuda")
    monkeypatch.setattr(hardware, "visible_cuda_devices", lambda: ())
    Sweep(jobs).run()
    assert starts(tmp_path) == [1, 1, 1]
    assert Packing({"cuda": []}).start_next([(0, Need("cuda", 2))]) == (0, [])


def search(folder: Path, *words: str) -> int:
    return main(*tiny("search=optuna", "parallel=single", "search.n_trials=3", f"hydra.sweep.dir={folder}", *words))


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("src.engine.sweep.search_page.write_search_page", lambda jobs, study, config: jobs.folder)


@pytest.mark.slow
@pytest.mark.processes
def test_a_search_keeps_its_folder_whatever_goes_wrong_at_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(jobs: Jobs, study: object, config: object) -> None:
        raise ValueError("a plot of no values")

    monkeypatch.setattr("src.engine.sweep.search_page.write_search_page", fail)
    with pytest.raises(ValueError, match="a plot of no values"):
        search(tmp_path / "search")
    assert statuses(tmp_path / "search") == ["done"] * 3
    assert (tmp_path / "search" / "study.db").exists()


@pytest.mark.processes
def test_a_trial_that_was_done_before_a_kill_is_told_and_not_run_again(
    tmp_path: Path, page: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    tell = Search._tell

    def killed(search: Search, job: Job, trial: Any) -> None:
        if job.id == 1:
            raise KeyboardInterrupt
        tell(search, job, trial)

    folder = tmp_path / "search"
    monkeypatch.setattr(Search, "_tell", killed)
    with pytest.raises(KeyboardInterrupt):
        search(folder)
    monkeypatch.setattr(Search, "_tell", tell)
    assert statuses(folder) == ["done", "running", "waiting"]
    assert main(f"sweep.resume={folder}") == 0
    assert statuses(folder) == ["done"] * 3
    assert starts(folder) == [1, 1, 1]


@pytest.mark.slow
@pytest.mark.processes
def test_a_search_that_goes_on_with_fewer_trials_ends_with_them(tmp_path: Path, page: None) -> None:
    folder = tmp_path / "search"
    search(folder)
    jobs = read_jobs(folder)
    jobs.jobs += [Job(number, f"trial {number}", str(number), []) for number in range(3, 20)]
    jobs.write()
    assert main(f"sweep.resume={folder}", "search.n_trials=4") == 0
    assert statuses(folder) == ["done"] * 4


@pytest.mark.slow
def test_a_search_does_not_go_on_where_no_trial_can_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "visible_cuda_devices", lambda: (CudaDevice(0, "a GPU", 2**34, "GPU-0"),))
    monkeypatch.setattr(Search, "run", lambda search: search.jobs.write() or 0)
    folder = tmp_path / "search"
    search(folder, "parallel.accelerator=cuda")
    monkeypatch.setattr(hardware, "visible_cuda_devices", lambda: ())
    with pytest.raises(ValueError, match="no trial of this search can run here"):
        main(f"sweep.resume={folder}")


def on_slurm(folder: Path, *words: str) -> int:
    return main(*tiny("parallel=single", "cluster=slurm", "seed=1,2,3", f"hydra.sweep.dir={folder}", *words))


def refuse(script: Path) -> str:
    raise ValueError("cluster=slurm: sbatch refuses the job: the controller is away")


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(array, "sbatch", lambda script: "7")
    monkeypatch.setattr(array, "jobs_in_queue", lambda: {})
    monkeypatch.setattr(slurm.shutil, "which", lambda program: f"/usr/bin/{program}")


@pytest.mark.slow
def test_slurm_may_refuse_a_sweep_that_goes_on_and_nothing_of_it_is_lost(
    tmp_path: Path, cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "sweep"
    assert on_slurm(folder) == 0
    for job in "012":  # their time was up
        write_result(folder / job, Result("interrupted"))
        (folder / job / "checkpoints").mkdir()
        (folder / job / "checkpoints" / "last.pt").touch()
    monkeypatch.setattr(array, "sbatch", refuse)
    with pytest.raises(ValueError, match="the controller is away"):
        main(f"sweep.resume={folder}")
    assert len(list(folder.glob("?/checkpoints/last.pt"))) == 3
    new = tmp_path / "new"
    with pytest.raises(ValueError, match="the controller is away"):
        on_slurm(new, "parallel.devices=1,2")  # two devices are skipped
    assert not new.exists()


def test_a_task_that_ends_without_a_result_is_a_row(tmp_path: Path, cluster: None) -> None:
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
    assert statuses(folder) == ["done", "waiting", "waiting"], "it was submitted twice, and the other task went on"


def test_an_array_in_the_queue_is_not_submitted_again(
    tmp_path: Path, cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the command was killed before it had written down the array's number."""
    folder = tmp_path / "sweep"
    on_slurm(folder)
    for job in "012":
        (folder / job / "job.id").unlink()
    monkeypatch.setattr(array, "jobs_in_queue", lambda: {f"{folder}/job.sbatch": "7_[0-2]"})
    with pytest.raises(ValueError, match=r"job 7_\[0-2\] of it is still in the queue"):
        main(f"sweep.resume={folder}")


def test_waiting_for_an_array_waits_for_each_task(
    tmp_path: Path, cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "sweep"
    answers = [
        "JobId=7 ArrayTaskId=2 JobState=PENDING ExitCode=0:0\nJobId=8 ArrayTaskId=0 JobState=FAILED ExitCode=1:0\n",
        "JobId=7 ArrayTaskId=2 JobState=RUNNING ExitCode=0:0\nJobId=8 ArrayTaskId=0 JobState=FAILED ExitCode=1:0\n",
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
    assert on_slurm(folder, "cluster.wait=true") == 1, "the task that failed, which Slurm has forgotten"
    assert not answers


def test_no_name_of_a_job_breaks_the_board(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("COLUMNS", "100")
    jobs = Jobs(tmp_path, "", [Job(0, "data.kwargs.paths=[/a,/b],tags=[bold]", "0", [])])
    board = Board(jobs, Packing({"cpu": ["0"]}))
    with board._console.capture() as shown:
        board._console.print(board._table())
    assert "[/a,/b],tags=[bold]" in shown.get()


def test_the_reader_of_a_sweep_may_leave_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`| tee log`: a Ctrl-C ends tee at once, and the sweep has still to record its jobs."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        board = Board(Jobs(tmp_path, "", []), Packing({"cpu": ["0"]}))
        board.say("nobody reads this")
        print("nor this")

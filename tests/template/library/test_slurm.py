"""Test jobs, sweeps and searches on a real Slurm cluster."""

from __future__ import annotations

import os
import re
import signal
import sys
from functools import partial
from pathlib import Path

import pytest

from tests.template.cluster_commands import ARRAY, SEARCH, SRUN
from tests.template.runs import numbers_of, run_warm, tiny
from tests.template.slurm_cluster import (
    LONG,
    MARKS,
    SLURM,
    Jobs,
)
from tests.template.slurm_cluster import (
    cluster_of_two_nodes as cluster_of_two_nodes,
)
from tests.template.slurm_cluster import (
    jobs_on_the_cluster as jobs_on_the_cluster,
)
from timm_parallel.record.result import read_jobs, read_result
from timm_parallel.testing.commands import Train

pytestmark = MARKS
# With these overrides, a run on one machine trains like the Slurm job on two nodes.
TWO_RANKS = ("parallel=ddp", "parallel.devices=2")


def is_in_state(jobs: Jobs, folder: Path, state: str) -> bool:
    return jobs.state(folder) == state


def test_slurm_job_on_two_nodes_has_the_losses_and_weights_of_a_run_on_one_machine(
    jobs: Jobs, train: Train
) -> None:
    done = train.start(*SLURM, "cluster.wait=true", environment=jobs.environment).finish()
    assert done.returncode == 0, done.output
    assert (done.result["nodes"], done.result["hosts"], done.result["world_size"]) == (
        2,
        ["n1", "n2"],
        2,
    )
    here = numbers_of(run_warm(train.base / "here", *TWO_RANKS))
    assert numbers_of(done.folder) == here
    tasks = SRUN.replace("python", sys.executable).split()
    plain = train.start_command(
        [*tasks, *tiny(f"hydra.run.dir={train.base / 'plain'}")],
        train.base / "plain",
        jobs.environment,
    ).finish()
    assert plain.returncode == 0, plain.output
    assert (plain.result["hosts"], numbers_of(plain.folder)) == (["n1", "n2"], here)


@pytest.mark.nightly
def test_requeued_slurm_jobs_match_an_undisturbed_run_after_sigusr1_and_a_lost_node(
    jobs: Jobs, train: Train
) -> None:
    # Train for so many epochs that the first job is still running when the second job has started.
    long = (*LONG, "train.epochs=120")
    folders = [jobs.submit("slow", *long), jobs.submit("fast", *long, "optim.lr=0.01")]
    for folder in folders:
        jobs.wait_for_steps(folder)
    for folder in folders:
        jobs.slurm("scancel", "--signal=USR1", (folder / "job.id").read_text().strip())
    for folder in folders:
        jobs.wait(partial(is_in_state, jobs, folder, "PENDING"), 150, folder)
    before = [jobs.steps(folder) for folder in folders]
    for folder, count in zip(folders, before, strict=True):
        jobs.wait_for_steps(folder, count)
    jobs.slurm("scontrol", "update", "NodeName=n2", "State=DOWN", "Reason=test")
    for folder in folders:
        jobs.wait(partial(is_in_state, jobs, folder, "PENDING"), 150, folder)
    jobs.wait(jobs.resume_node, 300, folders[0])
    for folder in folders:
        jobs.wait(partial(is_in_state, jobs, folder, ""), 600, folder)
        log = (folder / "logs" / "slurm.log").read_text()
        assert log.count("resumed from") == 2 and "stopped by SIGUSR1" in log, log
    for folder, override in zip(folders, ("optim.lr=0.001", "optim.lr=0.01"), strict=True):
        alone = run_warm(train.base / f"alone_{folder.name}", *TWO_RANKS, *long, override)
        assert numbers_of(folder) == numbers_of(alone), "expected the numbers of an undisturbed run"


@pytest.mark.nightly
def test_scancel_ends_all_processes_of_a_slurm_job_and_refused_job_creates_no_folder(
    jobs: Jobs, train: Train
) -> None:
    folder = jobs.submit("long", *LONG, "train.epochs=100000")
    jobs.wait_for_steps(folder)
    refused = train.start(f"resume={folder}", defaults=False, environment=jobs.environment).finish()
    # On the machine of the running job, the lock of the run folder causes the refusal. On another
    # host, or while the job waits, only the Slurm queue shows the job.
    assert refused.returncode == 2 and re.search(
        "Slurm job .* queue|in use by process", refused.stderr
    ), refused.output
    jobs.slurm("scancel", (folder / "job.id").read_text().strip())
    jobs.wait(lambda: jobs.state(folder) == "", 150, folder)
    jobs.wait(lambda: not jobs.left(folder), 60, folder)
    assert read_result(folder).status == "interrupted"
    done = train.start(*SLURM, "cluster.partition=nowhere", environment=jobs.environment).finish()
    assert done.returncode == 2 and "invalid partition" in done.stderr.lower(), done.output
    assert len(done.stderr.splitlines()) == 1 and not done.folder.exists()


@pytest.mark.nightly
def test_sweep_run_as_slurm_array_completes_when_a_node_is_lost(jobs: Jobs, train: Train) -> None:
    folder = train.base / "sweep"
    words = (*ARRAY.split()[2:], *LONG)
    done = train.start(f"hydra.sweep.dir={folder}", *words, environment=jobs.environment).finish()
    assert done.returncode == 0, done.output
    jobs.wait_for_steps(folder / "1")
    assert len(jobs.slurm("squeue", "--noheader", "--states=R").splitlines()) == 2, "two at a time"
    node = jobs.slurm("squeue", "--noheader", "--states=R", "--format=%N").splitlines()[0]
    jobs.slurm("scontrol", "update", f"nodename={node}", "state=DOWN", "reason=test")
    jobs.wait(lambda: "PENDING" in jobs.slurm("squeue", "--noheader", "--format=%T"), 150, folder)
    jobs.wait(lambda: (folder / "report.html").exists(), 600, folder)
    assert [job.status for job in read_jobs(folder).jobs] == ["done"] * 4
    assert all(read_result(folder / str(job)).status == "done" for job in range(4))


@pytest.mark.nightly
def test_killed_slurm_search_does_not_resubmit_its_running_trials_when_resumed(
    jobs: Jobs, train: Train
) -> None:
    folder = train.base / "search"
    words = (*SEARCH.split()[2:], "search.n_trials=4", "train.epochs=60", "train.log_every=5")
    running = train.start(f"hydra.sweep.dir={folder}", *words, environment=jobs.environment)
    resume = ("-m", f"sweep.resume={folder}")
    # Kill the search twice. After the first kill, the resumed search finds both trials running.
    # Before the second resume, one trial has ended.
    for first in (
        0,
        2,
    ):
        for trial in (first, first + 1):
            running.wait_for(partial(jobs.steps, folder / str(trial)))
        assert len(jobs.slurm("squeue", "--noheader").splitlines()) == 2, "two at a time"
        os.kill(running.process.pid, signal.SIGKILL)
        running.process.wait()
        if first == 2:
            jobs.wait(lambda: (folder / "2" / "result.json").exists(), 300, folder / "2")
        running = train.start(*resume, defaults=False, environment=jobs.environment)
    done = running.finish()
    assert done.returncode == 0, done.output
    trials = read_jobs(folder).jobs
    assert [trial.folder for trial in trials] == list("0123"), "expected one folder per trial"
    assert {trial.status for trial in trials} <= {"done", "pruned"}
    numbers = sorted(int((folder / trial.folder / "job.id").read_text()) for trial in trials)
    assert numbers == list(range(numbers[0], numbers[0] + 4)), "four jobs were submitted"
    logs = [(folder / trial.folder / "logs" / "slurm.log").read_text() for trial in trials]
    assert not any("resumed from" in log for log in logs), "each trial must start once"
    assert len({trial.name for trial in trials}) == 4
    assert (folder / "search.html").exists() and not jobs.slurm("squeue", "--noheader")

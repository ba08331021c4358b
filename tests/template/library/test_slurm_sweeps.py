"""Test sweeps and searches on a real Slurm cluster."""

from __future__ import annotations

import os
import signal
from functools import partial

import pytest

from tests.template.cluster_commands import ARRAY, SEARCH
from tests.template.slurm_cluster import (
    LONG,
    MARKS,
    Jobs,
)
from tests.template.slurm_cluster import (
    cluster_of_two_nodes as cluster_of_two_nodes,
)
from tests.template.slurm_cluster import (
    jobs_on_the_cluster as jobs_on_the_cluster,
)
from timm_parallel.record.jobs import read_jobs
from timm_parallel.record.result import read_result
from timm_parallel.testing.commands import Train

pytestmark = [*MARKS, pytest.mark.nightly]


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

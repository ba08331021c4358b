"""Test jobs on a real Slurm cluster."""

from __future__ import annotations

import re
import sys
from functools import partial
from pathlib import Path

import pytest

from tests.template.cluster_commands import SRUN
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
from timm_parallel.record.result import read_result
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
    """Both jobs get SIGUSR1, the warning of the time limit, at the same time. Later both lose a
    node.
    """
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

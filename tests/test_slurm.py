"""Jobs on a real Slurm cluster of two nodes, which scripts/slurm/dev_cluster.sh starts on this machine."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from cluster_page import ARRAY, CLUSTER_START, CLUSTER_STATUS, CLUSTER_STOP, JOB, SEARCH, SRUN
from conftest import ROOT, Train, read_lines, run_warm, tiny

from src.engine.record.jobs import read_jobs
from src.engine.record.result import read_result

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.slow(seconds=30),
    pytest.mark.processes,
    pytest.mark.skipif(
        shutil.which("slurmctld") is None or os.geteuid() != 0,
        reason="needs root and Slurm (apt install slurm-wlm munge), to start a cluster of its own",
    ),
]
LONG = ("train.epochs=40", "train.evaluate_every=0", "train.log_every=5", "checkpoint.every_steps=20")
SLURM = JOB.split()[2:]  # after `python train.py`
TWO_RANKS = ("parallel=ddp", "parallel.devices=2")  # the same on one machine


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment of people who use the cluster."""
    folder = tmp_path_factory.mktemp("slurm")
    environment = {**os.environ, "DEV_CLUSTER": str(folder / "dev"), "SLURM_CONF": str(folder / "dev" / "slurm.conf")}
    environment["DEV_CLUSTER_PORT"] = str(17000 + 10 * (os.getpid() % 300))  # beside another cluster of this machine
    run = partial(subprocess.run, cwd=ROOT, env=environment, check=True, timeout=300)
    run(CLUSTER_START.split(), stdout=subprocess.DEVNULL)  # no pipe: the daemons would keep it open
    status = run(CLUSTER_STATUS.split(), stdout=subprocess.PIPE, text=True).stdout
    assert "n1" in status and "n2" in status
    yield environment
    run(CLUSTER_STOP.split())
    assert not (folder / "dev").exists()


class Jobs:
    """Submits runs as jobs, and asks Slurm about them."""

    def __init__(self, train: Train, environment: dict[str, str]) -> None:
        self.train, self.environment = train, environment

    def submit(self, name: str, *words: str) -> Path:
        folder = self.train.base / name
        done = self.train.start(*SLURM, f"hydra.run.dir={folder}", *words, environment=self.environment).finish()
        assert done.returncode == 0, done.output
        return folder

    def slurm(self, *command: str) -> str:
        return subprocess.run(command, env=self.environment, capture_output=True, text=True, check=False).stdout.strip()

    def state(self, folder: Path) -> str:
        return self.slurm("squeue", "--noheader", "--format=%T", f"--jobs={(folder / 'job.id').read_text().strip()}")

    def wait(self, what: Callable[[], Any], seconds: float, folder: Path) -> None:
        until = time.monotonic() + seconds
        while not what():
            if time.monotonic() > until:
                log = folder / "logs" / "slurm.log"
                pytest.fail(f"too late: {self.slurm('squeue')}\n{log.read_text() if log.exists() else 'no log'}")
            time.sleep(0.2)

    def resume_node(self) -> bool:
        """Whether n2 can be used again; a node that is still ending a job cannot be resumed yet."""
        self.slurm("scontrol", "update", "NodeName=n2", "State=RESUME")
        return self.slurm("sinfo", "--noheader", "--nodes=n2", "--format=%T") in ("idle", "mixed", "allocated")

    def steps(self, folder: Path) -> int:
        path = folder / "metrics.jsonl"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def wait_for_steps(self, folder: Path, more_than: int = 0) -> None:
        self.wait(lambda: self.steps(folder) > more_than, 400, folder)

    def left(self, folder: Path) -> list[str]:
        words = [" ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])]
        return [word for word in words if str(folder) in word and "src." in word]


@pytest.fixture
def jobs(train: Train, cluster: dict[str, str]) -> Iterator[Jobs]:
    made = Jobs(train, cluster)
    yield made
    made.slurm("scancel", "--user=root")
    made.wait(lambda: not made.slurm("squeue", "--noheader"), 150, train.base)


def numbers(folder: Path) -> tuple[Any, ...]:
    lines = [
        (line["step"], line.get("train/loss")) for line in read_lines(folder / "metrics.jsonl") if "train/loss" in line
    ]
    return read_result(folder).parameters_hash, lines


def test_a_job_on_two_nodes_has_the_numbers_of_one_machine(jobs: Jobs, train: Train) -> None:
    done = train.start(*SLURM, "cluster.wait=true", environment=jobs.environment).finish()
    assert done.returncode == 0, done.output
    assert (done.result["nodes"], done.result["hosts"], done.result["world_size"]) == (2, ["n1", "n2"], 2)
    here = numbers(run_warm(train.base / "here", *TWO_RANKS))
    assert numbers(done.folder) == here
    tasks = SRUN.replace("python", sys.executable).split()
    plain = train.start_command(
        [*tasks, *tiny(f"hydra.run.dir={train.base / 'plain'}")], train.base / "plain", jobs.environment
    ).finish()
    assert plain.returncode == 0, plain.output
    assert (plain.result["hosts"], numbers(plain.folder)) == (["n1", "n2"], here)


def test_two_jobs_go_on_in_their_own_folders_whatever_happens_to_them(jobs: Jobs, train: Train) -> None:
    """A warning signal to both at once; then a node of both is lost."""
    folders = [jobs.submit("slow", *LONG), jobs.submit("fast", *LONG, "optim.lr=0.01")]
    for folder in folders:
        jobs.wait_for_steps(folder)
    for folder in folders:
        jobs.slurm("scancel", "--signal=USR1", (folder / "job.id").read_text().strip())
    for folder in folders:
        jobs.wait(lambda folder=folder: jobs.state(folder) == "PENDING", 150, folder)
    before = [jobs.steps(folder) for folder in folders]
    for folder, count in zip(folders, before, strict=True):
        jobs.wait_for_steps(folder, count)
    jobs.slurm("scontrol", "update", "NodeName=n2", "State=DOWN", "Reason=test")
    for folder in folders:
        jobs.wait(lambda folder=folder: jobs.state(folder) == "PENDING", 150, folder)
    jobs.wait(jobs.resume_node, 300, folders[0])
    for folder in folders:
        jobs.wait(lambda folder=folder: jobs.state(folder) == "", 600, folder)
        log = (folder / "logs" / "slurm.log").read_text()
        assert log.count("going on from") == 2 and "stopped by SIGUSR1" in log, log
    for folder, word in zip(folders, ("optim.lr=0.001", "optim.lr=0.01"), strict=True):
        alone = run_warm(train.base / f"alone_{folder.name}", *TWO_RANKS, *LONG, word)
        assert numbers(folder) == numbers(alone), "as if nothing had happened"


def test_scancel_leaves_nothing_and_a_refused_job_no_folder(jobs: Jobs, train: Train) -> None:
    folder = jobs.submit("long", *LONG, "train.epochs=100000")
    jobs.wait_for_steps(folder)
    refused = train.start(f"resume={folder}", defaults=False, environment=jobs.environment).finish()
    # On one machine the running job holds the lock; from another host, or while it waits, the queue is what tells.
    assert refused.returncode == 2 and re.search("it belongs to job|in use by process", refused.stderr), refused.output
    jobs.slurm("scancel", (folder / "job.id").read_text().strip())
    jobs.wait(lambda: jobs.state(folder) == "", 150, folder)
    jobs.wait(lambda: not jobs.left(folder), 60, folder)
    assert read_result(folder).status == "interrupted"
    done = train.start(*SLURM, "cluster.partition=nowhere", environment=jobs.environment).finish()
    assert done.returncode == 2 and "invalid partition" in done.stderr.lower(), done.output
    assert len(done.stderr.splitlines()) == 1 and not done.folder.exists()


def test_a_sweep_is_one_array_and_a_lost_node_costs_no_task(jobs: Jobs, train: Train) -> None:
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


def test_a_search_killed_and_resumed_finds_the_trials_that_went_on(jobs: Jobs, train: Train) -> None:
    folder = train.base / "search"
    setup = f"cluster.setup='date >> {folder}/began'"
    words = (*SEARCH.split()[2:], setup, "search.n_trials=4", "train.epochs=60", "train.log_every=5")
    running = train.start(f"hydra.sweep.dir={folder}", *words, environment=jobs.environment)
    resume = ("-m", f"sweep.resume={folder}", setup)
    for first in (0, 2):  # killed twice: both trials still run when they are found; then one has ended meanwhile
        for trial in (first, first + 1):
            running.wait_for(lambda trial=trial: jobs.steps(folder / str(trial)))
        assert len(jobs.slurm("squeue", "--noheader").splitlines()) == 2, "two at a time"
        os.kill(running.process.pid, signal.SIGKILL)
        running.process.wait()
        if first == 2:
            jobs.wait(lambda: (folder / "2" / "result.json").exists(), 300, folder / "2")
        running = train.start(*resume, defaults=False, environment=jobs.environment)
    done = running.finish()
    assert done.returncode == 0, done.output
    trials = read_jobs(folder).jobs
    assert [trial.folder for trial in trials] == list("0123"), "each has one folder"
    assert {trial.status for trial in trials} <= {"done", "pruned"}
    numbers = sorted(int((folder / trial.folder / "job.id").read_text()) for trial in trials)
    assert numbers == list(range(numbers[0], numbers[0] + 4)), "four jobs were submitted"
    assert len((folder / "began").read_text().splitlines()) == 4, "and each began once, with the command's setup"
    assert len({trial.name for trial in trials}) == 4
    assert (folder / "search.html").exists() and not jobs.slurm("squeue", "--noheader")

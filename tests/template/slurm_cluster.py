"""Fixtures for tests on a real Slurm cluster. tests/template/dev_cluster.sh starts a cluster
of two nodes on this machine.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.template.cluster_commands import CLUSTER_START, CLUSTER_STATUS, CLUSTER_STOP, JOB
from tests.template.runs import ROOT
from timm_parallel.testing.commands import Train

MARKS = [
    pytest.mark.slurm,
    pytest.mark.slow(seconds=30),
    pytest.mark.processes,
    pytest.mark.skipif(
        shutil.which("slurmctld") is None or os.geteuid() != 0,
        reason="needs root and Slurm (apt install slurm-wlm munge), to start a cluster",
    ),
]
LONG = (
    "train.epochs=40",
    "train.evaluate_every=0",
    "train.log_every=5",
    "checkpoint.every_steps=20",
)
SLURM = JOB.split()[2:]


@pytest.fixture(scope="module", name="cluster")
def cluster_of_two_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Start a Slurm cluster of two nodes; yield the variables that commands need."""
    folder = tmp_path_factory.mktemp("slurm")
    environment = {
        **os.environ,
        "DEV_CLUSTER": str(folder / "dev"),
        "SLURM_CONF": str(folder / "dev" / "slurm.conf"),
    }
    # Derive the port from the process ID, so that two clusters on one machine do not collide.
    environment["DEV_CLUSTER_PORT"] = str(17000 + 10 * (os.getpid() % 300))
    run = partial(subprocess.run, cwd=ROOT, env=environment, check=True, timeout=300)
    # Do not connect a pipe to stdout. The Slurm daemons would inherit the pipe and keep it open.
    run(CLUSTER_START.split(), stdout=subprocess.DEVNULL)
    status = run(CLUSTER_STATUS.split(), stdout=subprocess.PIPE, text=True).stdout
    assert "n1" in status and "n2" in status
    yield environment
    run(CLUSTER_STOP.split())
    assert not (folder / "dev").exists()


class Jobs:
    """Helper that submits training runs to Slurm as jobs, and asks Slurm for their states."""

    def __init__(self, train: Train, environment: dict[str, str]) -> None:
        self.train, self.environment = train, environment

    def submit(self, name: str, *overrides: str) -> Path:
        folder = self.train.base / name
        done = self.train.start(
            *SLURM, f"hydra.run.dir={folder}", *overrides, environment=self.environment
        ).finish()
        assert done.returncode == 0, done.output
        return folder

    def slurm(self, *command: str) -> str:
        return subprocess.run(
            command, env=self.environment, capture_output=True, text=True, check=False
        ).stdout.strip()

    def state(self, folder: Path) -> str:
        return self.slurm(
            "squeue",
            "--noheader",
            "--format=%T",
            f"--jobs={(folder / 'job.id').read_text().strip()}",
        )

    def wait(self, what: Callable[[], Any], seconds: float, folder: Path) -> None:
        until = time.monotonic() + seconds
        while not what():
            if time.monotonic() > until:
                log = folder / "logs" / "slurm.log"
                pytest.fail(
                    "too late: "
                    f"{self.slurm('squeue')}\n{log.read_text() if log.exists() else 'no log'}"
                )
            time.sleep(0.2)

    def resume_node(self) -> bool:
        """Ask Slurm to make node n2 available again, and return True if it is. Slurm refuses this
        while the node still ends a job.
        """
        self.slurm("scontrol", "update", "NodeName=n2", "State=RESUME")
        return self.slurm("sinfo", "--noheader", "--nodes=n2", "--format=%T") in (
            "idle",
            "mixed",
            "allocated",
        )

    def steps(self, folder: Path) -> int:
        path = folder / "metrics.jsonl"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def wait_for_steps(self, folder: Path, more_than: int = 0) -> None:
        self.wait(lambda: self.steps(folder) > more_than, 400, folder)

    def left(self, folder: Path) -> list[str]:
        commands = [
            " ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])
        ]
        return [command for command in commands if str(folder) in command and "src." in command]


@pytest.fixture(name="jobs")
def jobs_on_the_cluster(train: Train, cluster: dict[str, str]) -> Iterator[Jobs]:
    jobs = Jobs(train, cluster)
    yield jobs
    jobs.slurm("scancel", "--user=root")
    jobs.wait(lambda: not jobs.slurm("squeue", "--noheader"), 150, train.base)

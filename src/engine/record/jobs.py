"""`jobs.json`: what a sweep consists of and how far each job is. Always whole, so that a killed sweep can be resumed."""

from __future__ import annotations

import dataclasses
import hashlib
import shlex
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from src.engine.machine.files import read_json, write_json

FORMAT = 1
UNFINISHED = ("waiting", "running", "interrupted")
FAILED = ("failed", "out_of_memory", "not_finite")


@dataclass
class Job:
    id: int
    name: str
    folder: str  # below the sweep folder
    overrides: list[str]  # equal in all blocks of one point
    block: int | None = 0  # of the sweep's blocks; None: a run of the baseline before the first or after the last
    seed: int | None = None  # the first block's plus `block`
    position: int = 0  # in run order
    config_hash: str = ""
    status: str = "waiting"  # waiting, running, or a status of result.json
    reason: str = ""
    started: str | None = None
    ended: str | None = None
    seconds: float | None = None
    neighbours: int = 0  # the most other jobs that ran on its machine at any moment of it

    def wait_again(self) -> None:
        """Wait for another attempt, and say nothing of the earlier one."""
        self.status, self.reason, self.neighbours = "waiting", "", 0
        self.started = self.ended = self.seconds = None


@dataclass
class Jobs:
    """The jobs of one sweep folder."""

    folder: Path
    command: str
    jobs: list[Job]
    created: str = field(default_factory=lambda: now())
    status: str = "running"  # running, done, interrupted
    order_seed: int | None = None  # of the blocks' orders, drawn for this sweep; None: the order as written

    @property
    def baseline_repeated(self) -> list[int]:
        """The jobs that ran the baseline once more, first and last: they belong to no block."""
        return [job.id for job in self.jobs if job.block is None]

    def write(self) -> None:
        own = {key: getattr(self, key) for key in ("command", "created", "status", "order_seed", "baseline_repeated")}
        jobs = [dataclasses.asdict(job) for job in self.jobs]
        write_json(self.folder / "jobs.json", {"format": FORMAT, **own, "jobs": jobs})

    def counts(self) -> str:
        """How many jobs have which status: `3 done, 1 failed`."""
        return ", ".join(f"{count} {status}" for status, count in Counter(job.status for job in self.jobs).items())

    @property
    def have_ended(self) -> bool:
        return not any(job.status in UNFINISHED for job in self.jobs)

    def exit_code(self) -> int:
        """0 if every job is done, or could not run here; else 1."""
        return int(any(job.status in (*UNFINISHED, *FAILED) for job in self.jobs))


def new_jobs(folder: Path) -> Jobs:
    """An empty list that remembers the command line it came from."""
    return Jobs(folder, shlex.join([Path(sys.executable).name, *sys.argv]), [])


def read_jobs(folder: Path) -> Jobs:
    """What `Jobs.write` wrote, in this version or an older one."""
    path = folder / "jobs.json"
    values = read_json(path, FORMAT, "is this a sweep folder?")
    known = {entry.name for entry in dataclasses.fields(Job)}
    try:
        # a job's block was once its `repeat`, and jobs ran in the order of their ids
        whole = [{"block": job.get("repeat", 0), "position": job["id"]} | job for job in values["jobs"]]
        jobs = [Job(**{key: value for key, value in job.items() if key in known}) for job in whole]
        return Jobs(folder, values["command"], jobs, values["created"], values["status"], values.get("order_seed"))
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: damaged, or not of this project ({error})") from None


def config_hash(path: Path) -> str:
    """Of a frozen config.yaml without its comment, which names the folder."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]


def now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S")

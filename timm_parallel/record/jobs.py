"""Read and write `jobs.json`, which lists all jobs of a sweep and their status.

A killed sweep is resumed from this file.
"""

from __future__ import annotations

import dataclasses
import shlex
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from timm_parallel.machine.files import read_json, write_json

FORMAT = 1
# File that scripts/verdict.py writes into its sweep folder. It says what the sweep compares.
VERDICT = "verdict.json"
UNFINISHED = ("waiting", "running", "interrupted")
FAILED = ("failed", "out_of_memory", "not_finite")


@dataclass
class Job:
    # Number of the job in the order in which jobs run, from 0.
    id: int
    name: str
    # Path of the run folder, relative to the sweep folder.
    folder: str
    # Settings of the job, without the seed. They are equal for all repeats of a configuration.
    overrides: list[str]
    # Number of the repeat to which the job belongs, from 0.
    block: int = 0
    # The seed of the job is the seed of the first repeat plus the number of its repeat.
    seed: int | None = None
    # Number of the configuration in the folder configs/. None for a trial of a search, whose config
    # is in its run folder.
    configuration: int | None = None
    # The status is waiting, running, or a status of result.json.
    status: str = "waiting"
    reason: str = ""
    # Error code from errors.py that says why the job was skipped. Empty if the reason has no code.
    code: str = ""
    started: str | None = None
    ended: str | None = None
    seconds: float | None = None
    # Largest number of other jobs that ran on the same machine at the same time.
    neighbours: int = 0

    def reset(self) -> None:
        """Set the status of a job to waiting, and clear the reason and the times of its earlier
        attempt.
        """
        self.status, self.reason, self.code, self.neighbours = "waiting", "", "", 0
        self.started = self.ended = self.seconds = None


@dataclass
class Jobs:
    folder: Path
    command: str
    jobs: list[Job]
    created: str = field(default_factory=lambda: now())
    # The status of the sweep is running, done or interrupted.
    status: str = "running"
    # Seed of the random order of the jobs in each repeat. None: jobs run in the order as written.
    order_seed: int | None = None

    def write(self) -> None:
        values = {key: getattr(self, key) for key in ("command", "created", "status", "order_seed")}
        jobs = [dataclasses.asdict(job) for job in self.jobs]
        write_json(self.folder / "jobs.json", {"format": FORMAT, **values, "jobs": jobs})

    def counts(self) -> str:
        """Format the number of jobs per status, for example `3 done, 1 failed`."""
        return ", ".join(
            f"{count} {status}"
            for status, count in Counter(job.status for job in self.jobs).items()
        )

    @property
    def num_blocks(self) -> int:
        """Return the number of repeats of the sweep."""
        return 1 + max(job.block for job in self.jobs)

    @property
    def have_ended(self) -> bool:
        return not any(job.status in UNFINISHED for job in self.jobs)

    def exit_code(self) -> int:
        """Return the exit code of the sweep: 0 if every job is done or was skipped, else 1."""
        return int(any(job.status in (*UNFINISHED, *FAILED) for job in self.jobs))


def new_jobs(folder: Path) -> Jobs:
    return Jobs(folder, shlex.join([Path(sys.executable).name, *sys.argv]), [])


def read_jobs(folder: Path) -> Jobs:
    """Read jobs.json of a sweep folder. Raises ValueError if the file is missing or damaged."""
    path, quoted = folder / "jobs.json", shlex.quote(str(folder))
    fix = (
        f"; compare ended jobs of a sweep with: python scripts/report.py --out {quoted} $(dirname "
        f"{quoted}/*/result.json)"
    )
    try:
        values = read_json(path, FORMAT, "a sweep writes this file when it starts")
    except ValueError as error:
        raise ValueError(f"{error}; expected a sweep folder with its jobs.json{fix}") from None
    known = {entry.name for entry in dataclasses.fields(Job)}
    try:
        jobs = [
            Job(**{key: value for key, value in job.items() if key in known})
            for job in values["jobs"]
        ]
        return Jobs(
            folder,
            values["command"],
            jobs,
            values["created"],
            values["status"],
            values.get("order_seed"),
        )
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: damaged, or not of this project ({error}){fix}") from None


def now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S")

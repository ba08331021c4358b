"""`jobs.json`: all jobs of a sweep and their status, from which a killed sweep is resumed."""

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
VERDICT = "verdict.json"  # in the sweep folder of a verdict: what it compares
UNFINISHED = ("waiting", "running", "interrupted")
FAILED = ("failed", "out_of_memory", "not_finite")


@dataclass
class Job:
    id: int  # in run order, from 0
    name: str
    folder: str  # below the sweep folder
    overrides: list[str]  # equal for all repeats of one configuration
    block: int = 0  # repeat of the sweep
    seed: int | None = None  # the first repeat's plus `block`
    configuration: int | None = (
        None  # number in configs/; None: a trial of a search, whose config is in its folder
    )
    status: str = "waiting"  # waiting, running, or a status of result.json
    reason: str = ""
    code: str = ""  # of the reason to skip it, see errors.py; empty for a reason without one
    started: str | None = None
    ended: str | None = None
    seconds: float | None = None
    neighbours: int = 0  # largest number of concurrent jobs on its machine

    def reset(self) -> None:
        """Set the status to waiting, and clear the reason and times of the earlier attempt."""
        self.status, self.reason, self.code, self.neighbours = "waiting", "", "", 0
        self.started = self.ended = self.seconds = None


@dataclass
class Jobs:
    folder: Path
    command: str
    jobs: list[Job]
    created: str = field(default_factory=lambda: now())
    status: str = "running"  # running, done, interrupted
    order_seed: int | None = None  # of the random order of each repeat; None: the order as written

    def write(self) -> None:
        values = {key: getattr(self, key) for key in ("command", "created", "status", "order_seed")}
        jobs = [dataclasses.asdict(job) for job in self.jobs]
        write_json(self.folder / "jobs.json", {"format": FORMAT, **values, "jobs": jobs})

    def counts(self) -> str:
        """Format the number of jobs per status: `3 done, 1 failed`."""
        return ", ".join(
            f"{count} {status}"
            for status, count in Counter(job.status for job in self.jobs).items()
        )

    @property
    def num_blocks(self) -> int:
        """Number of repeats."""
        return 1 + max(job.block for job in self.jobs)

    @property
    def have_ended(self) -> bool:
        return not any(job.status in UNFINISHED for job in self.jobs)

    def exit_code(self) -> int:
        """Return 0 if every job is done or was skipped, else 1."""
        return int(any(job.status in (*UNFINISHED, *FAILED) for job in self.jobs))


def new_jobs(folder: Path) -> Jobs:
    return Jobs(folder, shlex.join([Path(sys.executable).name, *sys.argv]), [])


def read_jobs(folder: Path) -> Jobs:
    """Read jobs.json of a sweep folder."""
    path = folder / "jobs.json"
    try:
        values = read_json(path, FORMAT, "is this a sweep folder?")
    except ValueError as error:
        raise ValueError(f"{error}{_report_without_jobs(folder)}") from None
    known = {entry.name for entry in dataclasses.fields(Job)}
    try:
        # In older sweeps, the first and the last job, without a block, ran the baseline again to
        # measure drift.
        listed = [job for job in values["jobs"] if job["block"] is not None]
        jobs = [Job(**{key: value for key, value in job.items() if key in known}) for job in listed]
        return Jobs(
            folder,
            values["command"],
            jobs,
            values["created"],
            values["status"],
            values.get("order_seed"),
        )
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path}: damaged, or not of this project ({error}){_report_without_jobs(folder)}"
        ) from None


def _report_without_jobs(folder: Path) -> str:
    """Return a hint with the command that reports on the ended jobs without jobs.json; empty if no
    job has ended.
    """
    if not any(folder.glob("*/result.json")):
        return ""
    quoted = shlex.quote(str(folder))
    return (
        f"; compare its ended jobs with: python scripts/report.py --out {quoted} $(dirname "
        f"{quoted}/*/result.json)"
    )


def now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S")

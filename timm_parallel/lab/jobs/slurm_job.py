"""Trial of a search as a Slurm job. The job continues if the search is killed. A resumed search
finds the job in the queue by the path of its batch script.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from timm_parallel.cluster.slurm import (
    JOB_ID,
    SCRIPT,
    cancel,
    jobs_in_queue,
    patiently,
    sbatch,
    state_of,
    write_script,
)
from timm_parallel.config.compose import load_config
from timm_parallel.lab.jobs.local_job import LocalJob, Watch
from timm_parallel.lab.jobs.scheduler import Requirement
from timm_parallel.machine.files import write_text
from timm_parallel.record.jobs import Job
from timm_parallel.record.result import Result, read_status

# Time between two queries of Slurm's queue. It is long, because all users share the controller.
LOOK_SECONDS = 3.0
# Statuses of a trial that Slurm has not started, or has stopped and will start again.
CONTINUES = (None, "interrupted")
# Time after which a network file system shows what another node has written.
FILES_SECONDS = 10.0


class SlurmQueue:
    """Cached list of this user's jobs in Slurm's queue. All trials of a search together send one
    query every few seconds.
    """

    def __init__(self) -> None:
        self._jobs: dict[str, str] = {}
        self._looked = -LOOK_SECONDS

    def job_of(self, script: Path) -> str | None:
        """Return the id of the queued or running Slurm job with the batch script `script`, or None.
        The answer may be three seconds old.
        """
        if time.monotonic() - self._looked > LOOK_SECONDS:
            # Keep the old list if Slurm's controller does not answer, because it may be busy or
            # restarting.
            with suppress(ValueError):
                self._look()
        return self._jobs.get(str(script))

    def job_now(self, script: Path) -> str | None:
        """Query Slurm's queue now and return the id of the job with the batch script `script`, or
        None. Retry for up to a minute if the controller does not answer.
        """
        patiently(self._look, LOOK_SECONDS)
        return self._jobs.get(str(script))

    def submit(self, script: Path) -> str:
        self._jobs[str(script)] = job = sbatch(script)
        return job

    def _look(self) -> None:
        self._looked = time.monotonic()
        self._jobs = jobs_in_queue()


class SlurmJob(LocalJob):
    """Trial of a search that runs as a job of Slurm."""

    def __init__(self, job: Job, folder: Path, watch: Watch | None, queue: SlurmQueue) -> None:
        super().__init__(job, folder, watch)
        self._queue, self._script = queue, folder.resolve() / SCRIPT
        # Id of the Slurm job of this trial.
        self._number: str | None = None
        self._cancelled = False
        # Time at which the job was first found neither in Slurm's queue nor with a final result.
        self._missing_since: float | None = None

    def start(self, need: Requirement, names: Sequence[str]) -> None:
        self._number = self._queue.job_now(self._script)
        if self._number is None:
            if read_status(self.folder) not in CONTINUES:
                return
            write_script(load_config(self.folder), self.folder)
            self._number = self._queue.submit(self._script)
        write_text(self.folder / JOB_ID, f"{self._number}\n")

    def has_left(self) -> bool:
        status = read_status(self.folder)
        if self._number is None or status == "done":
            return True
        if self._queue.job_of(self._script) is not None:
            self._missing_since = None
            return False
        if self._cancelled or status not in CONTINUES:
            return True
        self._missing_since = self._missing_since or time.monotonic()
        return time.monotonic() - self._missing_since > FILES_SECONDS

    def send(self, number: int) -> None:
        if self._number is not None:
            self._cancelled = True
            cancel(self._number)

    def conclude(self, stopped_by: int | None) -> Result | None:
        result = super().conclude(stopped_by)
        if result is not None:
            # Record the duration of the run itself, without the time in Slurm's queue.
            self.job.seconds = result.seconds.get("total")
        return result

    def without_result(self, error: str) -> tuple[str, str]:
        state = state_of(str(self._number))
        status = "out_of_memory" if state == "OUT_OF_MEMORY" else "failed"
        return (
            status,
            f"job {self._number} left Slurm's queue{f' as {state}' if state else ''}, and {error}",
        )

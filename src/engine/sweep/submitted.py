"""A trial of a search as a Slurm job: submitted once, followed in its folder and in Slurm's queue, cancelled.

It runs on when the search is killed. So a resumed search looks for the trial first: one that has ended meanwhile is taken
as it is, and one in the queue is followed again. A job is found by the path of its script, which Slurm keeps, even if the
search was killed before it had written down the job's number.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from src.engine.config.cluster import with_code
from src.engine.config.compose import read_frozen
from src.engine.launch.slurm import JOB_ID, SCRIPT, cancel, jobs_in_queue, sbatch, state_of, write_script
from src.engine.machine.files import write_text
from src.engine.record.jobs import Job
from src.engine.record.result import Result, read_status
from src.engine.sweep.child import Child, Watch
from src.engine.sweep.packing import Need
from src.schema import ClusterConfig

LOOK_SECONDS = 3.0  # between two looks at Slurm's queue, which all of its users ask
PATIENCE_SECONDS = 60.0  # with a controller that does not answer, before a search gives up
GOES_ON = (None, "interrupted")  # statuses that are no end: its time was up, or it was cancelled
FILES_SECONDS = 10.0  # for a network file system to show here what a node has written


class SlurmQueue:
    """This user's jobs in Slurm's queue, asked for now and then on behalf of all trials."""

    def __init__(self, code: ClusterConfig) -> None:
        """`code`: a config with the setup and extra of this command, which no frozen config has."""
        self.code = code
        self._jobs: dict[str, str] = {}
        self._looked = -LOOK_SECONDS

    def job_of(self, script: Path) -> str | None:
        """The number of the script's job while it waits or runs, else None; as of a few seconds ago."""
        if time.monotonic() - self._looked > LOOK_SECONDS:
            with suppress(ValueError):  # Slurm's controller is busy or restarts: assume that nothing has changed
                self._look()
        return self._jobs.get(str(script))

    def job_now(self, script: Path) -> str | None:
        """As `job_of`, but as of now; a controller that does not answer is given a minute."""
        until = time.monotonic() + PATIENCE_SECONDS
        while True:
            try:
                self._look()
                return self._jobs.get(str(script))
            except ValueError:
                if time.monotonic() > until:
                    raise
            time.sleep(LOOK_SECONDS)

    def submit(self, script: Path) -> str:
        self._jobs[str(script)] = job = sbatch(script)
        return job

    def _look(self) -> None:
        self._looked = time.monotonic()
        self._jobs = jobs_in_queue()


class Submitted(Child):
    """A trial that Slurm runs."""

    def __init__(self, job: Job, folder: Path, watch: Watch | None, queue: SlurmQueue) -> None:
        super().__init__(job, folder, watch)
        self._queue, self._script = queue, folder.resolve() / SCRIPT
        self._number: str | None = None  # of its job in the queue
        self._cancelled = False
        self._missed: float | None = None  # since when it has been neither in the queue nor ended by its result

    def start(self, need: Need, names: Sequence[str]) -> None:
        self._number = self._queue.job_now(self._script)
        if self._number is None:
            if read_status(self.folder) not in GOES_ON:
                return
            config = read_frozen(self.folder)
            config.cluster = with_code(config.cluster, self._queue.code)
            write_script(config, self.folder)
            self._number = self._queue.submit(self._script)
        write_text(self.folder / JOB_ID, f"{self._number}\n")

    def has_left(self) -> bool:
        status = read_status(self.folder)
        if self._number is None or status == "done":
            return True
        if self._queue.job_of(self._script) is not None:
            self._missed = None
            return False
        if self._cancelled or status not in GOES_ON:
            return True
        self._missed = self._missed or time.monotonic()
        return time.monotonic() - self._missed > FILES_SECONDS

    def send(self, number: int) -> None:
        if self._number is not None:
            self._cancelled = True
            cancel(self._number)

    def conclude(self, stopped_by: int | None) -> Result | None:
        result = super().conclude(stopped_by)
        if result is not None:  # how long it ran, not how long it waited in the queue
            self.job.seconds = result.seconds.get("total")
        return result

    def without_result(self, error: str) -> tuple[str, str]:
        state = state_of(str(self._number))
        status = "out_of_memory" if state == "OUT_OF_MEMORY" else "failed"
        return status, f"job {self._number} left Slurm's queue{f' as {state}' if state else ''}, and {error}"

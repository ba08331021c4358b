"""Jobs of sweeps and searches on Slurm. A sweep is a job array, in which at most `sweep.jobs` tasks
run at the same time. A trial of a search is a job of its own.

No process has to wait for an array. Each task updates jobs.json when its job ends. The job of a
trial continues if the search is killed, and a resumed search finds it in the queue. A task of an
array runs `python -m timm_parallel.lab.jobs.slurm <sweep folder> [<task> <exit code of its job>]`.
"""

from __future__ import annotations

import shlex
import shutil
import sys
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
    script_of,
    state_of,
    wait_for,
    write_script,
)
from timm_parallel.config.compose import load_config
from timm_parallel.keys import Config
from timm_parallel.lab.jobs.folders import write_job_folder
from timm_parallel.lab.jobs.local_job import LocalJob, Watch, sync_from_result
from timm_parallel.lab.jobs.scheduler import Requirement
from timm_parallel.launch.job import SAFE_PATH
from timm_parallel.machine.files import lock_folder, write_text
from timm_parallel.record.result import UNFINISHED, Job, Jobs, read_jobs, read_status

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

    def without_result(self, error: str) -> tuple[str, str]:
        state = state_of(str(self._number))
        status = "out_of_memory" if state == "OUT_OF_MEMORY" else "failed"
        return (
            status,
            f"job {self._number} left Slurm's queue{f' as {state}' if state else ''}, and {error}",
        )


# File with a line per array task: the number of the task and the run folder of its job.
FOLDERS = "array.txt"
# Longest time to wait while another task updates jobs.json.
LOCK_SECONDS = 60.0


def submit_array(jobs: Jobs, max_jobs: int | None, config: Config, is_new: bool) -> int:
    """Submit the waiting jobs of a sweep as one Slurm job array. Return the exit code. If Slurm
    rejects a new sweep, remove the sweep folder.
    """
    waiting = [job for job in jobs.jobs if job.status == "waiting"]
    script = jobs.folder.resolve() / SCRIPT
    if (
        not is_new
        and config.cluster.submit
        and (queued := jobs_in_queue().get(str(script))) is not None
    ):
        raise ValueError(
            f"sweep.resume={jobs.folder}: Slurm job {queued} of this sweep is in the queue; "
            f"wait until it has ended, or run `scancel {queued}`"
        )
    for job in waiting:
        (write_job_folder(jobs.folder, job) / "logs").mkdir(exist_ok=True)
    write_text(
        jobs.folder / FOLDERS,
        "".join(f"{job.id} {(jobs.folder / job.folder).resolve()}\n" for job in jobs.jobs),
    )
    tasks = ",".join(str(job.id) for job in waiting) + ("" if max_jobs is None else f"%{max_jobs}")
    write_text(script, _array_script(config, jobs.folder.resolve(), tasks))
    jobs.write()
    if not config.cluster.submit:
        print(f"Submit with: sbatch {shlex.quote(str(script))}")
        return 0
    try:
        array = sbatch(script)
    except ValueError:
        if is_new:
            shutil.rmtree(jobs.folder)
        raise
    for job in waiting:
        write_text(jobs.folder / job.folder / JOB_ID, f"{array}_{job.id}\n")
    print(
        f"array        {array}: {len(waiting)} tasks"
        + ("" if max_jobs is None else f", {max_jobs} at a time")
    )
    print(f"sweep        {jobs.folder}")
    print(
        f"report       after the last task; before that: python scripts/report.py {jobs.folder}",
        flush=True,
    )
    if not config.cluster.wait:
        return 0
    wait_for(array)
    return read_jobs(jobs.folder).exit_code()


def _array_script(config: Config, folder: Path, tasks: str) -> str:
    """Build the text of the batch script that runs a sweep as a Slurm array. `tasks`: value of
    sbatch's option --array, such as `0,1,2%2`.
    """
    return script_of(
        config,
        what=f"the jobs of {folder}, a task each",
        log=folder / "task_%a.log",
        array=tasks,
        before='folder=$(sed -n "s/^$SLURM_ARRAY_TASK_ID //p" '
        f"{shlex.quote(str(folder / FOLDERS))})",
        folder='"$folder"',
        job='"${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}"',
        after=shlex.join(
            [sys.executable, *SAFE_PATH, "-m", "timm_parallel.lab.jobs.slurm", str(folder)]
        )
        + ' "$SLURM_ARRAY_TASK_ID" "$code"',
    )


def update(folder: Path, task: int | None = None, code: int = 0) -> None:
    """Update jobs.json after the array task `task` has ended with exit code `code`. After the last
    task, write the report.
    """
    with lock_folder(folder, patience=LOCK_SECONDS):
        jobs = read_jobs(folder)
        for job in jobs.jobs:
            if job.id == task:
                job.reset()
            sync_from_result(job, folder / job.folder)
            # An exit code above 128 means that a signal ended the task. Slurm starts such a task
            # again.
            if job.id == task and job.status in UNFINISHED and 0 < code < 128:
                job.status, job.reason = (
                    "failed",
                    f"exit code {code}, and no result; see task_{task}.log",
                )
        if jobs.have_ended:
            jobs.status = "done"
        jobs.write()
        if jobs.status == "done":
            from timm_parallel.lab.report.report import write_report

            print(f"report       {write_report([folder])}")


if __name__ == "__main__":
    update(Path(sys.argv[1]), *map(int, sys.argv[2:]))

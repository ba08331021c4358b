"""Sweep as a Slurm job array: an array task runs one job, and at most `sweep.jobs` tasks run at the
same time.

No process has to wait for the array. Each task updates jobs.json when its job ends, and the last
task writes the report. A task runs `python -m timm_parallel.lab.jobs.slurm_array <sweep folder>
[<task> <exit code of its job>]`.
"""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path

from timm_parallel.cluster.slurm import JOB_ID, SCRIPT, jobs_in_queue, sbatch, script_of, wait_for
from timm_parallel.keys import Config
from timm_parallel.lab.jobs.folders import write_job_folder
from timm_parallel.lab.jobs.local_job import sync_from_result
from timm_parallel.launch.supervisor import SAFE_PATH
from timm_parallel.machine.files import write_text
from timm_parallel.machine.lock import lock_folder
from timm_parallel.record.jobs import UNFINISHED, Jobs, read_jobs

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
            [sys.executable, *SAFE_PATH, "-m", "timm_parallel.lab.jobs.slurm_array", str(folder)]
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

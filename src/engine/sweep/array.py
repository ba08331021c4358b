"""A sweep as one Slurm job array: a task per job, each bound to its run folder, `sweep.jobs` of them at a time.

Nobody here waits for it: a task that has ended brings jobs.json up to date, and the last one writes the report
(`python -m src.engine.sweep.array <sweep folder>`).
"""

from __future__ import annotations

import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from src.engine.launch.slurm import JOB_ID, SCRIPT, queued_job, sbatch, script_of, wait_for
from src.engine.launch.supervisor import SAFE_PATH
from src.engine.machine.files import write_text
from src.engine.machine.lock import own
from src.engine.record.jobs import UNFINISHED, Job, Jobs, read_jobs
from src.engine.record.result import read_result
from src.schema import Config

FOLDERS = "array.txt"  # a run folder per line: task n is line n + 1
LOCK_SECONDS = 60.0  # for another task that brings jobs.json up to date


def submit_array(jobs: Jobs, most: int | None, configs: Sequence[Config]) -> int:
    """Submit the waiting jobs of a sweep as one array. Returns the exit code: at once, unless cluster.wait=true.

    `configs`: theirs.
    """
    waiting, config = [job for job in jobs.jobs if job.status == "waiting"], configs[0]
    if any(other.cluster != config.cluster for other in configs):
        raise ValueError("cluster: the tasks of one array are of one size; sweep over cluster.* by a command for each")
    for job in waiting:
        if (queued := queued_job(jobs.folder / job.folder)) is not None:
            raise ValueError(
                f"sweep.resume={jobs.folder}: job {queued} of it is still in the queue; wait, or scancel it"
            )
        (jobs.folder / job.folder / "logs").mkdir(exist_ok=True)
    write_text(jobs.folder / FOLDERS, "".join(f"{(jobs.folder / job.folder).resolve()}\n" for job in jobs.jobs))
    tasks = ",".join(str(job.id) for job in waiting) + ("" if most is None else f"%{most}")
    script = jobs.folder / SCRIPT
    write_text(script, array_script(config, jobs.folder, tasks))
    jobs.write()
    if not config.cluster.submit:
        print(f"Submit with: sbatch {shlex.quote(str(script))}")
        return 0
    try:
        array = sbatch(script)
    except ValueError:
        if len(waiting) == len(jobs.jobs):  # a new sweep
            shutil.rmtree(jobs.folder)
        raise
    for job in waiting:
        write_text(jobs.folder / job.folder / JOB_ID, f"{array}_{job.id}\n")
    print(f"array        {array}: {len(waiting)} tasks" + ("" if most is None else f", {most} at a time"))
    print(f"sweep        {jobs.folder}")
    print(f"report       when the last has ended; before that: python scripts/report.py {jobs.folder}", flush=True)
    return wait_for(array) if config.cluster.wait else 0


def array_script(config: Config, folder: Path, tasks: str) -> str:
    """The whole of job.sbatch. `tasks`: as --array takes them, `0,1,2%2`."""
    folder = folder.resolve()
    return script_of(
        config,
        what=f"the jobs of {folder}, a task each",
        log=folder / "task_%a.log",
        array=tasks,
        before=f'folder=$(sed -n "$((SLURM_ARRAY_TASK_ID + 1))p" {shlex.quote(str(folder / FOLDERS))})',
        folder='"$folder"',
        job='"${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}"',
        after=shlex.join([sys.executable, *SAFE_PATH, "-m", "src.engine.sweep.array", str(folder)]),
    )


def update(folder: Path) -> None:
    """Bring jobs.json up to date with what the tasks have left so far; the report, when all have ended."""
    until = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            with own(folder):
                return _update(folder)
        except ValueError:
            if time.monotonic() > until:
                raise
            time.sleep(0.2)


def _update(folder: Path) -> None:
    jobs = read_jobs(folder)
    for job in jobs.jobs:
        if job.status in UNFINISHED:
            _read_end(job, folder / job.folder)
    if all(job.status not in UNFINISHED for job in jobs.jobs):
        jobs.status = "done"
    jobs.write()
    if jobs.status == "done":
        from src.engine.report.report import write_report

        print(f"report       {write_report([folder])}")


def _read_end(job: Job, folder: Path) -> None:
    """What a task has left. An interrupted one goes on: it has saved before its time was up, or was cancelled."""
    try:
        result = read_result(folder)
    except ValueError:
        return
    if result.status != "interrupted":
        job.status, job.reason, job.seconds = result.status, result.reason, result.seconds.get("total")


if __name__ == "__main__":
    update(Path(sys.argv[1]))

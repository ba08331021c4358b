"""A sweep as one Slurm job array: a task per job, each bound to its run folder, `sweep.jobs` of them at a time.

No process waits for it: each task that ends brings jobs.json up to date, and the last one writes the report
(`python -m src.engine.sweep.array <sweep folder> [<task> <its exit code>]`).
"""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from src.engine.launch.slurm import JOB_ID, SCRIPT, jobs_in_queue, sbatch, script_of, wait_for
from src.engine.launch.supervisor import SAFE_PATH
from src.engine.machine.files import write_text
from src.engine.machine.lock import own
from src.engine.record.jobs import UNFINISHED, Jobs, read_jobs
from src.engine.sweep.child import read_end
from src.schema import Config

FOLDERS = "array.txt"  # a run folder per line: task n is line n + 1
LOCK_SECONDS = 60.0  # to wait for another task that is bringing jobs.json up to date


def submit_array(jobs: Jobs, most: int | None, configs: Sequence[Config], is_new: bool) -> int:
    """Submit the waiting jobs of a sweep as one array. Returns the exit code: at once, unless cluster.wait=true.

    `configs` are those of the waiting jobs. Where Slurm refuses the array, the folder of a new sweep is removed again.
    """
    waiting, config = [job for job in jobs.jobs if job.status == "waiting"], configs[0]
    script = jobs.folder.resolve() / SCRIPT
    if not is_new and config.cluster.submit and (queued := jobs_in_queue().get(str(script))) is not None:
        raise ValueError(f"sweep.resume={jobs.folder}: job {queued} of it is still in the queue; wait, or scancel it")
    for job in waiting:
        (jobs.folder / job.folder / "logs").mkdir(exist_ok=True)
    write_text(jobs.folder / FOLDERS, "".join(f"{(jobs.folder / job.folder).resolve()}\n" for job in jobs.jobs))
    tasks = ",".join(str(job.id) for job in waiting) + ("" if most is None else f"%{most}")
    write_text(script, array_script(config, jobs.folder, tasks))
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
    print(f"array        {array}: {len(waiting)} tasks" + ("" if most is None else f", {most} at a time"))
    print(f"sweep        {jobs.folder}")
    print(f"report       when the last has ended; before that: python scripts/report.py {jobs.folder}", flush=True)
    if not config.cluster.wait:
        return 0
    wait_for(array)
    return read_jobs(jobs.folder).exit_code()


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
        after=shlex.join([sys.executable, *SAFE_PATH, "-m", "src.engine.sweep.array", str(folder)])
        + ' "$SLURM_ARRAY_TASK_ID" "$code"',
    )


def update(folder: Path, task: int | None = None, code: int = 0) -> None:
    """Bring jobs.json up to date with the results of the tasks so far, and write the report when all have ended.

    `task` has just ended with exit `code`, which stands in for a result that it has not left.
    """
    with own(folder, patience=LOCK_SECONDS):
        jobs = read_jobs(folder)
        for job in jobs.jobs:
            if job.id == task:
                job.wait_again()
            read_end(job, folder / job.folder)
            if (
                job.id == task and job.status in UNFINISHED and 0 < code < 128
            ):  # above: a signal, after which it goes on
                job.status, job.reason = "failed", f"exit code {code}, and no result; see task_{task}.log"
        if jobs.have_ended:
            jobs.status = "done"
        jobs.write()
        if jobs.status == "done":
            from src.engine.report.report import write_report

            print(f"report       {write_report([folder])}")


if __name__ == "__main__":
    update(Path(sys.argv[1]), *map(int, sys.argv[2:]))

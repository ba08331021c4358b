"""A sweep: every point is frozen first, then each runs in processes of its own, in blocks where repeated; then the report."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from src.engine.config.cluster import with_code
from src.engine.config.compose import Command, read_frozen
from src.engine.launch.slurm import check_scheduler
from src.engine.machine.files import claim_folder
from src.engine.record.jobs import FAILED, UNFINISHED, Job, Jobs, read_jobs
from src.engine.sweep.blocks import append_baseline, append_block, check_blocks, freeze_jobs, wants_block
from src.engine.sweep.board import show_points
from src.engine.sweep.child import read_end
from src.engine.sweep.devices import jobs_at_a_time
from src.engine.sweep.points import Point, expand, keys_that_may_change
from src.engine.sweep.runner import Runner
from src.engine.sweep.space import FROZEN
from src.schema import Config, DataConfig


def run_sweep(arguments: Any, training_size: Callable[[DataConfig], int | None]) -> int:
    """Run, resume or only show the sweep of a command line. Returns the exit code.

    `training_size` tells how many training images there are, for the plan that a dry run shows.
    """
    command, points = expand(arguments)
    settings = command.config.sweep
    earlier = None if settings.resume is None else Path(settings.resume)
    if earlier is None:  # else these points are not what runs
        for line in dict.fromkeys(line for point in points for line in point.remarks):
            print(line, flush=True)
    if command.config.search.sampler is not None or (earlier is not None and (earlier / FROZEN).exists()):
        from src.engine.sweep.search import resume_search, start_search

        return start_search(command, points[0]) if earlier is None else resume_search(earlier, command)
    if settings.dry_run and earlier is None:
        show_points(points, training_size)
        return 0
    jobs, most, configs = _new(command, points) if earlier is None else _reopened(earlier, command)
    if configs and configs[0].cluster.scheduler == "slurm":
        from src.engine.sweep.array import submit_array

        return submit_array(jobs, most, configs, is_new=earlier is None)
    return Sweep(jobs, most).run()


def _new(command: Command, points: list[Point]) -> tuple[Jobs, int | None, list[Config]]:
    """A sweep with all of its jobs frozen, how many run at a time, and their configs."""
    settings = command.config.sweep
    if all(point.reason for point in points):
        raise ValueError(f"no job of this sweep can run here; the first: {points[0].reason}")
    check_blocks(points, settings)
    configs = [point.config for point in points if not point.reason]
    if command.config.cluster.scheduler != "local":
        if settings.repeats == "auto":
            raise ValueError("sweep.repeats=auto: a job array is submitted whole; give a number")
        if any(config.cluster != configs[0].cluster for config in configs):
            raise ValueError(
                "cluster: the tasks of one array are of one size; sweep over cluster.* by a command for each"
            )
    most = jobs_at_a_time("sweep.jobs", settings.jobs, configs, command.config)
    check_scheduler(command.config.cluster)
    folder = claim_folder(Path(str(command.tree.hydra.sweep.dir)))
    return freeze_jobs(folder, points, settings), most, configs


def _reopened(folder: Path, command: Command) -> tuple[Jobs, int | None, list[Config]]:
    """An earlier sweep, with what is missing or has failed to be run (again); frozen configs stay as they were."""
    keys = keys_that_may_change(command, folder, "sweep.jobs")
    jobs = read_jobs(folder)
    for job in jobs.jobs:
        read_end(job, folder / job.folder)
    again = [job for job in jobs.jobs if job.status in (*UNFINISHED, *FAILED)]
    configs: list[Config] = []
    for job in again:
        config = read_frozen(folder / job.folder)
        config.cluster = with_code(config.cluster, command.config.cluster)
        configs.append(config)
        job.wait_again()
    jobs.status = "running"
    first = configs[0] if configs else command.config
    asked = command.config.sweep.jobs if "sweep.jobs" in keys else first.sweep.jobs
    return jobs, jobs_at_a_time("sweep.jobs", asked, configs, first), configs


class Sweep(Runner):
    """Runs the waiting jobs of a sweep. A job that fails is a row; a signal ends the jobs under way and the sweep."""

    def __init__(self, jobs: Jobs, most: int | None = 1) -> None:
        """`most`: jobs at a time; None: as many as there are devices for."""
        super().__init__(jobs, most)
        self.settings = read_frozen(next(jobs.folder / job.folder for job in jobs.jobs if job.config_hash)).sweep
        # Where jobs are timed, importing beside the first one would slow its start down.
        self.needed_at_end = () if self.settings.timed else ("src.engine.report.report", "matplotlib.figure")

    def waiting(self) -> list[Job]:
        """With `sweep.repeats=auto`, once all have ended, also those of one more block, as long as the report needs one."""
        if self.settings.repeats == "auto" and self.jobs.have_ended:
            more = append_block if wants_block(self.jobs, self.settings) else append_baseline
            more(self.jobs)
        return [job for job in self.jobs.jobs if job.status == "waiting"]

    def _close(self) -> int:
        """Report, last lines, exit code."""
        from src.engine.report.report import write_report

        report = write_report([self.jobs.folder])
        print(f"sweep        {self.jobs.counts()}")
        print(f"report       {report}")
        if self.stopped_by is not None:
            return self._say_stopped(self.stopped_by)
        for job in self.jobs.jobs:
            if job.status in (*FAILED, "interrupted"):
                log = self.jobs.folder / job.folder / "logs"
                print(f"{job.status}: {job.name}: {job.reason} (log: {log})", file=sys.stderr)
        return self.jobs.exit_code()

"""Run a sweep: save the config of every job, run the jobs with their repeats, and write the report.

Each repeat, called block in the code, runs every configuration once, in random order and with
another seed. If the machine becomes slower or faster over time, this order favors no configuration.
With equal seeds, accuracies can be compared in pairs (Fisher 1935, The Design of Experiments).
"""

from __future__ import annotations

import random
import secrets
import shutil
import sys
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from timm_parallel.cluster.slurm import check_scheduler
from timm_parallel.config.compose import Command
from timm_parallel.keys import Config, SweepConfig, leaves
from timm_parallel.lab.jobs.folders import claim_job_folder, config_folder, frozen_config
from timm_parallel.lab.jobs.local_job import sync_from_result
from timm_parallel.lab.jobs.scheduler import jobs_at_a_time
from timm_parallel.lab.sweep.board import show_headline
from timm_parallel.lab.sweep.points import (
    Point,
    check_jobs_data,
    freeze_job,
    keys_that_may_change,
    names_of,
)
from timm_parallel.lab.sweep.runner import Runner
from timm_parallel.machine.files import claim_folder
from timm_parallel.record.result import (
    FAILED,
    UNFINISHED,
    Job,
    Jobs,
    new_jobs,
    read_jobs,
    read_status,
)


def start_sweep(command: Command, points: list[Point]) -> int:
    """Start a new sweep: save the configs of all jobs, then run the jobs. Return the exit code."""
    settings, cluster = command.config.sweep, command.config.cluster
    configs = [point.config for point in points if not point.reason]
    if not configs:
        raise ValueError(
            f"no job of this sweep can run on this machine; reason of the first job: "
            f"{points[0].reason}"
        )
    check_blocks(points, settings)
    max_jobs = jobs_at_a_time("sweep.jobs", settings.jobs, command.config)
    check_scheduler(cluster)
    folder = claim_folder(Path(str(command.tree.hydra.sweep.dir)))
    try:
        jobs = freeze_jobs(folder, points, settings)
    # Remove the folder after a Ctrl-C too, because a sweep without jobs.json cannot be resumed.
    except BaseException:
        shutil.rmtree(folder)
        raise
    return _run(jobs, max_jobs, configs[0], is_new=True)


def resume_sweep(folder: Path, command: Command) -> int:
    """Continue the sweep in `folder`: run its missing and failed jobs with their saved configs.
    Return the exit code.
    """
    keys = keys_that_may_change(command, folder, "sweep.jobs")
    jobs = read_jobs(folder)
    configs = reset_unfinished(jobs)
    first = configs[0] if configs else command.config
    max_jobs = jobs_at_a_time(
        "sweep.jobs", (command.config if "sweep.jobs" in keys else first).sweep.jobs, first
    )
    check_jobs_data(configs)
    return _run(jobs, max_jobs, first, is_new=False)


def reset_unfinished(jobs: Jobs) -> list[Config]:
    """Reset the jobs of a stopped sweep that are missing or failed, or whose folder or result was
    lost, so that they run again. Return their configs.
    """
    configs: list[Config] = []
    for job in jobs.jobs:
        folder = jobs.folder / job.folder
        sync_from_result(job, folder)
        # A damaged result.json would keep the report from being written.
        is_lost = not folder.exists() or (
            (folder / "result.json").exists() and read_status(folder) is None
        )
        if job.status in (*UNFINISHED, *FAILED) or (job.status == "done" and is_lost):
            configs.append(frozen_config(config_folder(jobs.folder, job)))
            job.reset()
    jobs.status = "running"
    return configs


def _run(jobs: Jobs, max_jobs: int | None, config: Config, is_new: bool) -> int:
    if config.cluster.scheduler == "slurm":
        from timm_parallel.lab.jobs.slurm import submit_array

        return submit_array(jobs, max_jobs, config, is_new)
    return Sweep(jobs, max_jobs).run()


class Sweep(Runner):
    """Runner of the waiting jobs of a sweep. The sweep continues after a failed job and ends after
    a stop signal.
    """

    def __init__(self, jobs: Jobs, max_jobs: int | None = 1) -> None:
        """Prepare the waiting jobs of a sweep, without starting one. `max_jobs`: largest number of
        concurrent jobs, or None if only the devices limit it.
        """
        super().__init__(jobs, max_jobs)
        config = self.config_of(next(job for job in jobs.jobs if job.status != "skipped"))
        # Only a sweep that adds repeats until its comparisons are decided has several with `auto`.
        self._adds_repeats = config.sweep.repeats == "auto" and jobs.num_blocks > 1

    def waiting(self) -> list[Job]:
        if self._adds_repeats and self.jobs.have_ended:
            append_block(self.jobs, self._undecided())
            self.jobs.write()
        return [job for job in self.jobs.jobs if job.status == "waiting"]

    def _undecided(self) -> set[int | None]:
        """Return the numbers of the configurations that need another repeat, and of their
        baseline.
        """
        from timm_parallel.lab.report.report import compare

        settings = [
            setting
            for group in compare([self.jobs.folder]).settings
            if group.undecided
            for setting in (group.named(group.baseline), *group.undecided)
        ]
        ids = {run.position for s in settings for run in (*s.runs, *s.lost)}
        return {job.configuration for job in self.jobs.jobs if job.id in ids}

    def _close(self) -> int:
        from timm_parallel.lab.report.report import write_report

        report = write_report([self.jobs.folder])
        show_headline(self.jobs.folder)
        print(f"sweep        {self.jobs.counts()}")
        for job in self.jobs.jobs:
            if job.status == "skipped":
                print(f"skipped      {job.name}: {job.reason}")
        print(f"report       {report}")
        if self.stopped_by is not None:
            return self._say_stopped(self.stopped_by)
        for job in self.jobs.jobs:
            if job.status in (*FAILED, "interrupted"):
                log = self.jobs.folder / job.folder / "logs"
                print(f"{job.status}: {job.name}: {job.reason} (log: {log})", file=sys.stderr)
        return self.jobs.exit_code()


def count_repeats(points: list[Point], settings: SweepConfig) -> tuple[int, int]:
    """Return the smallest and the largest number of repeats. They differ if the sweep stops by
    itself: with sweep.repeats=auto and a baseline, repeats are added until each comparison with it
    is decided.
    """
    if settings.repeats == "auto" and settings.baseline is not None:
        # Import these modules only if sweep.baseline is set, because the import is slow.
        from timm_parallel.lab.analysis.sequential import FIRST
        from timm_parallel.lab.analysis.settings import can_stop

        if can_stop(_values(point) for point in points if not point.reason):
            return FIRST, settings.max_repeats
    return settings.num_repeats, settings.num_repeats


def _values(point: Point) -> dict[str, object]:
    return {key: value for key, value, _ in leaves(point.config)}


def check_blocks(points: list[Point], settings: SweepConfig) -> None:
    """Raise ValueError if a sweep with repeats also varies the seed, if sweep.baseline matches no
    configuration, or if a cluster is asked to add repeats.
    """
    if settings.num_repeats != 1 and len({point.config.seed for point in points}) > 1:
        raise ValueError(
            f"sweep.repeats={settings.repeats}: each repeat gets its own seed, but the sweep also "
            "varies seed; leave sweep.repeats out, or give seed a single value"
        )
    if settings.baseline is not None:
        from timm_parallel.lab.analysis.settings import check_baseline

        given = [point.overrides for point in points]
        check_baseline(settings.baseline, given, [_values(point) for point in points])
        least, most = count_repeats(points, settings)
        scheduler = points[0].config.cluster.scheduler
        if least != most and scheduler != "local":
            raise ValueError(
                f"sweep.repeats=auto: cluster={scheduler} submits all jobs at once, so it cannot "
                "add repeats; give a number"
            )


def freeze_jobs(
    folder: Path, points: list[Point], settings: SweepConfig, order_seed: int | None = None
) -> Jobs:
    """Write jobs.json of a new sweep, and the config of each configuration. Jobs start from these
    configs, so later edits of conf/ do not change waiting jobs.

    `order_seed`: seed of the random order, which tests set.
    """
    repeats, _ = count_repeats(points, settings)
    repeated = repeats != 1
    jobs = new_jobs(folder)
    if repeated:
        jobs.order_seed = secrets.randbits(32) if order_seed is None else order_seed
    first = []
    for number, (name, point) in enumerate(zip(names_of(points), points, strict=True)):
        subdir = f"{point.subdir}_block_0" if repeated else point.subdir
        first.append(
            Job(0, name, subdir, point.overrides, seed=point.config.seed, configuration=number)
        )
        freeze_job(folder, first[-1], point)
    append_shuffled(jobs, first, block=0)
    for _ in range(1, repeats):
        append_block(jobs, set(range(len(points))))
    jobs.write()
    return jobs


def append_block(jobs: Jobs, configurations: Collection[int | None]) -> None:
    """Append jobs that run each of the configurations once more, except those that were skipped."""
    block, repeated = jobs.num_blocks, []
    for first in jobs.jobs:
        if first.block or first.status == "skipped":
            continue
        if first.configuration in configurations:
            assert first.seed is not None
            subdir = first.folder.replace("_block_0", f"_block_{block}", 1)
            job = replace(first, folder=subdir, block=block, seed=first.seed + block)
            job.reset()
            claim_job_folder(jobs.folder, job)
            repeated.append(job)
    append_shuffled(jobs, repeated, block)


def append_shuffled(jobs: Jobs, more: list[Job], block: int) -> None:
    """Append the jobs `more` as one repeat of a sweep. They are put into random order first, unless
    the sweep has no repeats.
    """
    if jobs.order_seed is not None:
        random.Random(f"{jobs.order_seed} {block}").shuffle(more)
    for job in more:
        job.id = len(jobs.jobs)
        jobs.jobs.append(job)

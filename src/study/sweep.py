"""A sweep: every point frozen first, then run one by one, each in processes of its own, with the report at the end."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from src.config.compose import freeze
from src.config.expand import Point, expand, save_hydra_files
from src.config.schema import SweepConfig
from src.config.space import FROZEN
from src.launch.agent import with_project_on_path
from src.launch.job import job_command
from src.ownership import own
from src.process import STOP_SIGNALS, die_with_parent
from src.records import claim_folder, read_result, write_result
from src.study.board import Board, show_points
from src.study.jobs import FAILED, UNFINISHED, Job, Jobs, config_hash, new_jobs, now, read_jobs

Watch = Callable[[], str]  # why the job under way should be pruned; empty: it should not
POLL_SECONDS = 0.1


def run_sweep(arguments: Any) -> int:
    """Run, resume or only show the sweep of a command line. Returns the exit code.

    Errors: ValueError before any job has started.
    """
    command, points = expand(arguments)
    settings = command.config.sweep
    earlier = None if settings.resume is None else Path(settings.resume)
    if command.config.search.sampler is not None or (earlier is not None and (earlier / FROZEN).exists()):
        from src.study.search import resume_search, start_search

        return start_search(command, points[0]) if earlier is None else resume_search(earlier, command)
    if settings.dry_run:
        show_points(points)
        return 0
    if earlier is not None:
        jobs = reopen(earlier)
    else:
        if all(point.reason for point in points):
            raise ValueError(f"no job of this sweep can run here; the first: {points[0].reason}")
        folder = claim_folder(Path(str(command.tree.hydra.sweep.dir)))
        jobs = freeze_jobs(folder, points, settings, command.config.seed)
    return Sweep(jobs).run()


def freeze_jobs(folder: Path, points: list[Point], settings: SweepConfig, seed: int) -> Jobs:
    """Write every job's config into its folder and the list of jobs beside them: nothing queued changes any more."""
    repeated = [(point, repeat) for repeat in range(settings.repeats) for point in points]
    if settings.shuffle if settings.shuffle is not None else settings.repeats > 1:
        random.Random(seed).shuffle(repeated)  # so that a drifting machine does not favour the points that come first
    common = set.intersection(*(set(point.overrides) for point in points))
    jobs = new_jobs(folder)
    for number, (point, repeat) in enumerate(repeated):
        subdir = point.subdir if settings.repeats == 1 else f"{point.subdir}_repeat_{repeat}"
        name = ",".join(override for override in point.overrides if override not in common) or "the only point"
        job = Job(number, name, subdir, point.overrides, repeat)
        freeze_job(folder, job, point)
        jobs.jobs.append(job)
    jobs.write()
    return jobs


def freeze_job(folder: Path, job: Job, point: Point) -> None:
    """Write the job's config into a run folder of its own below the sweep's `folder`, unless it cannot run here."""
    if point.reason:
        job.status, job.reason = "skipped", point.reason
        return
    run_folder = claim_folder(folder / job.folder)  # hydra.sweep.subdir may name two jobs alike
    job.folder = str(run_folder.relative_to(folder))
    freeze(point.config, run_folder)
    save_hydra_files(point.tree, run_folder)
    job.config_hash = config_hash(run_folder / "config.yaml")


def reopen(folder: Path) -> Jobs:
    """An earlier sweep, with what is missing or failed to be run (again); frozen configs stay as they were."""
    jobs = read_jobs(folder)
    for job in jobs.jobs:
        if job.status in UNFINISHED or job.status in FAILED:
            config = folder / job.folder / "config.yaml"
            if not config.exists():
                raise ValueError(f"{config}: missing, so this job cannot be resumed; start the sweep anew")
            job.status, job.reason, job.started, job.ended, job.seconds = "waiting", "", None, None, None
    jobs.status = "running"
    return jobs


class Runner:
    """Runs jobs one at a time, each in processes of its own. A stop signal ends the job under way and is remembered."""

    def __init__(self, jobs: Jobs) -> None:
        self.jobs = jobs
        self.stopped_by: int | None = None
        self._board = Board(jobs)
        self._child: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Runner:
        self._owned = own(self.jobs.folder)
        self._owned.__enter__()
        self._handlers = {number: signal.signal(number, self._stop) for number in STOP_SIGNALS}
        self._board.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._board.__exit__(kind, error, trace)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._owned.__exit__(kind, error, trace)

    def run(self, job: Job, watch: Watch | None = None) -> None:
        """Run a frozen job to its end. `watch` is asked all the time; once it gives a reason, the job is pruned."""
        folder = self.jobs.folder / job.folder
        job.status, job.started, began = "running", now(), time.monotonic()
        self.jobs.write()
        self._board.update()
        exit_code, pruned = self._wait(folder, watch)
        job.status, job.reason = _outcome(folder, exit_code, pruned, self.stopped_by)
        job.ended, job.seconds = now(), time.monotonic() - began

    def record(self, job: Job) -> None:
        """Put down how a job ended, in jobs.json and on the screen."""
        self.jobs.write()
        self._board.ended(job)

    def _wait(self, folder: Path, watch: Watch | None) -> tuple[int, str]:
        """The exit code of the job's process, and why `watch` had it pruned (empty: it had not)."""
        (folder / "logs").mkdir(exist_ok=True)
        pruned = ""
        with open(folder / "logs" / "console.log", "ab") as console:
            self._child = child = subprocess.Popen(
                job_command(folder),
                env=with_project_on_path(os.environ),
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a terminal's Ctrl-C comes to us alone, and we pass it on once
                preexec_fn=die_with_parent,  # not from the job's own code: a kill -9 of ours may come before that runs
            )
        if self.stopped_by is not None:  # while the process was being started
            child.send_signal(self.stopped_by)
        try:
            while child.poll() is None:
                time.sleep(POLL_SECONDS)
                self._board.update()
                if watch is not None and not pruned and (pruned := watch()):
                    child.send_signal(signal.SIGTERM)
        finally:
            if child.poll() is None:
                child.terminate()
                child.wait()
            self._child = None
        return child.returncode, pruned

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self.stopped_by = self.stopped_by or number
        if self._child is not None and self._child.poll() is None:
            self._child.send_signal(number)


class Sweep:
    """Runs the waiting jobs of a sweep in order. A job that fails is a row; a signal ends the job and the sweep."""

    def __init__(self, jobs: Jobs) -> None:
        self.jobs = jobs

    def run(self) -> int:
        with Runner(self.jobs) as runner:
            for job in self.jobs.jobs:
                if job.status == "waiting" and runner.stopped_by is None:
                    runner.run(job)
                    runner.record(job)
        self.jobs.status = "done" if runner.stopped_by is None else "interrupted"
        self.jobs.write()
        return self._close(runner.stopped_by)

    def _close(self, stopped_by: int | None) -> int:
        """Report, last lines, exit code."""
        from src.study.report import write_report

        counts = self.jobs.counts()
        report = write_report([self.jobs.folder])
        print(f"sweep        {', '.join(f'{count} {status}' for status, count in counts.items())}")
        print(f"report       {report}")
        if stopped_by is not None:
            return say_stopped(stopped_by, self.jobs.folder)
        for job in self.jobs.jobs:
            if job.status in FAILED:
                print(
                    f"{job.status}: {job.name}: {job.reason} (log: {self.jobs.folder / job.folder / 'logs'})",
                    file=sys.stderr,
                )
        return int(any(status in counts for status in FAILED))


def say_stopped(number: int, folder: Path) -> int:
    """How to go on after a stop signal; returns the exit code."""
    name = signal.Signals(number).name
    print(f"Stopped by {name}. Go on with: python train.py -m sweep.resume={folder}", file=sys.stderr)
    return 128 + number


def _outcome(folder: Path, exit_code: int, pruned: str, stopped_by: int | None) -> tuple[str, str]:
    """What the job says of itself, else what its exit code says. A job that ended by being pruned says so from here on."""
    try:
        result = read_result(folder)
    except ValueError as error:
        if pruned:
            return "pruned", pruned
        if stopped_by is not None:
            return "interrupted", f"stopped by {signal.Signals(stopped_by).name} before it had begun"
        return "failed", f"exit code {exit_code}, and {error}"
    if exit_code != 0 and result.status == "done":
        return "failed", f"exit code {exit_code} after its result was written"
    if pruned and result.status == "interrupted":
        result.status, result.reason = "pruned", pruned
        write_result(folder, result)
    return result.status, result.reason

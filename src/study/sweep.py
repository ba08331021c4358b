"""A sweep: every point frozen first, then run one by one, each in processes of its own, with the report at the end."""

from __future__ import annotations

import os
import random
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

from src.config.compose import freeze, save_hydra_files
from src.config.expand import Point, expand
from src.config.schema import SweepConfig
from src.launch.agent import with_project_on_path
from src.launch.job import job_command
from src.process import STOP_SIGNALS
from src.records import claim_folder, read_result
from src.study.board import Board, show_points
from src.study.jobs import FAILED, UNFINISHED, Job, Jobs, config_hash, now, read_jobs


def run_sweep(arguments: Any) -> int:
    """Run, resume or only show the sweep of a command line. Returns the exit code.

    Errors: ValueError before any job has started.
    """
    command, points = expand(arguments)
    settings = command.config.sweep
    if settings.dry_run:
        show_points(points)
        return 0
    if settings.resume is not None:
        jobs = reopen(Path(settings.resume))
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
    jobs = Jobs(folder, shlex.join([Path(sys.executable).name, *sys.argv]), [])
    for number, (point, repeat) in enumerate(repeated):
        subdir = point.subdir if settings.repeats == 1 else f"{point.subdir}_repeat_{repeat}"
        name = ",".join(override for override in point.overrides if override not in common) or "the only point"
        job = Job(number, name, subdir, point.overrides, repeat)
        if point.reason:
            job.status, job.reason = "skipped", point.reason
        else:
            run_folder = claim_folder(folder / subdir)  # hydra.sweep.subdir may name two jobs alike
            job.folder = str(run_folder.relative_to(folder))
            freeze(point.config, run_folder)
            save_hydra_files(point.tree, run_folder)
            job.config_hash = config_hash(run_folder / "config.yaml")
        jobs.jobs.append(job)
    jobs.write()
    return jobs


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


class Sweep:
    """Runs the waiting jobs of a sweep in order. A job that fails is a row; a signal ends the job and the sweep."""

    def __init__(self, jobs: Jobs) -> None:
        self.jobs = jobs
        self.stopped_by: int | None = None
        self._child: subprocess.Popen[bytes] | None = None

    def run(self) -> int:
        before = {number: signal.signal(number, self._stop) for number in STOP_SIGNALS}
        try:
            with Board(self.jobs) as board:
                for job in self.jobs.jobs:
                    if job.status == "waiting" and self.stopped_by is None:
                        self._run_job(job, board)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        self.jobs.status = "done" if self.stopped_by is None else "interrupted"
        self.jobs.write()
        return self._close()

    def _run_job(self, job: Job, board: Board) -> None:
        folder = self.jobs.folder / job.folder
        job.status, job.started, began = "running", now(), time.monotonic()
        self.jobs.write()
        board.update()
        (folder / "logs").mkdir(exist_ok=True)
        with open(folder / "logs" / "console.log", "ab") as console:
            self._child = subprocess.Popen(
                job_command(folder),
                env=with_project_on_path(os.environ),
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a terminal's Ctrl-C comes to us alone, and we pass it on once
            )
            while self._child.poll() is None:
                time.sleep(0.1)
                board.update()
        job.status, job.reason = _outcome(folder, self._child.returncode)
        job.ended, job.seconds = now(), time.monotonic() - began
        self._child = None
        self.jobs.write()
        board.ended(job)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self.stopped_by = self.stopped_by or number
        if self._child is not None and self._child.poll() is None:
            self._child.send_signal(number)

    def _close(self) -> int:
        """Report, last lines, exit code."""
        from src.study.report import write_report

        counts = self.jobs.counts()
        report = write_report([self.jobs.folder])
        print(f"sweep        {', '.join(f'{count} {status}' for status, count in counts.items())}")
        print(f"report       {report}")
        if self.stopped_by is not None:
            name = signal.Signals(self.stopped_by).name
            print(f"Stopped by {name}. Go on with: python train.py -m sweep.resume={self.jobs.folder}", file=sys.stderr)
            return 128 + self.stopped_by
        for job in self.jobs.jobs:
            if job.status in FAILED:
                print(
                    f"{job.status}: {job.name}: {job.reason} (log: {self.jobs.folder / job.folder / 'logs'})",
                    file=sys.stderr,
                )
        return int(any(status in counts for status in FAILED))


def _outcome(folder: Path, exit_code: int) -> tuple[str, str]:
    """What the job says of itself, else what its exit code says."""
    try:
        result = read_result(folder)
    except ValueError as error:
        return "failed", f"exit code {exit_code}, and {error}"
    if exit_code != 0 and result.status == "done":
        return "failed", f"exit code {exit_code} after its result was written"
    return result.status, result.reason

"""Runs the jobs of a sweep one by one, each in processes of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType

from src.engine.config.compose import freeze
from src.engine.launch.job import job_command
from src.engine.launch.supervisor import with_project_on_path
from src.engine.machine.files import claim_folder
from src.engine.machine.lock import own
from src.engine.machine.process import die_with_parent
from src.engine.machine.signals import STOP_SIGNALS
from src.engine.record.jobs import Job, Jobs, config_hash, now
from src.engine.record.result import read_result, write_result
from src.engine.sweep.board import Board
from src.engine.sweep.points import Point, save_hydra_files

Watch = Callable[[], str]  # why the job under way should be pruned; empty: it should not


POLL_SECONDS = 0.1


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

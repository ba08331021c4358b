"""Run the jobs of a sweep or search, one at a time or concurrently, each in its own processes on
its own devices.
"""

from __future__ import annotations

import shlex
import signal
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import FrameType

from timm_parallel.keys import ResolvedConfig
from timm_parallel.lab.jobs.devices import devices_here, need_of, why_alone
from timm_parallel.lab.jobs.folders import config_folder, frozen_config, write_job_folder
from timm_parallel.lab.jobs.local_job import LocalJob, Watch
from timm_parallel.lab.jobs.scheduler import DeviceScheduler, Requirement
from timm_parallel.lab.jobs.slurm_job import SlurmJob, SlurmQueue
from timm_parallel.lab.jobs.warm_server import WarmServer
from timm_parallel.lab.sweep.board import Board
from timm_parallel.machine import hardware
from timm_parallel.machine.lock import lock_folder
from timm_parallel.machine.signals import Stopped, signal_handlers
from timm_parallel.record.jobs import Job, Jobs, now

POLL_SECONDS = 0.02
SLURM_POLL_SECONDS = 0.25  # longer, because a poll reads from a network file system
MIN_JOB_BYTES = 256 * 2**20  # of a process that has imported torch and timm and holds a tiny model


class Runner(ABC):
    """Runner of the waiting jobs of a sweep, or of the trials of a search. A stop signal ends the
    running ones.
    """

    # Modules that `_close` needs and that take a second to import: imported while the first job
    # imports torch.
    needed_at_end: Sequence[str]

    def __init__(self, jobs: Jobs, max_jobs: int | None, slurm: SlurmQueue | None = None) -> None:
        """Find the devices. `max_jobs`: concurrent jobs; None: as many as devices allow. `slurm`:
        queue of jobs on Slurm.
        """
        self.jobs, self.max_jobs, self.slurm = jobs, max_jobs, slurm
        self.stopped_by: int | None = None
        devices = (
            devices_here()
            if slurm is None
            else {"slurm": [str(slot) for slot in range(max_jobs or 1)]}
        )
        self._scheduler = DeviceScheduler(devices, max_jobs)
        self._running: dict[int, LocalJob] = {}
        self._board = Board(jobs)
        self._free_bytes = hardware.available_memory()  # while no job runs
        self._alone: set[int] = set()  # jobs that ran out of memory next to others
        self._server = WarmServer()
        self._is_closing = False
        self._may_start = True  # something has changed since the last try

    @abstractmethod
    def waiting(self) -> list[Job]:
        """Return the jobs, with saved configs, that may start now. `run` ends when no job waits or
        runs.
        """

    def config_of(self, job: Job) -> ResolvedConfig:
        """Return the saved config of a job, except for the seed of a repeat."""
        return frozen_config(config_folder(self.jobs.folder, job))

    def need(self, job: Job) -> Requirement:
        """Return the devices that a job needs."""
        return need_of(self.config_of(job))

    def local_job(self, job: Job) -> LocalJob:
        """Write the run folder of a job that starts on this machine, and return the job."""
        folder = write_job_folder(self.jobs.folder, job)
        server = self._server if self._server.takes(self.config_of(job)) else None
        return LocalJob(job, folder, self.watch(job), server)

    def watch(self, job: Job) -> Watch | None:
        """Return the function that decides whether to prune (stop early) the starting job; None:
        never prune.
        """
        return None

    def ended(self, job: Job) -> None:
        """Record in jobs.json and on the screen that a job has ended."""
        self.jobs.write()
        self._board.ended(job, self.outcome(job))

    def outcome(self, job: Job) -> str:
        """Return what the line of an ended job shows first. Empty: the number of ended jobs and the
        status.
        """
        return ""

    @abstractmethod
    def _close(self) -> int:
        """Write the report on all jobs, print the summary, and return the exit code."""

    def run(self) -> int:
        """Run jobs until none waits, or a signal has ended the running ones.
        Return the exit code.
        """
        with signal_handlers(self._stop):
            with lock_folder(self.jobs.folder), self._board.shown():
                try:
                    self._run()
                finally:
                    # After an exception, jobs may still run.
                    for running in self._running.values():
                        running.send(signal.SIGTERM)
                    for running in self._running.values():
                        running.wait()
                    self._server.close()
            self.jobs.status = "done" if self.jobs.have_ended else "interrupted"
            self.jobs.write()
            self._is_closing = True
            try:
                return self._close()
            except Stopped as stop:
                return self._say_stopped(stop.number)

    def _run(self) -> None:
        if self.max_jobs != 1 and (
            why := why_alone(self._scheduler, {self._need(job) for job in self.waiting()})
        ):
            self._board.say(why)
        # On a single core, an import would slow the job down.
        early = list(self.needed_at_end) if hardware.cores() > 1 else []
        while True:
            while self.stopped_by is None and self._may_start:
                self._may_start = self._start_next()
            if not self._running:
                return
            while early:
                import_module(early.pop())
            time.sleep(POLL_SECONDS if self.slurm is None else SLURM_POLL_SECONDS)
            self._board.update()
            for running in [running for running in self._running.values() if running.has_ended()]:
                self._end(running)
                self._may_start = True

    def _start_next(self) -> bool:
        again = [job for job in self.jobs.jobs if job.id in self._alone and job.status == "waiting"]
        waiting = {job.id: job for job in [*again, *self.waiting()]}
        chosen = self._scheduler.start_next(
            [(id, self._need(job)) for id, job in waiting.items()], self._has_memory
        )
        if chosen is None:
            return False
        job, names = waiting[chosen[0]], chosen[1]
        if self.slurm is None:
            starting = self.local_job(job)
        else:
            folder = write_job_folder(self.jobs.folder, job)
            starting = SlurmJob(job, folder, self.watch(job), self.slurm)
        self._running[job.id] = starting
        job.status, job.started = "running", now()
        # Slurm gives each job its own devices.
        if self.slurm is None:
            for running in self._running.values():
                running.job.neighbours = max(running.job.neighbours, len(self._running) - 1)
        # Before the start, so that a resumed sweep finds a job that outlives this process.
        self.jobs.write()
        starting.start(self._need(job), names if self.max_jobs != 1 else [])
        # The signal may have come while the process was being started.
        if self.stopped_by is not None:
            starting.send(self.stopped_by)
        self._board.update(now=True)
        return True

    def _end(self, ended: LocalJob) -> None:
        job = ended.job
        result = ended.conclude(self.stopped_by)
        del self._running[job.id]
        self._scheduler.release(job.id)
        # A job has its GPU to itself, so running alone would not help if the GPU's memory was too
        # small.
        on_gpu = (
            result is not None and (result.failure or {}).get("exception") == "OutOfMemoryError"
        )
        was_short = job.status == "out_of_memory" and not on_gpu and job.neighbours > 0
        if was_short and job.id not in self._alone and self.stopped_by is None:
            self._alone.add(job.id)
            self._board.say(
                f"{job.name}: out of memory next to {job.neighbours} other job(s); it runs again "
                "alone"
            )
            job.reset()
            self.jobs.write()
        else:
            self.ended(job)

    def _need(self, job: Job) -> Requirement:
        need = self.need(job)
        return replace(need, alone=True) if job.id in self._alone else need

    def _has_memory(self) -> bool:
        """Return True if one more job fits into memory, if it needs as much as the running jobs on
        average.
        """
        if self.slurm is not None:
            return True
        count, taken = len(self._running), self._free_bytes - hardware.available_memory()
        return (count + 1) * max(taken / count, MIN_JOB_BYTES) <= self._free_bytes

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self.stopped_by = self.stopped_by or number
        # While the report is written, there is no job to wait for.
        if self._is_closing:
            raise Stopped(number)
        for running in self._running.values():
            running.send(number)

    def _say_stopped(self, number: int, folder: Path | None = None, *keys: str) -> int:
        """Print how to continue after the stop signal `number`. `folder`: of the sweep, if not the
        folder of the jobs.
        """
        again = shlex.join(
            ["python", "train.py", "-m", f"sweep.resume={folder or self.jobs.folder}", *keys]
        )
        print(f"Stopped by {signal.Signals(number).name}. Continue with: {again}", file=sys.stderr)
        return 128 + number

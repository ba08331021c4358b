"""Run the jobs of a sweep or search, one at a time or concurrently. Each job has its own processes
and devices.
"""

from __future__ import annotations

import shlex
import signal
import sys
import time
from abc import ABC, abstractmethod
from dataclasses import replace
from types import FrameType

from timm_parallel.keys import ResolvedConfig
from timm_parallel.lab.jobs.folders import config_folder, frozen_config, write_job_folder
from timm_parallel.lab.jobs.local_job import LocalJob, Watch
from timm_parallel.lab.jobs.scheduler import DeviceScheduler, Requirement, devices_here, need_of
from timm_parallel.lab.jobs.slurm import SlurmJob, SlurmQueue
from timm_parallel.lab.jobs.warm_server import WarmServer
from timm_parallel.lab.sweep.board import Board
from timm_parallel.machine import hardware
from timm_parallel.machine.files import lock_folder
from timm_parallel.machine.signals import Stopped, signal_handlers
from timm_parallel.record.result import Job, Jobs, now

POLL_SECONDS = 0.02
# Slurm jobs are polled less often, because each poll reads from a network file system.
SLURM_POLL_SECONDS = 0.25
# Memory of a process that has imported torch and timm and holds a tiny model.
MIN_JOB_BYTES = 256 * 2**20


class Runner(ABC):
    """Base class that runs the waiting jobs of a sweep, or the trials of a search. After a stop
    signal, the running jobs save a checkpoint and exit, and no new job starts.
    """

    def __init__(self, jobs: Jobs, max_jobs: int | None, slurm: SlurmQueue | None = None) -> None:
        """Prepare to run jobs on the devices of this machine or in Slurm's queue. `max_jobs`:
        largest number of concurrent jobs, or None if only the devices limit it. `slurm`: queue of
        Slurm jobs, or None to run jobs on this machine.
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
        # Free memory of the machine while no job of the sweep runs.
        self._free_bytes = hardware.available_memory()
        # Ids of jobs that ran out of memory while other jobs ran. They run again alone.
        self._alone: set[int] = set()
        self._server = WarmServer()
        self._is_closing = False
        # True if a job has ended since the last attempt to start one.
        self._may_start = True

    @abstractmethod
    def waiting(self) -> list[Job]:
        """Return the jobs that may start now. Their configs are saved already. The runner ends when
        no job waits or runs.
        """

    def config_of(self, job: Job) -> ResolvedConfig:
        """Read the config that was saved for the configuration of a job. Its seed is that of the
        first repeat, not that of this job.
        """
        return frozen_config(config_folder(self.jobs.folder, job))

    def need(self, job: Job) -> Requirement:
        """Return the devices that a job needs."""
        return need_of(self.config_of(job))

    def local_job(self, job: Job) -> LocalJob:
        """Write the run folder of a job that is about to start on this machine, and return an
        object that controls its process.
        """
        folder = write_job_folder(self.jobs.folder, job)
        server = self._server if self._server.takes(self.config_of(job)) else None
        return LocalJob(job, folder, self.watch(job), server)

    def watch(self, job: Job) -> Watch | None:
        """Return a function that decides whether to stop a starting job early, or None to let it
        run to its end.
        """
        return None

    def ended(self, job: Job) -> None:
        """Write jobs.json and print a line after a job has ended."""
        self.jobs.write()
        self._board.ended(job)

    @abstractmethod
    def _close(self) -> int:
        """Write the report on all jobs and print the summary. Return the exit code."""

    def run(self) -> int:
        """Run jobs until no job waits, or until a stop signal has ended the running ones. Then
        write the report. Return the exit code.
        """
        with signal_handlers(self._stop):
            with lock_folder(self.jobs.folder), self._board.shown():
                try:
                    self._run()
                finally:
                    # Stop the jobs that still run if the loop ended with an exception.
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
        while True:
            while self.stopped_by is None and self._may_start:
                self._may_start = self._start_next()
            if not self._running:
                return
            time.sleep(POLL_SECONDS if self.slurm is None else SLURM_POLL_SECONDS)
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
        # Count concurrent jobs only on this machine, because Slurm gives each job its own devices.
        if self.slurm is None:
            for running in self._running.values():
                running.job.neighbours = max(running.job.neighbours, len(self._running) - 1)
        # Write jobs.json before the job starts. A resumed sweep then finds a job that outlives this
        # process.
        self.jobs.write()
        starting.start(self._need(job), names if self.max_jobs != 1 else [])
        # Send the stop signal again if it arrived while the process of the job was being started.
        if self.stopped_by is not None:
            starting.send(self.stopped_by)
        self._board.update()
        return True

    def _end(self, ended: LocalJob) -> None:
        job = ended.job
        result = ended.conclude(self.stopped_by)
        del self._running[job.id]
        self._scheduler.release(job.id)
        # Do not run a job again if the memory of its GPU was too small. No other job used that GPU,
        # so running alone would not help.
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
        """Return True if there is enough free memory to start another job. The other job is
        expected to need as much as the running jobs do on average.
        """
        if self.slurm is not None:
            return True
        count, taken = len(self._running), self._free_bytes - hardware.available_memory()
        return (count + 1) * max(taken / count, MIN_JOB_BYTES) <= self._free_bytes

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self.stopped_by = self.stopped_by or number
        # Stop at once while the report is written, because no job has to save a checkpoint any
        # more.
        if self._is_closing:
            raise Stopped(number)
        for running in self._running.values():
            running.send(number)

    def _say_stopped(self, number: int) -> int:
        """Print the command that continues a stopped sweep, and return the exit code. `number`:
        number of the stop signal.
        """
        again = shlex.join(["python", "train.py", "-m", f"sweep.resume={self.jobs.folder}"])
        print(f"Stopped by {signal.Signals(number).name}. Continue with: {again}", file=sys.stderr)
        return 128 + number

"""Runs jobs, one at a time or side by side, each in processes of its own on devices of its own."""

from __future__ import annotations

import shlex
import signal
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from types import FrameType

from src.engine.launch.supervisor import signal_handlers
from src.engine.machine import hardware
from src.engine.machine.lock import own
from src.engine.record.jobs import Job, Jobs, now
from src.engine.sweep.board import Board
from src.engine.sweep.child import Child, Watch
from src.engine.sweep.devices import devices_here, least_bytes, need_of, why_alone
from src.engine.sweep.packing import Need, Packing
from src.engine.sweep.points import frozen_config
from src.engine.sweep.submitted import SlurmQueue, Submitted

POLL_SECONDS = 0.02
SLURM_POLL_SECONDS = 0.25  # what a poll looks at lies on a network file system
LOOK_SECONDS = 1.0  # between two looks at the memory of running jobs


class Runner(ABC):
    """Runs the jobs that wait: a sweep has them all, a search asks for the next trial. A stop signal ends those under way."""

    needed_at_end: Sequence[str]  # modules that take a second to import, so they are while the first job imports torch

    def __init__(self, jobs: Jobs, most: int | None, slurm: SlurmQueue | None = None) -> None:
        """`most`: jobs at a time; None: as many as there are devices for. `slurm`: where they run, None for here."""
        self.jobs, self.most, self.slurm = jobs, most, slurm
        self.stopped_by: int | None = None
        self._packing = Packing(devices_here() if slurm is None else {"slurm": list(map(str, range(most or 1)))}, most)
        self._children: dict[int, Child] = {}
        self._board = Board(jobs, self._packing)
        self._largest = 0  # bytes that any job has held
        self._alone: set[int] = set()  # jobs that had too little memory beside others
        self._looked = time.monotonic()
        self._may_start = True  # something has changed since the last try

    @abstractmethod
    def waiting(self) -> list[Job]:
        """Frozen jobs that may start now. Asked again when one has started or ended; all is done when none waits or runs."""

    def watch(self, job: Job) -> Watch | None:
        """What tells that the job, which now starts, should be pruned, if anything."""
        return None

    def ended(self, job: Job) -> None:
        """Record that a job has ended, and how, which it holds: in jobs.json and on the screen."""
        self.jobs.write()
        self._board.ended(job)

    @abstractmethod
    def _close(self) -> int:
        """The page on all jobs, last lines, exit code."""

    def run(self) -> int:
        """Run jobs until none waits any more, or a signal has ended those under way. Returns the exit code."""
        with own(self.jobs.folder), signal_handlers(self._stop), self._board.shown():
            try:
                self._run()
            finally:
                for child in self._children.values():  # of an exception
                    child.send(signal.SIGTERM)
                for child in self._children.values():
                    child.wait()
        self.jobs.status = "done" if self.jobs.have_ended else "interrupted"
        self.jobs.write()
        return self._close()

    def _run(self) -> None:
        if self._packing.most != 1 and (why := why_alone(self._packing, {self._need(job) for job in self.waiting()})):
            self._board.say(why)
        early = list(self.needed_at_end) if hardware.cores() > 1 else []  # on one core nothing is saved
        while True:
            while self.stopped_by is None and self._may_start:
                self._may_start = self._start_next()
            if not self._children:
                return
            while early:
                import_module(early.pop())
            time.sleep(POLL_SECONDS if self.slurm is None else SLURM_POLL_SECONDS)
            self._board.update()
            if self._packing.most != 1 and time.monotonic() - self._looked > LOOK_SECONDS:
                self._looked, self._may_start = time.monotonic(), True
                self._held_bytes()
            for child in [child for child in self._children.values() if child.has_ended()]:
                self._end(child)
                self._may_start = True

    def _start_next(self) -> bool:
        again = [job for job in self.jobs.jobs if job.id in self._alone and job.status == "waiting"]
        waiting = {job.id: job for job in [*again, *self.waiting()]}
        needs = [(id, self._need(job)) for id, job in waiting.items()]
        chosen = self._packing.start_next(needs, lambda id: self._has_memory(waiting[id]))
        if chosen is None:
            return False
        job, names = waiting[chosen[0]], chosen[1]
        folder, watch = self.jobs.folder / job.folder, self.watch(job)
        child = Child(job, folder, watch) if self.slurm is None else Submitted(job, folder, watch, self.slurm)
        self._children[job.id] = child
        job.status, job.started = "running", now()
        if self.slurm is None:  # which gives each job its own
            for one in self._children.values():
                one.job.neighbours = max(one.job.neighbours, len(self._children) - 1)
        self.jobs.write()  # before it starts: what goes on without us must be found again
        child.start(self._need(job), names if self._packing.most != 1 else [])
        if self.stopped_by is not None:  # while the process was being started
            child.send(self.stopped_by)
        self._board.update(now=True)
        return True

    def _end(self, child: Child) -> None:
        job = child.job
        result = child.conclude(self.stopped_by)
        del self._children[job.id]
        self._packing.release(job.id)
        # A GPU is the job's own: alone it would be as short of memory there.
        on_gpu = result is not None and (result.failure or {}).get("exception") == "OutOfMemoryError"
        was_short = job.status == "out_of_memory" and not on_gpu and job.neighbours > 0
        if was_short and job.id not in self._alone and self.stopped_by is None:
            self._alone.add(job.id)
            self._board.say(f"out of memory beside {job.neighbours} other(s), so once more alone: {job.name}")
            job.wait_again()
            self.jobs.write()
        else:
            self.ended(job)

    def _need(self, job: Job) -> Need:
        need = need_of(frozen_config(self.jobs.folder / job.folder))
        return replace(need, alone=True) if job.id in self._alone else need

    def _has_memory(self, job: Job) -> bool:
        """True if the job fits beside those under way, once all have grown to the most that any of this sweep has held."""
        held = self._held_bytes()
        expected = max(self._largest, least_bytes(frozen_config(self.jobs.folder / job.folder)))
        return hardware.available_memory() >= expected + sum(max(0, expected - bytes) for bytes in held)

    def _held_bytes(self) -> list[int]:
        """The memory that each job under way holds now."""
        held = [child.held_bytes() for child in self._children.values()]
        self._largest = max(self._largest, *held, 0)
        return held

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self.stopped_by = self.stopped_by or number
        for child in self._children.values():
            child.send(number)

    def _say_stopped(self, number: int) -> int:
        """Say how to go on after a stop signal; returns the exit code."""
        name = signal.Signals(number).name
        again = shlex.join(["python", "train.py", "-m", f"sweep.resume={self.jobs.folder}"])
        print(f"Stopped by {name}. Go on with: {again}", file=sys.stderr)
        return 128 + number

"""Runs jobs, one at a time or side by side, each in processes of its own on devices of its own."""

from __future__ import annotations

import shlex
import signal
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Protocol

from src.engine.config.compose import read_frozen
from src.engine.launch.supervisor import signal_handlers
from src.engine.machine import hardware
from src.engine.machine.lock import own
from src.engine.record.jobs import Job, Jobs, now
from src.engine.record.result import Result
from src.engine.sweep.board import Board
from src.engine.sweep.child import Child, Process, Watch
from src.engine.sweep.devices import devices_here, least_bytes, need_of, why_alone
from src.engine.sweep.packing import Need, Packing
from src.engine.sweep.submitted import SlurmQueue, Submitted

POLL_SECONDS = 0.02
SLURM_POLL_SECONDS = 0.25  # what a poll looks at lies on a network file system
LOOK_SECONDS = 1.0  # between two looks at the memory of running jobs


class Queue(Protocol):
    """Where jobs come from: a sweep has them all, a search asks for the next trial."""

    needed_at_end: Sequence[str]  # modules that take a second to import, so they are while the first job imports torch

    def waiting(self) -> Sequence[Job]:
        """Frozen jobs that may start now. Asked again when one has started or ended; all is done when none waits or runs."""

    def watch(self, job: Job) -> Watch | None:
        """What tells that the running job should be pruned, if anything."""

    def ended(self, job: Job) -> None:
        """Called when a job has ended and holds how, before that is recorded."""


class Runner:
    """Runs the jobs of a queue. A stop signal ends the jobs under way and is remembered."""

    def __init__(self, jobs: Jobs, most: int | None = 1, slurm: SlurmQueue | None = None) -> None:
        """`most`: jobs at a time; None: as many as there are devices for. `slurm`: where they run, None for here."""
        self.jobs = jobs
        self.stopped_by: int | None = None
        self._slurm = slurm
        self._packing = Packing(devices_here() if slurm is None else {"slurm": list(map(str, range(most or 1)))}, most)
        self._children: dict[int, Child] = {}
        self._board = Board(jobs, self._packing)
        self._needs: dict[int, tuple[Need, int]] = {}  # of a job, and the least memory that it takes
        self._largest = 0  # bytes that any job has held
        self._alone: set[int] = set()  # jobs that had too little memory beside others
        self._looked = time.monotonic()
        self._may_start = True  # something has changed since the last try

    def run(self, queue: Queue) -> None:
        """Run jobs until the queue has no more, or a signal has ended those under way."""
        with own(self.jobs.folder), signal_handlers(self._stop), self._board.shown():
            try:
                self._run(queue)
            finally:
                for child in self._children.values():  # of an exception
                    child.send(signal.SIGTERM)
                for child in self._children.values():
                    child.wait()

    def _run(self, queue: Queue) -> None:
        self._say_if_alone(queue)
        early = list(queue.needed_at_end) if hardware.cores() > 1 else []  # on one core nothing is saved
        while True:
            while self.stopped_by is None and self._may_start:
                self._may_start = self._start_next(queue)
            if not self._children:
                return
            while early:
                import_module(early.pop())
            time.sleep(POLL_SECONDS if self._slurm is None else SLURM_POLL_SECONDS)
            self._board.update()
            self._look_at_memory()
            for child in [child for child in self._children.values() if child.has_ended()]:
                self._end(child, queue)
                self._may_start = True

    def record(self, job: Job) -> None:
        """Write down how a job ended, in jobs.json and on the screen."""
        self.jobs.write()
        self._board.ended(job)

    def _start_next(self, queue: Queue) -> bool:
        if self._packing.is_full:
            return False
        again = [job for job in self.jobs.jobs if job.id in self._alone and job.status == "waiting"]
        waiting = {job.id: job for job in [*again, *queue.waiting()]}
        chosen = self._packing.start_next([(id, self._need(job)) for id, job in waiting.items()], self._has_memory)
        if chosen is None:
            return False
        job, names = waiting[chosen[0]], chosen[1]
        child = self._children[job.id] = self._child(job, queue.watch(job))
        job.status, job.started = "running", now()
        if self._slurm is None:  # which gives each job its own
            for one in self._children.values():
                one.job.neighbours = max(one.job.neighbours, len(self._children) - 1)
        self.jobs.write()  # before it starts: what goes on without us must be found again
        child.start(self._need(job), names if self._packing.most != 1 else [])
        if self.stopped_by is not None:  # while the process was being started
            child.send(self.stopped_by)
        self._board.update(now=True)
        return True

    def _child(self, job: Job, watch: Watch | None) -> Child:
        folder = self.jobs.folder / job.folder
        return Process(job, folder, watch) if self._slurm is None else Submitted(job, folder, watch, self._slurm)

    def _end(self, child: Child, queue: Queue) -> None:
        job = child.job
        result = child.conclude(self.stopped_by)
        del self._children[job.id]
        self._packing.release(job.id)
        self._largest = max(self._largest, child.peak_bytes)
        if self.stopped_by is None and job.neighbours and job.id not in self._alone and wants_memory(job, result):
            self._alone.add(job.id)
            self._board.say(f"out of memory beside {job.neighbours} other(s), so once more alone: {job.name}")
            job.wait_again()
            self.jobs.write()
        else:
            queue.ended(job)
            self.record(job)

    def _say_if_alone(self, queue: Queue) -> None:
        """Say so where jobs side by side were asked for, but each takes so much that it will run alone."""
        needs = {self._need(job) for job in queue.waiting()} if self._packing.most != 1 else set()
        if needs and all(self._packing.beside(need) == 1 for need in needs):
            self._board.say(why_alone(self._packing, max(needs, key=lambda need: need.count)))

    def _need(self, job: Job) -> Need:
        if job.id not in self._needs:
            config = read_frozen(self.jobs.folder / job.folder)
            self._needs[job.id] = need_of(config), least_bytes(config)
        need = self._needs[job.id][0]
        return Need(need.kind, need.count, True) if job.id in self._alone else need

    def _has_memory(self, job: int) -> bool:
        """True if the job fits beside those under way, once all have grown to the most that any of this sweep has held."""
        expected = max(self._largest, self._needs[job][1])
        held = [child.held_bytes() for child in self._children.values()]
        self._largest = max(self._largest, *held)
        return hardware.available_memory() >= expected + sum(max(0, expected - bytes) for bytes in held)

    def _look_at_memory(self) -> None:
        if self._packing.most != 1 and time.monotonic() - self._looked > LOOK_SECONDS:
            self._looked, self._may_start = time.monotonic(), True
            self._largest = max([self._largest, *(child.held_bytes() for child in self._children.values())])

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self.stopped_by = self.stopped_by or number
        for child in self._children.values():
            child.send(number)


def wants_memory(job: Job, result: Result | None) -> bool:
    """True if the job ended because this machine's memory was short. A GPU is the job's own: there it would end so again."""
    on_device = result is not None and (result.failure or {}).get("exception") == "OutOfMemoryError"
    return job.status == "out_of_memory" and not on_device


def say_stopped(number: int, folder: Path) -> int:
    """Say how to go on after a stop signal; returns the exit code."""
    name = signal.Signals(number).name
    again = shlex.join(["python", "train.py", "-m", f"sweep.resume={folder}"])
    print(f"Stopped by {name}. Go on with: {again}", file=sys.stderr)
    return 128 + number

"""A job of a sweep or search under way: how it is started, followed and stopped, and how it ended."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from src.engine.launch.job import job_command
from src.engine.launch.supervisor import with_project_on_path
from src.engine.machine import hardware, usage
from src.engine.machine.platform import KILL, WINDOWS, pass_on
from src.engine.record.jobs import UNFINISHED, Job, now
from src.engine.record.result import Result, read_result, write_result
from src.engine.sweep.devices import share_of
from src.engine.sweep.packing import Need

Watch = Callable[[], str]  # returns why the job under way should be pruned; empty if it should not


def read_end(job: Job, folder: Path) -> None:
    """Take over how an unfinished job has ended, as its folder tells it: whoever followed it was killed before noting it.

    An interrupted one has saved, and goes on.
    """
    try:
        result = read_result(folder)
    except ValueError:
        return
    if job.status in UNFINISHED and result.status != "interrupted":
        job.status, job.reason, job.seconds = result.status, result.reason, result.seconds.get("total")
        if result.neighbours < job.neighbours:
            result.neighbours = job.neighbours
            write_result(folder, result)


class Child:
    """A job under way, in processes of its own here, on its share of the machine; Slurm's are in submitted.py."""

    def __init__(self, job: Job, folder: Path, watch: Watch | None) -> None:
        self.job, self.folder, self._watch = job, folder, watch
        self._pruned = ""
        self._began = time.monotonic()
        self._oom_kills = hardware.oom_kills()
        self._process: subprocess.Popen[bytes] | None = None  # None while it is being started, and where Slurm runs it

    def start(self, need: Need, names: Sequence[str]) -> None:
        """`names`: the devices that this job has to itself; empty: all that this process may use."""
        variables, prepare = share_of(need, names)
        (self.folder / "logs").mkdir(exist_ok=True)
        with open(self.folder / "logs" / "console.log", "ab") as console:
            self._process = subprocess.Popen(
                job_command(self.folder),
                env={**with_project_on_path(os.environ), **variables},
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a terminal's Ctrl-C comes to us alone, and we pass it on once
                preexec_fn=None if WINDOWS else prepare,
            )

    def has_left(self) -> bool:
        assert self._process is not None
        return self._process.poll() is not None

    def send(self, number: int) -> None:
        """Make it save and leave, by the signal `number`. Does nothing if it has left."""
        if self._process is not None:
            pass_on(number, self._process)

    def wait(self) -> None:
        """After `send`: until it has left, if it is a process here."""
        if self._process is not None:
            self._process.wait()

    def held_bytes(self) -> int:
        """Memory of this machine that it holds now."""
        return 0 if self._process is None else usage.held_by(self._process.pid)

    def exit_code(self) -> int:
        """A job whose result says done has failed if this is not 0. Slurm's have none."""
        return 0 if self._process is None else int(self._process.returncode)

    def without_result(self, error: str) -> tuple[str, str]:
        """Status and reason of a job that left by itself without a result. `error` says what was found instead."""
        if self.exit_code() == -KILL and hardware.oom_kills() > self._oom_kills:
            return "out_of_memory", "its launcher was killed by the kernel, which ran out of memory"
        return "failed", f"exit code {self.exit_code()}, and {error}"

    def has_ended(self) -> bool:
        """True if it has left. Asks `watch` while it has not, and prunes the job once that gives a reason."""
        if self.has_left():
            if self._watch is not None:
                self._watch()  # its last values: other trials are compared with them
            return True
        if self._watch is not None and not self._pruned and (reason := self._watch()):
            self._pruned = reason
            self.send(signal.SIGTERM)
        return False

    def conclude(self, stopped_by: int | None) -> Result | None:
        """Write into the job, and into its result, how it ended. `stopped_by`: the signal that has stopped the sweep, if any."""
        job = self.job
        job.ended, job.seconds = now(), time.monotonic() - self._began
        try:
            result = read_result(self.folder)
        except ValueError as error:
            if self._pruned:
                job.status, job.reason = "pruned", self._pruned
            elif stopped_by is not None:
                name = signal.Signals(stopped_by).name
                job.status, job.reason = "interrupted", f"stopped by {name} before it had begun"
            else:
                job.status, job.reason = self.without_result(str(error))
            return None
        before = (result.status, result.neighbours)
        was_told = self._pruned or stopped_by is not None  # by a signal that may have come after the result was written
        if self.exit_code() != 0 and result.status == "done" and not was_told:
            job.status, job.reason = "failed", f"exit code {self.exit_code()} after its result was written"
            return result
        if self._pruned and result.status == "interrupted":
            result.status, result.reason = "pruned", self._pruned
        result.neighbours = job.neighbours
        if (result.status, result.neighbours) != before:
            write_result(self.folder, result)
        job.status, job.reason = result.status, result.reason
        return result

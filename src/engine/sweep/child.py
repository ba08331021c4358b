"""One job of a sweep as a process: started on its share of the machine, followed, stopped, and how it ended."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from src.engine.launch.job import job_command
from src.engine.launch.supervisor import with_project_on_path
from src.engine.machine import hardware, memory
from src.engine.machine.platform import KILL
from src.engine.machine.process import die_with_parent
from src.engine.record.jobs import Job, now
from src.engine.record.result import Result, read_result, write_result

Watch = Callable[[], str]  # why the job under way should be pruned; empty: it should not


class Child:
    """A job under way. `neighbours`: the most other jobs that ran at any moment of it."""

    def __init__(self, job: Job, folder: Path, watch: Watch | None) -> None:
        self.job, self.folder, self.watch = job, folder, watch
        self.neighbours = 0
        self.peak_bytes = 0  # of memory, as far as it was looked at
        self._pruned = ""
        self._oom_kills = hardware.oom_kills()
        self._began = time.monotonic()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, variables: dict[str, str], prepare: Callable[[], None] = die_with_parent) -> None:
        """`prepare` runs in the new process before it becomes the job."""
        self.job.status, self.job.started = "running", now()
        (self.folder / "logs").mkdir(exist_ok=True)
        with open(self.folder / "logs" / "console.log", "ab") as console:
            self._process = subprocess.Popen(
                job_command(self.folder),
                env={**with_project_on_path(os.environ), **variables},
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a terminal's Ctrl-C comes to us alone, and we pass it on once
                preexec_fn=prepare,
            )

    def has_ended(self) -> bool:
        """Whether the process has left; asks `watch` while it has not, and prunes the job once it gives a reason."""
        assert self._process is not None
        if self._process.poll() is not None:
            return True
        if self.watch is not None and not self._pruned and (reason := self.watch()):
            self._pruned = reason
            self.send(signal.SIGTERM)
        return False

    def held_bytes(self) -> int:
        assert self._process is not None
        held = memory.held_by(self._process.pid)
        self.peak_bytes = max(self.peak_bytes, held)
        return held

    def send(self, number: int) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    def end(self) -> None:
        """Make sure that it has left."""
        self.send(signal.SIGTERM)
        if self._process is not None:
            self._process.wait()

    def conclude(self, stopped_by: int | None) -> Result | None:
        """Write into the job, and its result, how it ended. `stopped_by`: the signal that ended the sweep meanwhile."""
        job = self.job
        job.ended, job.seconds = now(), time.monotonic() - self._began
        try:
            result = read_result(self.folder)
        except ValueError as error:
            job.status, job.reason = self._without_result(str(error), stopped_by)
            return None
        before = (result.status, result.neighbours)
        if self._exit_code() != 0 and result.status == "done":
            job.status, job.reason = "failed", f"exit code {self._exit_code()} after its result was written"
            return result
        if self._pruned and result.status == "interrupted":
            result.status, result.reason = "pruned", self._pruned
        result.neighbours = self.neighbours
        if (result.status, result.neighbours) != before:
            write_result(self.folder, result)
        job.status, job.reason = result.status, result.reason
        return result

    def _without_result(self, error: str, stopped_by: int | None) -> tuple[str, str]:
        if self._pruned:
            return "pruned", self._pruned
        if stopped_by is not None:
            return "interrupted", f"stopped by {signal.Signals(stopped_by).name} before it had begun"
        if self._exit_code() == -KILL and hardware.oom_kills() > self._oom_kills:
            return "out_of_memory", "its launcher was killed by the kernel, which ran out of memory"
        return "failed", f"exit code {self._exit_code()}, and {error}"

    def _exit_code(self) -> int:
        assert self._process is not None
        return int(self._process.returncode)

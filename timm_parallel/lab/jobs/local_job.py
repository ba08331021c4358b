"""Job of a sweep or search on this machine: start, monitor and stop its process, and record how the
job ended.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from timm_parallel.errors import UnknownFormatError
from timm_parallel.lab.jobs.scheduler import Requirement, share_of
from timm_parallel.lab.jobs.warm_server import ForkedJob, WarmServer
from timm_parallel.launch.job import job_command, with_project_on_path
from timm_parallel.machine import hardware
from timm_parallel.machine.process import limit_job
from timm_parallel.record.result import (
    UNFINISHED,
    Job,
    Result,
    now,
    read_result,
    read_status,
    write_result,
)

# Function that returns the reason to stop a running trial early, or an empty text.
Watch = Callable[[], str]


def sync_from_result(job: Job, folder: Path) -> None:
    """Copy status, reason and duration of a job from its result.json to jobs.json. Jobs that
    jobs.json already lists as ended are not changed.

    A resumed sweep calls this function, because a killed sweep could not record how its last jobs
    ended.
    """
    try:
        result = read_result(folder)
    # Do not run a job again whose result is of newer code, because that would replace the result.
    except UnknownFormatError:
        raise
    except ValueError:
        return
    if job.status in UNFINISHED and result.status != "interrupted":
        job.status, job.reason, job.seconds = (
            result.status,
            result.reason,
            result.seconds.get("total"),
        )
        if result.neighbours < job.neighbours:
            result.neighbours = job.neighbours
            write_result(folder, result)


class LocalJob:
    """Job of a sweep that runs in its own processes on this machine, on all devices or on some of
    them.
    """

    def __init__(
        self, job: Job, folder: Path, watch: Watch | None, server: WarmServer | None = None
    ) -> None:
        """Create the object that controls a job, without starting the job.

        `watch`: function that returns a reason to stop the job early. `server`: server process that
        forks the job, or None to start the job as a command.
        """
        self.job, self.folder, self._watch, self._server = job, folder, watch, server
        self._prune_reason = ""
        self._began = time.monotonic()
        self._oom_kills = hardware.oom_kills()
        # The process of the job. None before the job starts, and always for a job on Slurm.
        self._process: subprocess.Popen[bytes] | ForkedJob | None = None

    def start(self, need: Requirement, names: Sequence[str]) -> None:
        """Start the job on the devices `names`, or on all devices that this process may use if
        `names` is empty.
        """
        variables, self._cores = share_of(need, names)
        self._environment = {**self.environment(), **variables}
        self.console.parent.mkdir(exist_ok=True)
        if self._server is None:
            self._start_command()
        else:
            self._process = self._server.start(self.folder, self._environment, self._cores)

    @property
    def console(self) -> Path:
        """File to which the standard output and errors of the job are written."""
        return self.folder / "logs" / "console.log"

    def environment(self) -> dict[str, str]:
        """Return the environment variables of the job, without those that limit it to some
        devices.
        """
        return with_project_on_path(os.environ)

    def command(self) -> list[str]:
        """Return the command that runs the job in a separate process."""
        return job_command(self.folder)

    def _start_command(self) -> None:
        with open(self.console, "ab") as console:
            self._process = subprocess.Popen(
                self.command(),
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=subprocess.STDOUT,
                # Start the job in its own session, so that Ctrl-C signals only the sweep. The sweep
                # then sends the signal to the job once.
                start_new_session=True,
                # Set the limits in the new process before any code of the job runs. The sweep may
                # be killed before that code could set them.
                preexec_fn=partial(limit_job, os.getpid(), self._cores),
            )

    def has_left(self) -> bool:
        """Return True if the process of the job has exited. If the job was lost because its fork
        server was killed, start it again as a command and return False.
        """
        assert self._process is not None
        has_left = self._process.poll() is not None
        # The job that starts again continues from its newest checkpoint.
        if (
            isinstance(self._process, ForkedJob)
            and self._process.is_lost
            and read_status(self.folder) != "done"
        ):
            self._start_command()
            return False
        return has_left

    def send(self, number: int) -> None:
        """Send a signal to the job, which then saves a checkpoint and exits."""
        if self._process is not None:
            self._process.send_signal(number)

    def wait(self) -> None:
        """Wait until the job's process has exited."""
        if self._process is not None:
            self._process.wait()

    def exit_code(self) -> int:
        """Return the exit code of the job's process, or 0 if the job has no process or is still
        running.
        """
        return (
            0
            if self._process is None or self._process.returncode is None
            else self._process.returncode
        )

    def without_result(self, error: str) -> tuple[str, str]:
        """Return (status, reason) of a job that exited without a valid result.json. `error`: the
        message of the failed attempt to read that file.
        """
        if self.exit_code() == -signal.SIGKILL and hardware.oom_kills() > self._oom_kills:
            return "out_of_memory", "the kernel killed the launcher of the job for lack of memory"
        if self.exit_code() == -signal.SIGKILL:
            return "failed", (
                "the job was killed by SIGKILL, usually for lack of memory; use a smaller batch or "
                "fewer workers, or sweep.jobs=1"
            )
        if self.exit_code() < 0:
            return "failed", f"the job was killed by {signal.Signals(-self.exit_code()).name}"
        return "failed", f"exit code {self.exit_code()}, and {error}"

    def has_ended(self) -> bool:
        """Return True if the job has exited. Otherwise send SIGTERM to the job if its watch
        function returns a reason to stop it early.
        """
        if self.has_left():
            if self._watch is not None:
                # Report the last values of the trial, because Optuna compares them with other
                # trials.
                self._watch()
            return True
        if self._watch is not None and not self._prune_reason and (reason := self._watch()):
            self._prune_reason = reason
            self.send(signal.SIGTERM)
        return False

    def conclude(self, stopped_by: int | None) -> Result | None:
        """Record in `self.job` with which status and reason the job ended. Return the job's result,
        or None if the job wrote no result.json. `stopped_by`: number of the signal that stopped the
        sweep, or None.
        """
        job = self.job
        job.ended, job.seconds = now(), time.monotonic() - self._began
        try:
            result = read_result(self.folder)
        except ValueError as error:
            if self._prune_reason:
                job.status, job.reason = "pruned", self._prune_reason
            elif stopped_by is not None:
                name = signal.Signals(stopped_by).name
                job.status, job.reason = "interrupted", f"stopped by {name} before its first step"
            else:
                job.status, job.reason = self.without_result(str(error))
            return None
        before = (result.status, result.neighbours)
        # A signal that arrives after the job wrote its result changes the exit code, but not the
        # result.
        was_signaled = self._prune_reason or stopped_by is not None
        # The kernel kills a job together with its fork server, perhaps while the job exits. Its
        # result is valid nevertheless.
        is_lost = isinstance(self._process, ForkedJob) and self._process.is_lost
        if self.exit_code() != 0 and result.status == "done" and not was_signaled and not is_lost:
            job.status, job.reason = (
                "failed",
                f"exit code {self.exit_code()} after its result was written",
            )
            return result
        if self._prune_reason and result.status == "interrupted":
            result.status, result.reason = "pruned", self._prune_reason
        result.neighbours = job.neighbours
        if (result.status, result.neighbours) != before:
            write_result(self.folder, result)
        job.status, job.reason = result.status, result.reason
        # The duration of the run itself is without the time in Slurm's queue.
        job.seconds = result.seconds.get("total", job.seconds)
        return result

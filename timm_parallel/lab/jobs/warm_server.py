"""Client of the fork server (timm_parallel/launch/fork_server.py), a process that imports torch
once and then forks the jobs of a sweep or search.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from timm_parallel.app import code_files, current
from timm_parallel.keys import Config
from timm_parallel.launch.job import with_project_on_path
from timm_parallel.machine.platform import STOP_SIGNALS
from timm_parallel.machine.process import SAFE_PATH, kill_on_parent_exit

# Prefixes of environment variables that libraries read when they are loaded. A forked job always
# has the values of the server.
READ_AT_LOAD = ("OMP_", "GOMP_", "KMP_", "MKL_", "MALLOC_", "LD_")
END_SECONDS = 5.0
WAIT_SECONDS = 0.1


class WarmServer:
    """Client of a server process that imports torch once and then forks jobs. If the server ends,
    later jobs start as commands.
    """

    def __init__(self) -> None:
        self.is_ready = False
        self.jobs: dict[int, ForkedJob] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection[Any, Any] | None = None
        # Environment variables, and modification times of code files, that the fork server read at
        # its start.
        self._loaded: dict[str, str] = {}
        self._ids = itertools.count(1)

    def takes(self, config: Config) -> bool:
        """Return True if the server can fork a job with this config. The job must have a single
        process and run on Linux, and the code must not have changed since the server started.

        Return False for a timed sweep, because its measured times include the imports of a new
        process.
        """
        if sys.platform != "linux" or config.parallel.has_ranks or config.sweep.timed:
            return False
        return self._process is None or (
            self._connection is not None and self._loaded == _files_and_variables()
        )

    def start(
        self, folder: Path, environment: Mapping[str, str], cores: Sequence[int]
    ) -> ForkedJob:
        """Fork a job from the server and return its process. The first call starts the server.

        `folder`: run folder of the job. `environment`: its environment variables. `cores`: numbers
        of the cores that it may use.
        """
        if self._process is None:
            self._start_server()
        job = ForkedJob(self, next(self._ids))
        self.jobs[job.id] = job
        self.send(
            {
                "id": job.id,
                "folder": folder.resolve(),
                "environment": dict(environment),
                "cores": list(cores),
            }
        )
        return job

    def close(self) -> None:
        """End the server process that forks jobs. Call this method after all jobs have ended."""
        if self._connection is not None:
            self._connection.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait(END_SECONDS)

    def kill(self) -> None:
        """Kill the server process, and with it all jobs that it has forked."""
        assert self._process is not None
        self._process.kill()

    def send(self, message: dict[str, Any]) -> None:
        """Send a request to the server process that forks jobs. Do nothing if the server has
        ended.
        """
        if self._connection is not None:
            # Block the stop signals while a message is sent, because their handler sends a message
            # too.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
            # Ignore the error of a server that has ended, because the method `update` handles that
            # case.
            with suppress(OSError):
                self._connection.send(message)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def update(self, seconds: float = 0.0) -> None:
        """Read the messages of the server process, which contain the exit codes of ended jobs.
        `seconds`: longest time to wait for a message.
        """
        if self._process is None or self._connection is None:
            return
        has_ended = self._process.poll() is not None
        try:
            # After the server was killed, its jobs keep the connection open until they have died.
            # Processes that those jobs have forked may live longer, so the wait is limited.
            while self._connection.poll(END_SECONDS if has_ended else seconds):
                message = self._connection.recv()
                if "ready" in message:
                    self.is_ready = True
                else:
                    self.jobs.pop(message["id"]).returncode = message["code"]
        except (EOFError, OSError):
            has_ended = True
        if has_ended:
            self._lose_jobs()

    def _start_server(self) -> None:
        ours, theirs = multiprocessing.Pipe()
        environment = with_project_on_path(os.environ) | {
            # Keep OpenBLAS of numpy from starting threads when it is loaded, because threads do not
            # survive a fork.
            "OPENBLAS_NUM_THREADS": "1",
            # Keep torch.cuda.is_available() from initializing CUDA if an imported module calls it.
            # A forked process could not use CUDA after that.
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        }
        command = [sys.executable, *SAFE_PATH, "-m", "timm_parallel.rank", current().name]
        self._loaded = _files_and_variables()
        self._process = subprocess.Popen(
            [*command, "--serve", str(theirs.fileno())],
            env=environment,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=partial(kill_on_parent_exit, os.getpid()),
        )
        theirs.close()
        self._connection = ours

    def _lose_jobs(self) -> None:
        """Mark all running jobs as lost after the server has ended, because the kernel kills them
        together with the server.
        """
        assert self._process is not None and self._connection is not None
        self._connection.close()
        self._connection = None
        code = self._process.wait()
        if any(job.signaled is None for job in self.jobs.values()):
            print(
                f"The server that forks jobs exited with {code}; jobs now start as new processes",
                file=sys.stderr,
            )
        for job in self.jobs.values():
            job.is_lost = job.signaled is None
            job.returncode = -(job.signaled or signal.SIGKILL)
        self.jobs.clear()


class ForkedJob:
    """Process of a job that the fork server has started. It has the methods of `subprocess.Popen`
    that LocalJob calls.
    """

    def __init__(self, server: WarmServer, id: int) -> None:
        self.server, self.id = server, id
        self.returncode: int | None = None
        # The first signal that was sent to the job.
        self.signaled: int | None = None
        # True if the server ended before the job, and no signal had stopped the job.
        self.is_lost = False

    def poll(self) -> int | None:
        self.server.update()
        return self.returncode

    def wait(self) -> int:
        while self.returncode is None:
            self.server.update(WAIT_SECONDS)
        return self.returncode

    def send_signal(self, number: int) -> None:
        self.signaled = self.signaled or number
        if self.server.is_ready:
            self.server.send({"id": self.id, "signal": number})
        else:
            # The server is still importing torch, so no job has started that would have to save a
            # checkpoint.
            self.server.kill()


def _files_and_variables() -> dict[str, str]:
    """Return the environment variables that libraries read when they are loaded, and the
    modification times of the project's code files. A running fork server does not notice a change
    of either, so the next job must then start as a new process.
    """
    variables = {name: value for name, value in os.environ.items() if name.startswith(READ_AT_LOAD)}
    return variables | {name: str(path.stat().st_mtime_ns) for name, path in code_files().items()}

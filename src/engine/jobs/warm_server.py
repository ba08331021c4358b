"""Client of the server that forks the jobs of a sweep or search (engine/launch/fork_server.py)."""

from __future__ import annotations

import itertools
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from src.engine.config.compose import ROOT
from src.engine.launch.supervisor import with_project_on_path
from src.engine.machine.platform import KILL
from src.engine.machine.process import SAFE_PATH, limit_job
from src.schema import Config

# Variables that a library reads when it is loaded, so that a forked job cannot have other values than the server.
READ_AT_LOAD = ("OMP_", "GOMP_", "KMP_", "MKL_", "MALLOC_", "LD_")
END_SECONDS = 5.0


class WarmServer:
    """Starts, with the first job, a process that forks jobs, and sends it requests. After its end, jobs start as commands."""

    def __init__(self) -> None:
        self.is_ready = False
        self.jobs: dict[int, ForkedJob] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._loaded: dict[str, str] = {}  # by the server, at its start
        self._received = b""
        self._ids = itertools.count(1)

    def takes(self, config: Config) -> bool:
        """Return True if a job with this config can be forked: it has one rank, and the server is up to date.

        A timed sweep compares times from the start of the command, so its jobs all start as commands.
        """
        if sys.platform != "linux" or config.parallel.has_ranks or config.sweep.timed:
            return False
        return self._process is None or (self._connection is not None and self._loaded == _loaded_by_a_command())

    def start(self, folder: Path, environment: Mapping[str, str], cores: Sequence[int]) -> ForkedJob:
        """Fork a job. The first call starts the server."""
        if self._process is None:
            self._start_server()
        job = ForkedJob(self, next(self._ids))
        self.jobs[job.id] = job
        request = {"folder": str(folder.resolve()), "environment": dict(environment), "cores": list(cores)}
        self.send({"id": job.id, **request})
        return job

    def close(self) -> None:
        """End the server. Its jobs have ended before."""
        if self._connection is not None:
            self._connection.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait(END_SECONDS)

    def kill(self) -> None:
        """End the server, and with it all of its jobs."""
        assert self._process is not None
        self._process.kill()

    def send(self, message: dict[str, Any]) -> None:
        if self._connection is not None:
            with suppress(OSError):  # the server has ended, which `update` notices
                self._connection.setblocking(True)
                self._connection.sendall(json.dumps(message).encode() + b"\n")

    def update(self, wait: bool = False) -> None:
        """Read the server's messages: the exit codes of jobs. `wait`: until there is a message."""
        if self._connection is None:
            return
        self._connection.setblocking(wait)
        try:
            data = self._connection.recv(2**16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._lose_jobs()
            return
        *lines, self._received = (self._received + data).split(b"\n")
        for line in lines:
            message = json.loads(line)
            if "ready" in message:
                self.is_ready = True
            else:
                self.jobs.pop(message["id"]).returncode = message["code"]

    def _start_server(self) -> None:
        ours, theirs = socket.socketpair()
        environment = with_project_on_path(os.environ) | {
            # Else numpy's OpenBLAS starts threads when it is loaded; they do not survive a fork.
            "OPENBLAS_NUM_THREADS": "1",
            # torch.cuda.is_available() in an imported module must not initialize CUDA, which a fork cannot use.
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        }
        self._loaded = _loaded_by_a_command()
        self._process = subprocess.Popen(
            [sys.executable, *SAFE_PATH, "-m", "src.train", "--serve", str(theirs.fileno())],
            env=environment,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=partial(limit_job, os.getpid(), []),
        )
        theirs.close()
        self._connection = ours

    def _lose_jobs(self) -> None:
        """Mark the jobs as lost. The kernel kills them with the server."""
        assert self._process is not None and self._connection is not None
        self._connection.close()
        self._connection = None
        code = self._process.wait()
        if any(job.signaled is None for job in self.jobs.values()):
            print(f"The server that forks jobs has ended (exit code {code}): jobs start as commands", file=sys.stderr)
        for job in self.jobs.values():
            job.is_lost = job.signaled is None
            job.returncode = -(job.signaled or KILL)
        self.jobs.clear()


class ForkedJob:
    """A job that the server has forked, with the methods of `subprocess.Popen` that LocalJob uses."""

    def __init__(self, server: WarmServer, id: int) -> None:
        self.server, self.id = server, id
        self.returncode: int | None = None
        self.signaled: int | None = None  # the first signal that it was sent
        self.is_lost = False  # the server ended before the job, and nobody had stopped it

    def poll(self) -> int | None:
        self.server.update()
        return self.returncode

    def wait(self) -> int:
        while self.returncode is None:
            self.server.update(wait=True)
        return self.returncode

    def send_signal(self, number: int) -> None:
        self.signaled = self.signaled or number
        if self.server.is_ready:
            self.server.send({"id": self.id, "signal": number})
        else:
            # The server still imports, and no job has begun, so nothing is to be saved.
            self.server.kill()


def _loaded_by_a_command() -> dict[str, str]:
    """Return the variables and code files that a new process reads at its start; a forked job has those of its server."""
    variables = {name: value for name, value in os.environ.items() if name.startswith(READ_AT_LOAD)}
    return variables | {str(path): str(path.stat().st_mtime_ns) for path in (ROOT / "src").rglob("*.py")}

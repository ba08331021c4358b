"""Server that forks the jobs of a sweep or search from a process that has already imported torch, timm and your code.

This saves each job seconds of imports. engine/jobs/warm_server.py starts it as `python -m src.train --serve <fd>`. It forks
only jobs of one rank: first the launcher of the job, which forks the rank at once, before it asks the CUDA driver for devices.
"""

from __future__ import annotations

import atexit
import json
import os
import selectors
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from src.engine.faults.failure import REPORT
from src.engine.launch import job, rank
from src.engine.machine import nvidia
from src.engine.machine.platform import STOP_SIGNALS, open_memory
from src.engine.machine.process import limit_job


def serve(descriptor: int, run: rank.RankMain, preload: Callable[[], object]) -> None:
    """Fork the jobs that a sweep requests through the socket `descriptor`, until the sweep closes the socket.

    Each request is a line of JSON: {"id", "folder", "environment", "cores"} starts a job, and {"id", "signal"} sends a
    signal to job `id`. Each answer is one too: {"ready": true} once, then {"id", "code"} for each job that has exited.
    A negative code is the number of the signal that killed the job. `preload`: imports the modules that jobs need.
    """
    # Blocked and not ignored, so that a signal to a new job is still pending when the job unblocks it.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    preload()
    _check_is_forkable()
    ForkServer(socket.socket(fileno=descriptor), run).serve()


def _check_is_forkable() -> None:
    """Raise RuntimeError if this process has started a thread or initialized CUDA: neither survives a fork."""
    threads = len(os.listdir("/proc/self/task"))  # also counts threads of C++ libraries
    if threads != 1:
        raise RuntimeError(f"an import started {threads - 1} thread(s), so jobs cannot be forked")
    torch = sys.modules.get("torch")
    # torch does not notice a query of ours, after which the driver refuses to work in a forked process.
    if nvidia.has_initialized_driver or (torch is not None and torch.cuda.is_initialized()):
        raise RuntimeError("an import initialized CUDA, so jobs cannot be forked")


class ForkServer:
    """Server loop that forks a process for each requested job, and sends the exit code of each job to the sweep."""

    def __init__(self, connection: socket.socket, run: rank.RankMain) -> None:
        self.connection, self.run = connection, run
        self.jobs: dict[int, int] = {}  # pid -> id of the job
        self._wake_reading, self._wake_writing = socket.socketpair()

    def serve(self) -> None:
        """Start and signal jobs on request, and report their exit codes, until the sweep closes the connection."""
        self._wake_writing.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(self._wake_writing.fileno(), warn_on_full_buffer=False)
        selector = selectors.DefaultSelector()
        selector.register(self.connection, selectors.EVENT_READ)
        selector.register(self._wake_reading, selectors.EVENT_READ)
        self._send({"ready": True})
        received = b""
        while True:
            for key, _ in selector.select():
                if key.fileobj is self._wake_reading:
                    self._wake_reading.recv(4096)
                    continue
                data = self.connection.recv(2**16)
                if not data:  # the sweep has ended
                    return
                *lines, received = (received + data).split(b"\n")
                for line in lines:
                    self._answer(json.loads(line))
            self._report_exits()

    def _answer(self, request: dict[str, Any]) -> None:
        if "signal" in request:
            for pid, id in self.jobs.items():
                if id == request["id"]:
                    os.kill(pid, request["signal"])
            return
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            run_and_exit(lambda: self._run_job(parent, request))
        self.jobs[pid] = request["id"]

    def _report_exits(self) -> None:
        for pid in list(self.jobs):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                self._send({"id": self.jobs.pop(pid), "code": os.waitstatus_to_exitcode(status)})

    def _send(self, message: dict[str, Any]) -> None:
        self.connection.sendall(json.dumps(message).encode() + b"\n")

    def _run_job(self, parent: int, request: dict[str, Any]) -> int:
        """Set up the environment, cores and log of a job in this forked process, and run its launcher. Return the exit code."""
        folder = Path(request["folder"])
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for opened in (self.connection, self._wake_reading, self._wake_writing):
            opened.close()
        replace_environment(request["environment"])
        limit_job(parent, request["cores"])
        console = os.open(folder / "logs" / "console.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        os.dup2(console, 1)
        os.dup2(console, 2)
        os.close(console)
        sys.argv = [str(job.__file__), str(folder)]
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        with ForkedRank(folder, self.run) as forked:
            return job.main(folder, forked.start)


class ForkedRank:
    """Process of a rank, forked from its launcher. It has the methods of `subprocess.Popen` that the launcher calls.

    The process is forked here and waits for `start`: the launcher initializes the CUDA driver, and no later fork could use CUDA.
    """

    def __init__(self, folder: Path, run: rank.RankMain) -> None:
        _check_is_forkable()
        self.returncode: int | None = None
        reading, self._writing = os.pipe()
        self._report = open_memory()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._writing)
            run_and_exit(lambda: _run_rank(reading, folder, run))
        os.close(reading)

    def __enter__(self) -> ForkedRank:
        return self

    def __exit__(self, *error: object) -> None:
        """End a rank that was never started (another process holds the run folder) or that the launcher did not wait for."""
        os.close(self._writing)
        self.kill()
        self.wait()
        self._report.close()

    def start(self, command: list[str], environment: dict[str, str]) -> ForkedRank:
        """Start the rank with the arguments of `command` and only these environment variables."""
        arguments = command[command.index("-m") + 1 :]
        # The launcher has opened its file for failure records after the fork, so both use the one that the rank inherited.
        os.dup2(self._report.fileno(), int(environment[REPORT]), inheritable=False)
        environment = {**environment, REPORT: str(self._report.fileno())}
        with os.fdopen(os.dup(self._writing), "w", encoding="utf-8") as pipe:
            pipe.write(json.dumps([arguments, environment]) + "\n")
        return self

    def wait(self) -> int:
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _run_rank(reading: int, folder: Path, run: rank.RankMain) -> int:
    """Wait for the request of `ForkedRank.start` and run the rank. Return its exit code; 0 if the launcher ends without one."""
    with os.fdopen(reading, encoding="utf-8") as pipe:
        line = pipe.readline()
    if not line:
        return 0
    sys.argv, environment = json.loads(line)
    replace_environment(environment)
    return rank.main(folder, run)


def replace_environment(environment: Mapping[str, str]) -> None:
    """Make `environment` the complete set of environment variables of this process."""
    os.environ.clear()
    os.environ.update(environment)


def run_and_exit(work: Callable[[], int]) -> NoReturn:
    """Call `work` in a forked process and exit with the code that it returns; with 1 after an exception. Never returns."""
    code = 1
    try:
        code = work()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        # The interpreter does this at its end too. It would also free objects of the parent, such as the parent's locks.
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

"""Server process that forks the jobs of a sweep or search. It has already imported torch, timm and
the project's code, which saves each job seconds of imports.

timm_parallel/lab/jobs/warm_server.py starts it as `python -m timm_parallel.rank <app> --serve
<fd>`. Only jobs of one rank can be forked. The server forks the launcher of a job. The launcher
asks the CUDA driver for devices in another fork, because no fork can use CUDA after that.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from timm_parallel.app import import_all
from timm_parallel.config.compose import load_config
from timm_parallel.launch import job, rank
from timm_parallel.machine import hardware
from timm_parallel.machine.files import lock_folder
from timm_parallel.machine.platform import STOP_SIGNALS
from timm_parallel.machine.process import kill_on_parent_exit, limit_job
from timm_parallel.machine.signals import exit_process

# Seconds between two checks for jobs that have exited. The sweep checks equally often.
POLL_SECONDS = 0.02
FORK = multiprocessing.get_context("fork")


def serve(descriptor: int) -> None:
    """Fork the jobs that a sweep requests through a connection, until the sweep closes the
    connection.

    `descriptor`: file descriptor of the connection.

    The request {"id", "folder", "environment", "cores"} starts a job. The request {"id", "signal"}
    sends a signal to a running job. The server sends {"ready": True} once, and {"id", "code"} for
    each job that has exited. A negative code is the number of the signal that killed the job.
    """
    # Block the signals here and unblock them in each job. A signal to a new job then waits until
    # the job can handle it, where an ignored signal would be lost.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    # A process that ignores SIGCHLD, as its parent did, cannot read exit codes.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    import_all()
    _check_is_forkable()
    connection: Connection[Any, Any] = Connection(descriptor)
    connection.send({"ready": True})
    # Job id -> process of each running job.
    running: dict[int, ForkedProcess] = {}
    while True:
        if connection.poll(POLL_SECONDS if running else None):
            try:
                request = connection.recv()
            except EOFError:
                return
            id = request.pop("id")
            if "signal" not in request:
                running[id] = ForkedProcess(partial(run_job, os.getpid(), **request))
            elif id in running:
                running[id].send_signal(request["signal"])
        for id, process in list(running.items()):
            if (code := process.poll()) is not None:
                del running[id]
                connection.send({"id": id, "code": code})


def _check_is_forkable() -> None:
    """Raise RuntimeError if this process has several threads or has initialized CUDA, because
    neither works in a forked process.
    """
    # The task folder also lists threads of C++ libraries, which the module threading does not know.
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        raise RuntimeError(
            f"the sweep cannot fork its jobs, because an import started {threads - 1} thread(s)"
        )
    torch = sys.modules.get("torch")
    # Check this library's own queries of the CUDA driver too, because torch does not notice them.
    # After such a query, CUDA does not work in a forked process either.
    if hardware.has_initialized_driver or (torch is not None and torch.cuda.is_initialized()):
        raise RuntimeError("the sweep cannot fork its jobs, because an import initialized CUDA")


class ForkedProcess:
    """Process that is forked from this one, and dies with it. It has the methods of
    `subprocess.Popen` that callers need.
    """

    def __init__(self, function: Callable[..., object], *arguments: object) -> None:
        """Start the process, which calls the function, and exits with 0 or as SystemExit says."""
        method = multiprocessing.get_start_method(allow_none=True)
        self._process = FORK.Process(
            target=_run_forked, args=(os.getpid(), method, function, *arguments)
        )
        self._process.start()

    def poll(self) -> int | None:
        """Return the exit code, or None if the process is still running."""
        return self._process.exitcode

    def wait(self) -> int:
        self._process.join()
        code = self.poll()
        assert code is not None
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            assert self._process.pid is not None
            os.kill(self._process.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _run_forked(
    parent: int, method: str | None, function: Callable[..., object], *arguments: object
) -> None:
    kill_on_parent_exit(parent)
    # Restore the start method of the parent, because multiprocessing has chosen fork for the
    # processes of this one. Code of the project may set another.
    multiprocessing.set_start_method(method, force=True)
    function(*arguments)


def run_job(
    server: int, folder: Path, environment: Mapping[str, str], cores: Sequence[int]
) -> NoReturn:
    """Set environment, CPU cores and log of a job in this forked process, run the launcher of the
    job, and exit with its exit code.

    The job and its rank keep the server's end of the connection open. If the server is killed, the
    sweep sees the connection close only after the job and the rank have died too. Neither can then
    still write a result.
    """
    os.setsid()
    replace_environment(environment)
    limit_job(server, cores)
    console = os.open(
        folder / "logs" / "console.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666
    )
    os.dup2(console, 1)
    os.dup2(console, 2)
    os.close(console)
    sys.argv = [str(job.__file__), str(folder)]
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    with lock_folder(folder):
        config = load_config(folder)
        # Prepare in another process, because this asks the CUDA driver for devices. After that, no
        # process that is forked from this one could use CUDA.
        if code := ForkedProcess(job.prepare, config, folder).wait():
            sys.exit(code)
        start = partial(ForkedProcess, _run_rank)
        config, ended = job.run_until_it_fits(config, folder, start_rank=start)
        sys.exit(job.conclude(config, folder, ended))


def _run_rank(command: list[str], environment: Mapping[str, str]) -> NoReturn:
    """Run a rank with the arguments and the environment of its command, and exit with its code."""
    sys.argv = command[command.index("-m") + 1 :]
    replace_environment(environment)
    try:
        exit_process(rank.main(Path(command[-1])))
    finally:
        # A process of multiprocessing does not call the exit handlers.
        atexit._run_exitfuncs()


def replace_environment(environment: Mapping[str, str]) -> None:
    """Replace all environment variables of this process."""
    os.environ.clear()
    os.environ.update(environment)

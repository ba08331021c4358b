"""Server process that forks the jobs of a sweep or search. It has already imported torch, timm and
the project's code, which saves each job seconds of imports.

timm_parallel/lab/jobs/warm_server.py starts it as `python -m timm_parallel.rank <app> --serve
<fd>`. Only jobs of one rank can be forked. The server forks the launcher of a job. The launcher
forks its rank at once, because no fork can use CUDA after the launcher has asked the CUDA driver
for devices.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from timm_parallel.app import import_all
from timm_parallel.faults.failure import REPORT
from timm_parallel.launch import job, rank
from timm_parallel.machine import hardware
from timm_parallel.machine.platform import STOP_SIGNALS, open_memory
from timm_parallel.machine.process import limit_job

# Seconds between two checks for jobs that have exited. The sweep checks equally often.
POLL_SECONDS = 0.02


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
    import_all()
    _check_is_forkable()
    connection: Connection[Any, Any] = Connection(descriptor)
    connection.send({"ready": True})
    # Job id -> process id of each running job.
    pids: dict[int, int] = {}
    while True:
        if connection.poll(POLL_SECONDS if pids else None):
            try:
                request = connection.recv()
            except EOFError:
                return
            id = request.pop("id")
            if "signal" not in request:
                pids[id] = _fork(partial(_run_job, os.getpid(), **request))
            elif id in pids:
                os.kill(pids[id], request["signal"])
        for id, pid in list(pids.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del pids[id]
                connection.send({"id": id, "code": os.waitstatus_to_exitcode(status)})


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


def _fork(work: Callable[[], int]) -> int:
    """Fork a process that calls `work` and exits with the exit code that `work` returns. Return the
    process id.
    """
    pid = os.fork()
    if pid == 0:
        run_and_exit(work)
    return pid


def _run_job(
    server: int,
    folder: Path,
    environment: Mapping[str, str],
    cores: Sequence[int],
) -> int:
    """Set environment, CPU cores and log of a job in this forked process, then run the launcher of
    the job. Return the exit code.

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
    with ForkedRank(folder) as forked:
        return job.main(folder, forked.start)


class ForkedRank:
    """Process of a rank that is forked from its launcher. It has the methods of `subprocess.Popen`
    that the launcher calls.

    The process is forked when this object is built, and waits for `start`. A later fork could not
    use CUDA, because the launcher initializes the CUDA driver in between.
    """

    def __init__(self, folder: Path) -> None:
        self.returncode: int | None = None
        reading, self._writing = multiprocessing.Pipe(duplex=False)
        self._report = open_memory()

        def work() -> int:
            self._writing.close()
            return _run_rank(reading, folder)

        self.pid = _fork(work)
        reading.close()

    def __enter__(self) -> ForkedRank:
        return self

    def __exit__(self, *error: object) -> None:
        """Kill a rank that was never started, or that the launcher did not wait for. A rank is not
        started if another process holds the run folder.
        """
        self._writing.close()
        self.kill()
        self.wait()
        self._report.close()

    def start(self, command: list[str], environment: dict[str, str]) -> ForkedRank:
        """Start the waiting rank. `command`: the command line, from which the rank takes its
        arguments. `environment`: all environment variables of the rank.
        """
        # Let the launcher read failure records from the file that the rank inherited, because the
        # launcher opened its own file after the fork.
        os.dup2(self._report.fileno(), int(environment[REPORT]), inheritable=False)
        environment = {**environment, REPORT: str(self._report.fileno())}
        self._writing.send((command[command.index("-m") + 1 :], environment))
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


def _run_rank(reading: Connection[Any, Any], folder: Path) -> int:
    """Wait for `ForkedRank.start`, then run the rank with the received arguments and environment.
    Return the exit code of the rank, or 0 if the launcher ends without a start.
    """
    try:
        sys.argv, environment = reading.recv()
    except EOFError:
        return 0
    replace_environment(environment)
    return rank.main(folder)


def replace_environment(environment: Mapping[str, str]) -> None:
    """Replace all environment variables of this process."""
    os.environ.clear()
    os.environ.update(environment)


def run_and_exit(work: Callable[[], int]) -> NoReturn:
    """Call `work` in a forked process, and exit with the exit code that `work` returns. After an
    exception, print the traceback and exit with 1.
    """
    code = 1
    try:
        code = work()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        # Run the exit handlers and flush here, and end with os._exit. The normal shutdown of the
        # interpreter would also free objects of the parent process, such as its locks.
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

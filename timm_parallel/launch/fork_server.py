"""Server that forks the jobs of a sweep or search from a process that has already imported torch,
timm and your code.

This saves each job seconds of imports. timm_parallel/lab/jobs/warm_server.py starts it as
`python -m timm_parallel.rank <app> --serve <fd>`. It forks only jobs of one rank: first the
launcher of the job, which forks the rank at once, before it asks the CUDA driver for devices.
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

from timm_parallel.faults.failure import REPORT
from timm_parallel.launch import job, rank
from timm_parallel.machine import nvidia
from timm_parallel.machine.platform import STOP_SIGNALS, open_memory
from timm_parallel.machine.process import limit_job

# Seconds between two looks for jobs that have exited. The sweep looks as often.
POLL_SECONDS = 0.02


def serve(descriptor: int, run: rank.RankMain, preload: Callable[[], object]) -> None:
    """Fork the jobs that a sweep requests through the connection `descriptor`, until the sweep
    closes it.

    A request {"id", "folder", "environment", "cores"} starts a job, and {"id", "signal"} sends a
    signal to job `id`. Answers are {"ready": True} once, then {"id", "code"} for each job that has
    exited. A negative code is the number of the signal that killed the job. `preload`: imports the
    modules that jobs need.
    """
    # Blocked and not ignored, so that a signal to a new job is still pending when the job unblocks
    # it.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    preload()
    _check_is_forkable()
    server = os.getpid()
    connection: Connection[Any, Any] = Connection(descriptor)
    connection.send({"ready": True})
    pids: dict[int, int] = {}  # of the running jobs, by id
    while True:
        if connection.poll(POLL_SECONDS if pids else None):
            try:
                request = connection.recv()
            except EOFError:
                return
            id = request.pop("id")
            if "signal" not in request:
                pids[id] = _fork(partial(_run_job, server, run, **request))
            elif id in pids:
                os.kill(pids[id], request["signal"])
        for id, pid in list(pids.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del pids[id]
                connection.send({"id": id, "code": os.waitstatus_to_exitcode(status)})


def _check_is_forkable() -> None:
    """Raise RuntimeError if this process has started a thread or initialized CUDA: neither survives
    a fork.
    """
    threads = len(os.listdir("/proc/self/task"))  # also counts threads of C++ libraries
    if threads != 1:
        raise RuntimeError(
            f"the sweep cannot fork its jobs, because an import started {threads - 1} thread(s)"
        )
    torch = sys.modules.get("torch")
    # torch does not notice a query of ours, after which the driver refuses to work in a forked
    # process.
    if nvidia.has_initialized_driver or (torch is not None and torch.cuda.is_initialized()):
        raise RuntimeError("the sweep cannot fork its jobs, because an import initialized CUDA")


def _fork(work: Callable[[], int]) -> int:
    """Call `work` in a forked process, which exits with the code that it returns. Return the pid of
    the process.
    """
    pid = os.fork()
    if pid == 0:
        run_and_exit(work)
    return pid


def _run_job(
    server: int,
    run: rank.RankMain,
    folder: Path,
    environment: Mapping[str, str],
    cores: Sequence[int],
) -> int:
    """Set up the environment, cores and log of a job in this forked process, and run its launcher.
    Return the exit code.

    The job and its rank keep the connection of the server open: after a kill of the server, the
    sweep reads its end only when they have died too, so none of them can still write a result.
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
    with ForkedRank(folder, run) as forked:
        return job.main(folder, forked.start)


class ForkedRank:
    """Process of a rank, forked from its launcher. It has the methods of `subprocess.Popen` that
    the launcher calls.

    The process is forked here and waits for `start`: the launcher initializes the CUDA driver, and
    no later fork could use CUDA.
    """

    def __init__(self, folder: Path, run: rank.RankMain) -> None:
        self.returncode: int | None = None
        reading, self._writing = multiprocessing.Pipe(duplex=False)
        self._report = open_memory()

        def work() -> int:
            self._writing.close()
            return _run_rank(reading, folder, run)

        self.pid = _fork(work)
        reading.close()

    def __enter__(self) -> ForkedRank:
        return self

    def __exit__(self, *error: object) -> None:
        """End a rank that was never started (another process holds the run folder) or that the
        launcher did not wait for.
        """
        self._writing.close()
        self.kill()
        self.wait()
        self._report.close()

    def start(self, command: list[str], environment: dict[str, str]) -> ForkedRank:
        """Start the rank with the arguments of `command` and only these environment variables."""
        # The launcher has opened its file for failure records after the fork, so both use the one
        # that the rank inherited.
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


def _run_rank(reading: Connection[Any, Any], folder: Path, run: rank.RankMain) -> int:
    """Wait for the request of `ForkedRank.start` and run the rank. Return its exit code; 0 if the
    launcher ends without one.
    """
    try:
        sys.argv, environment = reading.recv()
    except EOFError:
        return 0
    replace_environment(environment)
    return rank.main(folder, run)


def replace_environment(environment: Mapping[str, str]) -> None:
    """Make `environment` the complete set of environment variables of this process."""
    os.environ.clear()
    os.environ.update(environment)


def run_and_exit(work: Callable[[], int]) -> NoReturn:
    """Call `work` in a forked process and exit with the code that it returns; with 1 after an
    exception. Never returns.
    """
    code = 1
    try:
        code = work()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        # The interpreter does this at its end too. It would also free objects of the parent, such
        # as the parent's locks.
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

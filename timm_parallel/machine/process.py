"""Processes of a run: let them die with their parent, import libraries quickly, and exit without
leftover child processes.
"""

from __future__ import annotations

import atexit
import ctypes
import io
import os
import shutil
import signal
import sys
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

import psutil

from timm_parallel.machine.lock import remove_lock_files

# Python option for child processes. Without it, `python -m` imports from the current folder first,
# which may contain a foreign json.py.
SAFE_PATH = ("-P",)
# True after a tracker has failed. The exit handlers of its library may then wait for a server that
# does not respond.
exit_handlers_may_block = False
# Environment variable of a rank with the process id of its launcher.
LAUNCHER = "RUN_LAUNCHER"


def kill_on_parent_exit(parent: int | None = None) -> None:
    """Ask the kernel to kill this process when its parent dies, e.g. after `kill -9` of a launcher.
    `parent`: process id of the parent. None: use the id in the variable that the launcher sets, or
    else the current parent.
    """
    if sys.platform != "linux":
        return
    # Value of this constant in linux/prctl.h.
    PR_SET_PDEATHSIG = 1
    # Remove the variable with the id of the launcher, because processes that a rank starts have
    # another parent.
    parent = parent or int(os.environ.pop(LAUNCHER, os.getppid()))
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # The parent died before the call of prctl, so the kernel will not kill this process.
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def limit_job(parent: int, cores: Collection[int]) -> None:
    """Let this process die with the process `parent`, and restrict it to some CPU cores. An empty
    list of cores means no restriction.
    """
    kill_on_parent_exit(parent)
    if cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)


def process_start_time(pid: int) -> float:
    """Return the start time of a process on the clock of time.perf_counter(), which all processes
    share. Unlike the clock of time.time(), it is never set. psutil's value can be off by a second.
    """
    if sys.platform != "linux":
        return time.perf_counter() - (time.time() - psutil.Process(pid).create_time())
    # Split after the last parenthesis, because the name of the process may have spaces (proc(5)).
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    since_boot = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.perf_counter() - (time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot)


def started_at() -> float:
    """Return the time at which the command of this run started, on the clock of
    time.perf_counter(): the variable RUN_STARTED_AT or, under torchrun, the start time of the
    parent process.
    """
    return float(os.environ.get("RUN_STARTED_AT", 0)) or process_start_time(os.getppid())


def keep_freed_memory() -> None:
    """Let glibc keep freed memory for the next tensors. This saves 6 to 25 % of a training step on
    a CPU (docs/dev/benchmarks.md).
    """
    # By default glibc returns large freed blocks to the kernel, so each step has to map their pages
    # again. Settings of the user (MALLOC_…) have priority.
    if sys.platform != "linux" or any(name.startswith("MALLOC_") for name in os.environ):
        return
    # Option numbers of the function mallopt, from malloc.h.
    M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        # Keep the default for blocks above 16 MiB, because they would fragment the heap.
        mallopt(M_MMAP_THRESHOLD, 16 * 2**20)
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def open_closed_streams() -> None:
    """Open stdin, stdout and stderr on the null device if they are closed, as in `python train.py
    >&-`. Another file would otherwise get the number of a stream, and its content.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)
            os.dup2(nowhere, number)
            if nowhere == number:
                os.set_inheritable(number, True)
            else:
                os.close(nowhere)
            mode = "w" if number else "r"
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))


def keep_running_without_stdout() -> None:
    """Discard output after the reader of stdout has exited, as in `python train.py | head -n 2`, on
    a full disk, and if stdout is closed. The run would otherwise fail. The same is true of stderr.
    """
    open_closed_streams()

    class Pipe(io.FileIO):
        def write(self, data: Any, /) -> int:
            try:
                return super().write(data)
            except BrokenPipeError:
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self.fileno())
                os.close(nowhere)
            # Discard this output only, because the disk may have space again later.
            except OSError:
                pass
            return len(data)

    for name in ("stdout", "stderr"):
        out = getattr(sys, name)
        if isinstance(out, io.TextIOWrapper) and not out.isatty():
            buffer = io.BufferedWriter(Pipe(out.fileno(), "w", closefd=False))
            wrapped = io.TextIOWrapper(
                buffer, out.encoding, out.errors, line_buffering=out.line_buffering
            )
            setattr(sys, name, wrapped)


def exit_process(code: int) -> NoReturn:
    """Exit with a code. After a failure in a process group, skip the destructors of NCCL and CUDA,
    which may wait for other ranks forever. The shutdown of the interpreter is then skipped too,
    because it aborts if a thread is inside torch's store.
    """
    dist = sys.modules.get("torch.distributed")
    has_group = dist is not None and dist.is_available() and dist.is_initialized()
    if exit_handlers_may_block or (code and has_group):
        if not exit_handlers_may_block:
            atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def exit_at_once(code: int) -> NoReturn:
    """Exit with a code, without `finally` blocks and exit handlers, which may block. Lock files and
    temporary folders are deleted first.
    """
    remove_lock_files()
    # Delete the temporary folder of multiprocessing, in which loader workers have their sockets.
    # The module is not imported here, because any thread may call this function at any time.
    util = sys.modules.get("multiprocessing.util")
    # Keep the folder in a process that multiprocessing has started, because the folder belongs to
    # its parent.
    if util is not None and sys.modules["multiprocessing"].parent_process() is None:
        # Ignore an error, because get_temp_dir cannot create the folder on a full disk.
        with suppress(OSError):
            shutil.rmtree(util.get_temp_dir(), ignore_errors=True)
    os._exit(code)


@contextmanager
def terminate_descendants(seconds: float = 1.0) -> Iterator[None]:
    """End all processes that were started in the `with` block. At the end of the block they receive
    SIGTERM, and after `seconds` SIGKILL.
    """
    if sys.platform == "linux":
        # Make orphaned descendants children of this process (linux/prctl.h), so that they are found
        # too.
        PR_SET_CHILD_SUBREAPER = 36
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    before = set(psutil.Process().children(recursive=True))
    try:
        yield
    finally:
        started = [
            child for child in psutil.Process().children(recursive=True) if child not in before
        ]
        for child in started:
            with suppress(psutil.NoSuchProcess):
                child.terminate()
        for child in psutil.wait_procs(started, timeout=seconds)[1]:
            with suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.wait_procs(started, timeout=seconds)

"""Processes of a run: end them with their parent, start them quickly, and exit without leftover
child processes.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import io
import os
import shutil
import signal
import sys
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import psutil

from timm_parallel.class_source import package
from timm_parallel.machine.lock import remove_lock_files

T = TypeVar("T")
# Without it `python -m` imports from the current folder first, which may contain a foreign json.py.
SAFE_PATH = ("-P",)
# True after a tracker has failed: the exit handlers of its library may wait for a server that does
# not answer.
exit_handlers_may_block = False
LAUNCHER = "RUN_LAUNCHER"  # environment variable of a rank: the pid of its launcher


def kill_on_parent_exit(parent: int | None = None) -> None:
    """Ask the kernel to kill this process when its `parent` dies, e.g. after `kill -9` of a
    launcher.
    """
    if sys.platform != "linux":
        return
    PR_SET_PDEATHSIG = 1  # linux/prctl.h
    # Removed from the environment, because processes that a rank starts have another parent.
    parent = parent or int(os.environ.pop(LAUNCHER, os.getppid()))
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before this call
        os.kill(os.getpid(), signal.SIGKILL)


def limit_job(parent: int, cores: Collection[int]) -> None:
    """Make this process die with process `parent`, and run only on the CPU cores `cores` (empty: on
    all).
    """
    kill_on_parent_exit(parent)
    if cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)


def process_start_time(pid: int) -> float:
    """Return the start time of a process, comparable to time.time(). psutil's value is up to a
    second off.
    """
    if sys.platform != "linux":
        return psutil.Process(pid).create_time()
    fields = (
        Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    )  # proc(5): the name may have spaces
    since_boot = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot)


def started_at() -> float:
    """Return the time at which the command of this run started: RUN_STARTED_AT or, under torchrun,
    its parent's start.
    """
    return float(os.environ.get("RUN_STARTED_AT", 0)) or process_start_time(os.getppid())


@contextmanager
def imports_without_gc() -> Iterator[None]:
    """Pause the garbage collector while torch and timm are imported, which saves a fifth of that
    time.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def import_name(name: str) -> Any:
    """Import a class or function by its dotted name, such as `torch.optim.SGD`."""
    module, _, class_name = name.rpartition(".")
    return getattr(import_module(module), class_name)


def import_class(
    key: str, name: str, base: type[T], named: Mapping[str, str] | None = None
) -> type[T]:
    """Import the class that a config key names: one of `named` (name -> dotted name), or a class of
    the project by its dotted name. Raises ValueError if it does not extend `base`.
    """
    imported = import_name((named or {}).get(name, name))
    if not (isinstance(imported, type) and issubclass(imported, base)):
        raise ValueError(
            f"{key}={name}: expected a class that extends {base.__name__}; give "
            f"{package()}.<module>.<Class>"
        )
    return imported


def keep_freed_memory() -> None:
    """Make glibc keep freed memory for the next tensors, which saves 6 to 25 % of a step on a CPU
    (docs/dev/benchmarks.md).
    """
    # By default glibc returns large blocks to the kernel, and each step has to map their pages
    # again.
    if sys.platform != "linux" or any(name.startswith("MALLOC_") for name in os.environ):
        return
    M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, 16 * 2**20)  # larger blocks would fragment the heap
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def keep_running_without_stdout() -> None:
    """Discard output once the reader of stdout has exited (`python train.py | head -n 2`), instead
    of failing.
    """

    class Pipe(io.FileIO):
        def write(self, data: Any, /) -> int:
            try:
                return super().write(data)
            except BrokenPipeError:
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self.fileno())
                os.close(nowhere)
                return len(data)

    out = sys.stdout
    if isinstance(out, io.TextIOWrapper) and not out.isatty():
        buffer = io.BufferedWriter(Pipe(out.fileno(), "w", closefd=False))
        sys.stdout = io.TextIOWrapper(
            buffer, out.encoding, out.errors, line_buffering=out.line_buffering
        )


def exit_process(code: int) -> NoReturn:
    """Exit with `code`. If a rank has failed, skip the destructors of NCCL and CUDA, which may wait
    for ranks forever.

    This also skips the shutdown of the interpreter, which aborts if a thread is inside torch's
    store.
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
    """Exit without `finally` blocks and exit handlers, which may block. Lock files and temporary
    folders are removed.
    """
    remove_lock_files()
    # Where loader workers have their sockets. Not imported here, because this may be any thread at
    # any time.
    util = sys.modules.get("multiprocessing.util")
    # A process that multiprocessing has started shares the folder of its parent.
    if util is not None and sys.modules["multiprocessing"].parent_process() is None:
        # On a full disk the folder cannot be created.
        with suppress(OSError):
            shutil.rmtree(util.get_temp_dir(), ignore_errors=True)
    os._exit(code)


@contextmanager
def terminate_descendants(seconds: float = 1.0) -> Iterator[None]:
    """At the end of the `with` block, end all processes started in it: SIGTERM, then SIGKILL after
    `seconds`.
    """
    if sys.platform == "linux":
        PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h: orphans below this process become its children
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

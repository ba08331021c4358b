"""How the processes of a run behave: they die with their parent, start quickly, end at once, and leave nothing running."""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

import psutil

# Without it `python -m` imports from the current folder first, where anybody's json.py may lie.
SAFE_PATH = ("-P",)
LAUNCHER = "RUN_LAUNCHER"  # variable of a rank: the pid of the process that has started it


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent dies, so that `kill -9` of a launcher leaves nothing behind.

    A launcher gives its pid to its ranks, because it may die before they ask.
    """
    if sys.platform != "linux":
        return
    PR_SET_PDEATHSIG = 1  # linux/prctl.h
    parent = int(os.environ.pop(LAUNCHER, os.getppid()))  # taken out: what a rank starts has another parent
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the request
        os.kill(os.getpid(), signal.SIGKILL)


def process_started_at(pid: int) -> float:
    """`time.time()` at a process's start. psutil's is up to a second off: it counts from the boot, in whole seconds."""
    if sys.platform != "linux":
        return psutil.Process(pid).create_time()
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()  # proc(5): the name may have spaces
    since_boot = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot)


@contextmanager
def imports_without_collector() -> Iterator[None]:
    """Import torch and timm without Python's garbage collector, which would visit their million objects again and again.

    That is a fifth of the time of `import timm`. Afterwards the objects count as permanent: no collection visits them.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def keep_freed_memory() -> None:
    """Let glibc keep the memory that tensors free; by default it returns large blocks, and each step faults them in anew.

    On a CPU a resnet18 step gains 6 to 13 %, under ddp 25 % (docs/benchmarks.md). MALLOC_* in the environment wins;
    other C libraries are left alone.
    """
    if sys.platform != "linux" or any(name.startswith("MALLOC_") for name in os.environ):
        return
    M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, 16 * 2**20)  # larger ones leave holes that nothing fits into
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def leave(code: int) -> NoReturn:
    """End this process, which may be a rank. Whatever it had to write down is written.

    A rank that has failed, or was stopped, is still in its process group, and goes at once after Python's own exit
    handlers. The destructors of NCCL's communicators and of CUDA may wait for ranks that never answer, where no watchdog
    looks any more; and a thread that is inside torch's store while the interpreter shuts down would abort the process.
    """
    dist = sys.modules.get("torch.distributed")  # whoever never imported it is in no group
    if code and dist is not None and dist.is_available() and dist.is_initialized():
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


@contextmanager
def no_survivors(seconds: float = 1.0) -> Iterator[None]:
    """End every process that the block has started, directly or not: SIGTERM, `seconds` to leave, SIGKILL."""
    if sys.platform == "linux":
        PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h: orphans below this process become its children, so they are found
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    before = set(psutil.Process().children(recursive=True))
    try:
        yield
    finally:
        left = [child for child in psutil.Process().children(recursive=True) if child not in before]
        for child in left:
            with suppress(psutil.NoSuchProcess):
                child.terminate()
        for child in psutil.wait_procs(left, timeout=seconds)[1]:
            with suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.wait_procs(left, timeout=seconds)

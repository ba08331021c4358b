"""What some systems lack or do otherwise, in one place: nobody else asks for names that only Unix has.

Windows has no resource, SIGHUP, SIGUSR1, SIGUSR2 or SIGKILL, syncs no folder, and has no NCCL. What is missing is
recognised by its absence, so that a test on Linux can hide it. Locks on files: lock.py, by the filelock package.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil

WINDOWS = sys.platform == "win32"
STOP_SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2") if hasattr(signal, name)
)
KILL = getattr(signal, "SIGKILL", signal.SIGTERM)  # on Windows os.kill ends a process with whatever number it is given


def sync(path: Path) -> None:
    """Bring a file, or the entries of a folder, to the disk.

    Windows opens no folder and keeps its entries by itself; some network file systems sync none.
    """
    if WINDOWS and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDWR if WINDOWS else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


def peak_memory() -> int:
    """The most bytes of memory that this process has held so far."""
    status = Path("/proc/self/status")  # Linux's ru_maxrss begins with what the parent held
    own = re.search(r"^VmHWM:\s+(\d+) kB$", status.read_text(), re.MULTILINE) if status.exists() else None
    if own is not None:
        return 1024 * int(own.group(1))
    try:
        import resource
    except ImportError:
        held = psutil.Process().memory_info()
        return int(getattr(held, "peak_wset", held.rss))
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss: bytes on macOS, KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def open_file_limit() -> int | None:
    """How many files this process may hold open; None where nobody says."""
    try:
        import resource
    except ImportError:
        return None
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def pass_on(number: int, child: subprocess.Popen[bytes]) -> None:
    """Hand a stop signal to a child. On Windows a Ctrl-C has reached it already, and nothing else can be sent."""
    if child.poll() is None and not (WINDOWS and number == signal.SIGINT):
        child.send_signal(number)


def backend_for(accelerator: str) -> str:
    """The process group's backend where nobody has chosen one."""
    return "nccl" if accelerator == "cuda" and not WINDOWS else "gloo"

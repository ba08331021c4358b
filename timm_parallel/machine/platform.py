"""Functions and signals that differ between operating systems. This file can be imported on
Windows, so that train.py can print that Windows is not supported.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import tempfile
from pathlib import Path
from typing import IO

WINDOWS = sys.platform == "win32"
# Start method of loader workers; None: that of Python. On Linux, Python 3.14 uses a fork server,
# with which each worker would import torch again and receive a pickled copy of the dataset.
WORKER_START = "fork" if sys.platform == "linux" else None
STOP_SIGNALS = tuple(
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
    if hasattr(signal, name)
)


def open_memory() -> IO[bytes]:
    """Open a file without a name, to which a child process can write. On Linux it is in memory,
    because the disk may be full.
    """
    if sys.platform == "linux":
        return os.fdopen(os.memfd_create("report"), "w+b")
    return tempfile.TemporaryFile()


def peak_memory() -> int:
    """Return the largest amount of memory that this process has used so far, in bytes."""
    status = Path("/proc/self/status")
    # Read VmHWM on Linux, because ru_maxrss there includes the peak of the parent process before
    # the fork.
    match = (
        re.search(r"^VmHWM:\s+(\d+) kB$", status.read_text(), re.MULTILINE)
        if status.exists()
        else None
    )
    if match is not None:
        return 1024 * int(match.group(1))
    import resource

    # ru_maxrss is in bytes on macOS and in KiB elsewhere.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

"""Functions and signals that differ between systems. Windows must be able to import this file: it
is refused later.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import sys
import tempfile
from pathlib import Path
from typing import IO

WINDOWS = sys.platform == "win32"
STOP_SIGNALS = tuple(
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
    if hasattr(signal, name)
)


def sync(path: Path) -> None:
    """Flush a file, or a folder's list of entries, to the disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot sync folders.
        if error.errno != errno.EINVAL or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


def open_memory() -> IO[bytes]:
    """Open a file without a name for a child process to write to: in memory on Linux, where the
    disk may be full.
    """
    if sys.platform == "linux":
        return os.fdopen(os.memfd_create("report"), "w+b")
    return tempfile.TemporaryFile()


def peak_memory() -> int:
    """Return the peak memory of this process in bytes."""
    status = Path("/proc/self/status")
    # Linux's ru_maxrss includes the peak of the parent before the fork.
    match = (
        re.search(r"^VmHWM:\s+(\d+) kB$", status.read_text(), re.MULTILINE)
        if status.exists()
        else None
    )
    if match is not None:
        return 1024 * int(match.group(1))
    import resource

    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss: bytes on macOS, KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

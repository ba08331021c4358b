"""A run or sweep folder belongs to one process at a time: `.lock` in it, held by the kernel for as long as that process lives.

So a dead owner's lock blocks nobody, on whatever machine it died, and no heartbeat is needed.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

log = logging.getLogger(__name__)
NAME = ".lock"
PATIENCE_SECONDS = 0.2  # is_owned, in another process, holds the lock for a moment


@contextmanager
def own(folder: Path, patience: float = PATIENCE_SECONDS) -> Iterator[None]:
    """Hold `folder` while the block runs. ValueError, with the owner's pid and host, where another process holds it."""
    descriptor = _take(folder / NAME, patience)
    try:
        yield
    finally:
        if descriptor is not None:
            with suppress(PermissionError):  # Windows removes no open file; a lock that nobody holds blocks nobody
                (folder / NAME).unlink(missing_ok=True)
            os.close(descriptor)


def is_owned(folder: Path) -> bool:
    """True if a living process holds `folder`."""
    if not (folder / NAME).exists():
        return False
    try:
        with own(folder, patience=0):
            return False
    except ValueError:
        return True


def _take(path: Path, patience: float) -> int | None:
    """The descriptor that holds the lock; None where the file system has no locks."""
    from filelock import lock_descriptor  # flock; on Windows LockFileEx of the first byte, which nobody else can read

    until = time.monotonic() + patience
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)  # not inherited by programs that this one starts
        except OSError as error:
            raise ValueError(f"{path.parent}: cannot be written to ({error.strerror}); use another folder") from None
        try:
            if not lock_descriptor(descriptor, blocking=False):
                if time.monotonic() < until:
                    os.close(descriptor)
                    time.sleep(0.02)
                    continue
                os.lseek(descriptor, 1, os.SEEK_SET)
                owner = os.read(descriptor, 1000).decode(errors="replace").strip() or "another process"
                os.close(descriptor)
                raise ValueError(f"{path.parent}: in use by {owner}; wait for it, stop it, or use another folder")
        except OSError as error:
            os.close(descriptor)
            log.warning("%s: this file system has no locks (%s); do not start a second run here", path.parent, error)
            return None
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                os.truncate(descriptor, 0)
                os.write(descriptor, f"\nprocess {os.getpid()} on {socket.gethostname()}\n".encode())
                return descriptor
        os.close(descriptor)  # its owner removed it between our open and our lock

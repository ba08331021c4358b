"""A run or sweep folder belongs to one process at a time: `.lock` in it, held by the kernel for as long as that process lives.

So a dead owner's lock blocks nobody, on whatever machine it died, and no heartbeat is needed.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

log = logging.getLogger(__name__)
NAME = ".lock"
PATIENCE_SECONDS = 0.2  # is_owned, in another process, holds the lock for a moment
NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK)  # of a file system without


@contextmanager
def own(folder: Path, patience: float = PATIENCE_SECONDS) -> Iterator[None]:
    """Hold `folder` while the block runs. ValueError, with the owner's pid and host, where another process holds it."""
    from filelock import FileLock, Timeout  # flock; on Windows LockFileEx of the first byte, which nobody else can read

    if not folder.is_dir():  # FileLock would make it
        raise ValueError(f"{folder}: no such folder")
    lock = FileLock(folder / NAME, timeout=patience, poll_interval=0.02, on_acquired=_sign)
    try:
        lock.acquire()
    except Timeout:
        raise ValueError(f"{folder}: in use by {_owner(folder)}; wait for it, stop it, or use another folder") from None
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise ValueError(f"{folder}: cannot be written to ({error.strerror}); use another folder") from None
        log.warning("%s: this file system has no locks (%s); do not start a second run here", folder, error)
    try:
        yield
    finally:
        if lock.is_locked:
            with suppress(PermissionError):  # Windows removes no open file; a lock that nobody holds blocks nobody
                (folder / NAME).unlink(missing_ok=True)
        lock.release()


def is_owned(folder: Path) -> bool:
    """True if a living process holds `folder`."""
    if not (folder / NAME).exists():
        return False
    try:
        with own(folder, patience=0):
            return False
    except ValueError:
        return True


def _sign(descriptor: int) -> None:
    os.truncate(descriptor, 0)
    os.write(descriptor, f"\nprocess {os.getpid()} on {socket.gethostname()}\n".encode())


def _owner(folder: Path) -> str:
    said = b""
    with suppress(OSError), open(folder / NAME, "rb", buffering=0) as file:  # it may be leaving
        file.seek(1)
        said = file.read(1000)
    return said.decode(errors="replace").strip() or "another process"

"""Locks of run and sweep folders. The kernel releases `.lock` when its owner dies, so no heartbeat
is needed.
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
PATIENCE_SECONDS = 0.2  # is_locked in another process may hold the lock for a moment
_held: set[Path] = set()  # lock files of this process
NO_LOCKS = (
    errno.ENOSYS,
    errno.ENOTSUP,
    errno.EOPNOTSUPP,
    errno.ENOLCK,
)  # the file system has no locks


@contextmanager
def lock_folder(folder: Path, patience: float = PATIENCE_SECONDS) -> Iterator[None]:
    """Lock `folder` during the `with` block. Raises ValueError with pid and host of the process
    that holds the lock.
    """
    from filelock import FileLock, Timeout

    if not folder.is_dir():  # FileLock would create it
        raise ValueError(f"{folder}: no such folder")
    lock = FileLock(folder / NAME, timeout=patience, poll_interval=0.02, on_acquired=_sign)
    try:
        lock.acquire()
    except Timeout:
        owner = owner_of(folder)
        raise ValueError(
            f"{folder}: in use by {owner}; wait for it, stop it, or use another folder"
        ) from None
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise ValueError(
                f"{folder}: cannot be written to ({error.strerror}); use another folder"
            ) from None
        log.warning(
            "%s: this file system has no locks (%s); do not start a second run here", folder, error
        )
    path = folder.resolve() / NAME
    try:
        if lock.is_locked:
            _held.add(path)
        yield
    finally:
        _held.discard(path)
        if lock.is_locked:
            path.unlink(missing_ok=True)
        lock.release()


def remove_lock_files() -> None:
    """Remove the lock files of this process before an os._exit, which skips every `finally`."""
    for path in list(_held):
        with suppress(OSError):
            path.unlink()


def is_locked(folder: Path) -> bool:
    """Return True if a running process holds the lock of `folder`."""
    if not (folder / NAME).exists():
        return False
    try:
        with lock_folder(folder, patience=0):
            return False
    except ValueError:
        return True


def _sign(descriptor: int) -> None:
    """Write pid, host and Slurm job of this process into the open lock file."""
    os.truncate(descriptor, 0)
    job = f" of Slurm job {os.environ['SLURM_JOB_ID']}" if "SLURM_JOB_ID" in os.environ else ""
    os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}{job}\n".encode())


def owner_of(folder: Path) -> str:
    """Describe the process that holds the lock of `folder`: pid, host, Slurm job; `another process`
    if unknown.
    """
    with suppress(OSError):  # the owner may be removing the file
        return (folder / NAME).read_text(errors="replace").strip() or "another process"
    return "another process"

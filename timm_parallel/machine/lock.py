"""Locks of run and sweep folders. A process locks the file `.lock` in the folder. The kernel
releases the lock when the process dies, so no heartbeat is needed.
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
# Seconds to wait for a lock, because another process may hold it for a moment while it calls
# is_locked.
PATIENCE_SECONDS = 0.2
# Paths of the lock files that this process holds.
_held: set[Path] = set()
# Error numbers of a file system that does not support locks.
NO_LOCKS = (
    errno.ENOSYS,
    errno.ENOTSUP,
    errno.EOPNOTSUPP,
    errno.ENOLCK,
)


@contextmanager
def lock_folder(folder: Path, patience: float = PATIENCE_SECONDS) -> Iterator[None]:
    """Lock a run or sweep folder during the `with` block. If another process holds the lock, raises
    ValueError with the pid and host of that process.

    `patience`: seconds to wait for the lock.
    """
    from filelock import FileLock, Timeout

    # Reject a missing folder here, because FileLock would create it.
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder")
    lock = FileLock(folder / NAME, timeout=patience, poll_interval=0.02, on_acquired=_sign)
    try:
        lock.acquire()
    except Timeout:
        raise ValueError(
            f"{folder}: in use by {owner_of(folder)}; wait for it, stop it, or use another folder"
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
    """Delete the lock files that this process holds. Called before os._exit, which skips every
    `finally` block.
    """
    for path in list(_held):
        with suppress(OSError):
            path.unlink()


def is_locked(folder: Path) -> bool:
    """Return True if a running process holds the lock of a run or sweep folder."""
    if not (folder / NAME).exists():
        return False
    try:
        with lock_folder(folder, patience=0):
            return False
    except ValueError:
        return True


def _sign(descriptor: int) -> None:
    """Write pid, host and Slurm job of this process into the open lock file, for messages of other
    processes.
    """
    os.truncate(descriptor, 0)
    job = f" of Slurm job {os.environ['SLURM_JOB_ID']}" if "SLURM_JOB_ID" in os.environ else ""
    os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}{job}\n".encode())


def owner_of(folder: Path) -> str:
    """Describe the process that holds the lock of a folder, by pid, host and Slurm job. Return
    `another process` if the lock file does not say this.
    """
    # The file may be missing, because the other process deletes the file when it releases the lock.
    with suppress(OSError):
        return (folder / NAME).read_text(errors="replace").strip() or "another process"
    return "another process"

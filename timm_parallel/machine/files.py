"""Files and folders of a run: create, lock and watch the folder, write files atomically, read JSON.
After a crash, a file has either its old or its new content. The kernel releases a lock when the
process dies, so no heartbeat is needed.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from timm_parallel.errors import UnknownFormatError
from timm_parallel.machine.secrets import hide, hide_in


def claim_folder(path: Path) -> Path:
    """Create a new folder and return its path. If `path` exists, the name gets a suffix (`path_1`,
    `path_2` …), so that two runs never share a folder. Raises ValueError if the folder cannot be
    created.
    """
    if not path.name:
        raise ValueError(f"hydra.run.dir={path}: expected the path of a new folder")
    if (shown := hide(str(path))) != str(path):
        raise ValueError(
            f"hydra.run.dir={shown}: the path contains a secret; choose another path or task_name"
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for attempt in range(1000):
            folder = path if attempt == 0 else path.with_name(f"{path.name}_{attempt}")
            with contextlib.suppress(FileExistsError):
                folder.mkdir()
                return folder
    except OSError as error:
        raise ValueError(
            f"hydra.run.dir={path}: cannot be created ({error.strerror}); choose another path"
        ) from None
    raise ValueError(
        f"hydra.run.dir={path}: 1000 folders of this name exist already; choose another name"
    )


def write_text(path: Path, text: str) -> None:
    """Write a text to a file atomically. Values of secrets are replaced by `${oc.env:NAME}`."""
    _write_characters(path, hide(text))


def write_json(path: Path, value: Any) -> None:
    """Write a value to a file as strict JSON, atomically and without secrets. NaN and infinity
    become null, because JSON does not have them.
    """
    _write_characters(path, json.dumps(hide_in(finite(value)), indent=2, allow_nan=False) + "\n")


def read_json(path: Path, newest: int, missing: str) -> dict[str, Any]:
    """Read a JSON file whose format version is `newest` or older. Raises ValueError for a missing
    or damaged file, and UnknownFormatError for a newer one. `missing`: end of the message for a
    missing file.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path.parent}: this folder has no {path.name}; {missing}") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: damaged, cannot be read as JSON ({error})") from None
    if not isinstance(values, dict) or not isinstance(values.get("format", 0), int):
        raise ValueError(
            f"{path}: this file is not of this project; expected a JSON object with a key `format`"
        )
    if values.get("format", 0) > newest:
        raise UnknownFormatError(
            f"{path}: format {values['format']} is newer than this code reads (at most {newest}); "
            "update the code"
        )
    return values


def write_whole(path: Path, write: Callable[[Path], object], writer: str = "") -> None:
    """Write a file so that a crash leaves either the old or the new file, never a part. The
    function `write` writes a temporary file, which is then renamed to `path`.

    `writer`: suffix of the temporary file's name, different for each concurrent writer.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}{writer}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        write(temporary)
        _sync(temporary)
        os.replace(temporary, path)
        # Flush the folder too, because a power failure may otherwise undo the rename.
        _sync(path.parent)
    except OSError as error:
        # Add the path to an error of an open file, such as a full disk, which names no file. An
        # OSError without a number has a complete message and stays unchanged.
        if error.errno is not None:
            error.filename = error.filename or str(path)
        raise
    finally:
        temporary.unlink(missing_ok=True)


def _write_characters(path: Path, text: str) -> None:
    def write(temporary: Path) -> None:
        # Mode x fails if a link with this name exists, and so never writes to the target of a link.
        # surrogateescape keeps the bytes of file names that are not UTF-8.
        with open(temporary, "x", encoding="utf-8", errors="surrogateescape") as file:
            file.write(text)

    write_whole(path, write, f".{os.getpid()}")


def finite(value: Any) -> Any:
    """Copy nested dicts and lists. In the copy, NaN and infinity are None and tuples are lists, as
    in JSON.
    """
    return json.loads(json.dumps(value), parse_constant=lambda name: None)


def _sync(path: Path) -> None:
    """Flush a file, or the list of entries of a folder, to the disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Ignore EINVAL for a folder, because some network file systems cannot flush folders.
        if error.errno != errno.EINVAL or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


log = logging.getLogger(__name__)
LOCK_FILE = ".lock"
# Seconds to wait for a lock, because another process may hold it for a moment while it calls
# is_locked.
PATIENCE_SECONDS = 0.2
# Paths of the lock files that this process holds.
_held: set[Path] = set()
# A forked process does not have the locks of its parent.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_held.clear)
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
    lock = FileLock(folder / LOCK_FILE, timeout=patience, poll_interval=0.02, on_acquired=_sign)
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
    path = folder.resolve() / LOCK_FILE
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
    if not (folder / LOCK_FILE).exists():
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
        return (folder / LOCK_FILE).read_text(errors="replace").strip() or "another process"
    return "another process"


# Value of `exception` in the failure record of a run whose folder is gone, in place of an
# exception's name.
GONE = "FolderGone"


class RunFolder:
    """Run folder of this process, with a method that detects its deletion. It keeps the folder open
    until `close` is called.
    """

    def __init__(self, folder: Path) -> None:
        # Store an absolute path, because the project's code may change the current folder.
        self.path = folder.absolute()
        # Watch config.yaml too. `rm -rf` fails if a rank writes a file at the same moment, and then
        # leaves the folder without its config.yaml.
        self._marks = [path for path in (self.path, self.path / "config.yaml") if path.exists()]
        # Keep the folder open, because some network file systems keep its inode number only while
        # it is open.
        self._descriptor = (
            os.open(self.path, os.O_RDONLY) if os.name == "posix" and self._marks else None
        )

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def problem(self) -> str:
        """Return a message if the run folder was deleted or moved, or if another folder now has its
        name. The text is empty otherwise.
        """
        try:
            found = [path.stat() for path in self._marks]
            if self._descriptor is None or os.path.samestat(found[0], os.fstat(self._descriptor)):
                return ""
        except OSError as error:
            # Ignore other errors of a network file system, which may respond again later.
            if not isinstance(error, FileNotFoundError | NotADirectoryError):
                return ""
        return (
            f"{self.path}: this run folder was deleted or moved, so the run cannot save "
            "anything and ends"
        )

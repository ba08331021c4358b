"""Functions that write files atomically, read JSON files and create run folders. After a crash, a
file has either its old or its new content.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Callable
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

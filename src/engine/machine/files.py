"""Files written whole or not at all, in one place."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from src.engine.machine.platform import sync
from src.engine.machine.secrets import hide, hide_in


def claim_folder(path: Path) -> Path:
    """Create the folder `path`, or where that is taken `path_1`, `path_2` …, and return it. Never shared by two runs."""
    if not path.name:
        raise ValueError(f"hydra.run.dir={path}: give the name of a folder to be made")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for attempt in range(1000):
            folder = path if attempt == 0 else path.with_name(f"{path.name}_{attempt}")
            with contextlib.suppress(FileExistsError):
                folder.mkdir()
                return folder
    except OSError as error:
        raise ValueError(f"hydra.run.dir={path}: cannot be made ({error.strerror}); choose another place") from None
    raise ValueError(f"hydra.run.dir={path}: 1000 folders of this name exist already; choose another name")


def write_text(path: Path, text: str) -> None:
    """Write `path` whole or not at all, and without secrets."""
    _write_characters(path, hide(text))


def write_json(path: Path, value: Any) -> None:
    """Strict JSON: a number that is not finite becomes null, because `NaN` is not JSON."""
    _write_characters(path, json.dumps(hide_in(finite(value)), indent=2, allow_nan=False) + "\n")


def read_json(path: Path, newest: int, missing: str) -> dict[str, Any]:
    """What a version of this code up to format `newest` wrote to `path`. `missing` says what it means if there is none."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path.parent}: no {path.name} here; {missing}") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: damaged, it cannot be read as JSON ({error})") from None
    if not isinstance(values, dict) or not isinstance(values.get("format", 0), int):
        raise ValueError(f"{path}: not of this project (no table with a format)")
    if values.get("format", 0) > newest:
        raise ValueError(f"{path}: format {values['format']} is newer than this code reads ({newest}); update the code")
    return values


def write_whole(path: Path, write: Callable[[Path], object], writer: str = "") -> None:
    """Let `write` fill a file beside `path`, then put it in its place: a crash at any moment leaves the old or the new one.

    `writer` keeps apart those who may write `path` at the same time; what one of that name left unfinished is removed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}{writer}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        write(temporary)
        sync(temporary)
        os.replace(temporary, path)
        sync(path.parent)  # without it the new name may be lost with the power
    finally:
        temporary.unlink(missing_ok=True)


def _write_characters(path: Path, text: str) -> None:
    def write(temporary: Path) -> None:
        with open(temporary, "x", encoding="utf-8") as file:  # x: a link that somebody has put there is not followed
            file.write(text)

    write_whole(path, write, f".{os.getpid()}")


def finite(value: Any) -> Any:
    """A tree of plain values as JSON knows them, with None for numbers that are not finite."""
    return json.loads(json.dumps(value), parse_constant=lambda name: None)

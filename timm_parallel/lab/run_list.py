"""List the runs below a folder, from the files that each run has written."""

from __future__ import annotations

import csv
import json
import os
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from timm_parallel.machine.files import is_locked
from timm_parallel.machine.text import as_number, for_terminal
from timm_parallel.record.result import STATUSES

SafeLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
# Overrides that do not change the training.
HIDDEN = ("hydra", "sweep.", "paths.", "print_config", "resume", "tracker")
MISSING = object()


@dataclass(frozen=True)
class ListedRun:
    """A run, with the values of its result.json, which is empty if it has not ended."""

    folder: Path
    # The status of result.json, or running, unfinished or damaged.
    status: str
    # Time at which its newest attempt started, on the clock of time.time().
    started: float
    result: dict[str, Any]

    def value(self, path: str) -> float | None:
        """Return a number of result.json, such as `val/loss`, or None if it has no such number."""
        found: Any = self.result
        for name in path.split("/"):
            found = found.get(name) if isinstance(found, dict) else None
        return as_number(found)

    @property
    def settings(self) -> str:
        """Overrides with which the run was started, as they differ from the default config."""
        words: list[str] = []
        with suppress(OSError, yaml.YAMLError, TypeError, KeyError, ValueError, IndexError):
            path = self.folder / ".hydra" / "overrides.yaml"
            words = list(yaml.load(path.read_text(encoding="utf-8"), SafeLoader))
            # A resume has replaced the file. The run was started by the command of its first
            # segment.
            if any(word.startswith("resume=") for word in words):
                words = shlex.split(self.result["segments"][0]["command"])
        return " ".join(
            word for word in words if "=" in word and not word.lstrip("+~").startswith(HIDDEN)
        )


def find_runs(folder: Path, where: Sequence[str]) -> list[ListedRun]:
    """Read the runs below a folder, the newest first. Folders that are no run are ignored.

    `where`: conditions `<key>=<value>` on the config of a run, all of which must hold. Raises
    ValueError if no run has such a key.
    """
    if not folder.is_dir():
        raise ValueError(f"folder={folder}: no such folder; give the folder of your runs")
    folders = list(_run_folders(folder))
    for condition in where:
        key, equals, text = condition.partition("=")
        if not equals:
            raise ValueError(f"where={condition}: expected <key>=<value>, as model.name=resnet18")
        values = {path: config_value(path, key) for path in folders}
        if folders and all(value is MISSING for value in values.values()):
            raise ValueError(f"where={condition}: no run in {folder} has the key {key}")
        folders = [path for path in folders if values[path] == _parsed(text)]
    return sorted(map(_read, folders), key=lambda run: -run.started)


def _run_folders(folder: Path) -> Iterator[Path]:
    # os.walk ignores another user's folder, and one that was just deleted.
    for path, folders, files in os.walk(folder):
        if {"config.yaml", "result.json"} & {*folders, *files}:
            yield Path(path)
            folders.clear()


def _read(folder: Path) -> ListedRun:
    result: Any = {}
    try:
        result = json.loads((folder / "result.json").read_bytes())
        is_known = isinstance(result, dict) and result.get("status") in STATUSES
        status = result["status"] if is_known else "damaged"
    except FileNotFoundError:
        status = "running" if is_locked(folder) else "unfinished"
    except (OSError, ValueError, RecursionError):
        status = "damaged"
    started = 0.0
    with suppress(OSError):
        started = (folder / "config.yaml").stat().st_mtime
    return ListedRun(folder, status, started, result if status in STATUSES else {})


def config_value(folder: Path, key: str) -> Any:
    """Return the value of a dotted key in config.yaml of a run, or MISSING."""
    try:
        text = (folder / "config.yaml").read_text(encoding="utf-8")
    except (OSError, ValueError):
        return MISSING
    # A file of this project has one value per line. Reading it as YAML takes 50 times as long.
    if found := _line_of(key).search(text):
        return _parsed(found[1])
    if f"{key.rpartition('.')[2]}:" not in text:
        return MISSING
    try:
        value = yaml.load(text, SafeLoader)
    except yaml.YAMLError:
        return MISSING
    for name in key.split("."):
        value = value.get(name, MISSING) if isinstance(value, dict) else MISSING
    return value


@cache
def _line_of(key: str) -> re.Pattern[str]:
    """Return a pattern for the line of a key with a value, which no indented line continues."""
    *sections, name = key.split(".")
    pattern = ""
    for depth, section in enumerate(sections):
        deeper = "  " * (depth + 1)
        pattern += rf"^{'  ' * depth}{re.escape(section)}:\n(?:^{deeper}.*\n)*?"
    indent = "  " * len(sections)
    return re.compile(rf"{pattern}^{indent}{re.escape(name)}: (.+)$(?!\n{indent} )", re.MULTILINE)


@cache
def _parsed(text: str) -> Any:
    # YAML reads 1e-3 as a text.
    with suppress(ValueError):
        return float(text)
    try:
        return yaml.load(text, SafeLoader)
    except yaml.YAMLError:
        return text


def show_runs(folder: Path, metric: str | None, where: Sequence[str], as_csv: bool) -> None:
    """Print the runs below a folder as a table or as CSV: the newest first, or with a metric the
    best first. `metric`: a number of result.json, such as `val/loss`; None: the objective of each
    run. A number that is no metric of the task is sorted from large to small.
    """
    runs, path = find_runs(folder, where), metric or "objective"
    if metric is not None:
        if runs and all(run.value(metric) is None for run in runs):
            raise ValueError(f"metric={metric}: no run in {folder} has it, e.g. metric=val/loss")
        sign = 1 if _lower_is_better(runs, metric) else -1
        # A run without the metric comes last.
        runs.sort(key=lambda run: (run.value(metric) is None, sign * (run.value(metric) or 0)))
    rows = [
        (
            str(run.folder.relative_to(folder)),
            run.status,
            _number(run.value(path), ".6g"),
            _number(run.value("throughput/images_per_sec"), ".4g"),
            _number((run.value("seconds/total") or 0) / 60 or None, ".1f"),
            run.settings,
        )
        for run in runs
    ]
    header = ("folder", "status", path, "images/s", "minutes", "settings")
    if as_csv:
        csv.writer(sys.stdout, lineterminator="\n").writerows([header, *rows])
        return
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    for row in (header, *rows):
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print(for_terminal("  ".join(cells).rstrip()))


def _lower_is_better(runs: Sequence[ListedRun], metric: str) -> bool:
    name = metric.rpartition("/")[2].removesuffix("_best").removesuffix("_ema")
    for run in runs:
        with suppress(KeyError, TypeError):
            return bool(run.result["metrics"][name]["lower_is_better"])
    return name == "loss"


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)

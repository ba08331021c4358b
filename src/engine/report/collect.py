"""Folders -> typed runs. The only part of the report that knows how sweeps and runs lie on disk."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from src.engine.record.jobs import Job, read_jobs
from src.engine.record.result import read_result
from src.engine.report.measured import RunRecord

# libyaml's, where PyYAML has it: the parser in Python needs 15 ms per config, a minute for a large study.
SafeLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def collect(folders: list[Path]) -> list[RunRecord]:
    """All jobs of sweep folders and of single run folders, in order.

    Errors: ValueError, one line with path and remedy, on a folder that is neither or whose records cannot be read.
    """
    unique = list(dict.fromkeys(folder.resolve() for folder in folders))
    root = Path(os.path.commonpath(unique))
    found: dict[Path, RunRecord] = {}
    # sweeps first: a run that is also given by itself is known as the sweep's job, and once
    for folder in sorted(unique, key=lambda folder: not (folder / "jobs.json").is_file()):
        try:
            for run in _read_folder(folder, root):
                found.setdefault(run.folder.resolve(), run)
        except ValueError as error:
            raise ValueError(f"{error}; restore it or leave the folder out") from None
    return list(found.values())


def _read_folder(folder: Path, root: Path) -> list[RunRecord]:
    if (folder / "jobs.json").is_file():
        jobs = read_jobs(folder).jobs
        if not jobs:
            raise ValueError(f"{folder}: a sweep without jobs")
        return [_read_run(folder / job.folder, root, job, os.path.relpath(folder, root)) for job in jobs]
    if (folder / "result.json").is_file():
        return [_read_run(folder, root, None)]
    raise ValueError(f"{folder}: no jobs.json and no result.json here, so no sweep and no run that has ended")


def _read_run(folder: Path, root: Path, job: Job | None, sweep: str = "") -> RunRecord:
    """`job` is None where the folder is a run by itself."""
    result = flat(vars(read_result(folder))) if (folder / "result.json").is_file() else {}
    status, reason = (job.status, job.reason or "") if job else ("", "")
    if result and status not in ("waiting", "running"):
        status, reason = result["status"], result["reason"] or reason
    elif not result and status == "done":
        status, reason = "failed", f"{folder.name}: no result.json, though the sweep calls this job done"
    name = os.path.relpath(folder, root)
    config = _read(folder / "config.yaml", "YAML", lambda text: yaml.load(text, Loader=SafeLoader))
    return RunRecord(
        name=folder.name if name == "." else name,
        folder=folder,
        status=status,
        reason=" ".join(str(reason).split()),
        sweep=sweep,
        block=job.block if job else 0,
        position=job.position if job else None,
        overrides=tuple(job.overrides) if job else (),
        result=result,
        config={key: value for key, value in config.items() if key.partition(".")[0] not in ("defaults", "hydra")},
        environment=_read(folder / "environment.json", "JSON", json.loads),
    )


def _read(path: Path, kind: str, parse: Callable[[str], Any]) -> dict[str, Any]:
    """Flat; empty where there is no such file."""
    try:
        tree = parse(path.read_text(encoding="utf-8")) or {} if path.is_file() else {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        first = str(error).splitlines()[0]
        raise ValueError(f"{path}: cannot be read as {kind} ({first})") from None
    if not isinstance(tree, dict):
        raise ValueError(f"{path}: not a record of this project")
    return flat(tree)


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """`{"data": {"root": 1}}` -> `{"data.root": 1}`."""
    values: dict[str, Any] = {}
    for key, value in tree.items():
        values |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {f"{prefix}{key}": value}
    return values

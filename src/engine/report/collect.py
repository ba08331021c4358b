"""Folders -> typed runs. The only part of the report that knows how sweeps and runs lie on disk."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from src.engine.record.jobs import Job, Jobs, read_jobs
from src.engine.record.result import read_result
from src.engine.report.measured import Run
from src.engine.report.settings import flat


def collect(folders: list[Path]) -> list[Run]:
    """All jobs of sweep folders and of single run folders, in order.

    Errors: ValueError, one line with path and remedy, on a folder that is neither or whose records cannot be read.
    """
    if not folders:
        raise ValueError("no folder given; give a sweep folder, e.g. outputs/sweeps/<date>/<time>")
    unique = list(dict.fromkeys(folder.resolve() for folder in folders))
    root = Path(os.path.commonpath(unique))
    # sweeps first: a run that is also given by itself is known as the sweep's job, and once
    ordered = sorted(unique, key=lambda folder: not (folder / "jobs.json").is_file())
    found: dict[Path, Run] = {}
    for folder in ordered:
        for run in _read_folder(folder, root):
            found.setdefault(run.folder.resolve(), run)
    return list(found.values())


def read_sweep(folder: Path) -> Jobs:
    try:
        return read_jobs(folder)
    except ValueError as error:
        raise ValueError(f"{error}; restore it or leave the folder out") from None


def _read_folder(folder: Path, root: Path) -> Iterator[Run]:
    if (folder / "jobs.json").is_file():
        jobs = read_sweep(folder).jobs
        if not jobs:
            raise ValueError(f"{folder}: a sweep without jobs; run `python train.py -m …` and report on its folder")
        for job in jobs:
            yield _read_run(folder / job.folder, root, job, os.path.relpath(folder, root))
    elif (folder / "result.json").is_file():
        yield _read_run(folder, root, None)
    elif not folder.is_dir():
        raise ValueError(f"{folder}: no such folder; give a sweep folder, e.g. outputs/sweeps/<date>/<time>")
    else:
        raise ValueError(f"{folder}: no jobs.json and no result.json here; give a sweep folder or an ended run's")


def _read_run(folder: Path, root: Path, job: Job | None, sweep: str = "") -> Run:
    """`job` is None where the folder is a run by itself."""
    try:
        result = read_result(folder) if (folder / "result.json").is_file() else None
        record = _read_json(folder / "result.json")
    except ValueError as error:
        raise ValueError(f"{error}; or run that job again, or leave the folder out") from None
    status, reason = (job.status, job.reason or "") if job else ("", "")
    if result is not None and status not in ("waiting", "running"):
        status, reason = result.status, result.reason or reason
    elif result is None and status == "done":
        status, reason = "failed", f"{folder.name}: no result.json, though the sweep calls this job done"
    name = os.path.relpath(folder, root)
    return Run(
        name=folder.name if name == "." else name,
        folder=folder,
        status=status,
        reason=" ".join(reason.split()),
        sweep=sweep,
        block=job.block if job else 0,
        position=job.position if job else None,
        overrides=tuple(job.overrides) if job else (),
        record=record,
        config=_read_config(folder / "config.yaml"),
        environment=_read_json(folder / "environment.json"),
    )


def _read_json(path: Path) -> dict[str, Any]:
    """Empty where there is no such file."""
    try:
        values = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read as JSON ({error}); restore it or leave the folder out") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path}: not a record of this project; give a sweep folder of this project")
    return values


def _read_config(path: Path) -> dict[str, Any]:
    import yaml

    if not path.is_file():
        return {}
    try:
        # libyaml's parser: the Python one needs 15 ms per config, a minute for a large study
        tree = yaml.load(path.read_text(encoding="utf-8"), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (OSError, ValueError, yaml.YAMLError) as error:
        first = str(error).splitlines()[0]
        raise ValueError(f"{path}: cannot be read as YAML ({first}); restore it or leave the folder out") from None
    return flat({key: value for key, value in (tree or {}).items() if key not in ("defaults", "hydra")})

"""Read sweep folders and run folders into RunRecords. No other module of the report depends on the
files of a run.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from timm_parallel.config.compose import asks_for_accumulate
from timm_parallel.lab.analysis.runs import RunRecord, parse_overrides
from timm_parallel.lab.analysis.verdict import CODE, Record
from timm_parallel.machine.files import read_json
from timm_parallel.machine.text import as_number
from timm_parallel.record.environment import CODE_DIFF
from timm_parallel.record.result import SEARCH, VERDICT, Job, read_jobs, read_metrics, read_result

# Use the YAML loader of libyaml if it is installed. The loader in Python needs 15 ms per config,
# which is a minute for a large study.
SafeLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def collect(folders: Sequence[Path]) -> list[RunRecord]:
    """Read run folders, and all jobs of sweep folders, into RunRecords. Raises ValueError if a
    folder is neither a run nor a sweep, or if it cannot be read.

    `folders`: each given once; if several, their real paths.
    """
    root = Path(os.path.commonpath(folders))
    runs: dict[str, RunRecord] = {}
    # Read sweeps first. A run that is also given as a folder then counts once, as a job of its
    # sweep.
    for folder in sorted(folders, key=lambda folder: not (folder / "jobs.json").is_file()):
        try:
            for run in _read_folder(folder, root):
                runs.setdefault(os.path.realpath(run.folder), run)
        except ValueError as error:
            raise ValueError(
                f"{error}; restore the file, or leave the folder {folder} out of the report"
            ) from None
    return list(runs.values())


def _read_folder(folder: Path, root: Path) -> list[RunRecord]:
    if (folder / "jobs.json").is_file():
        jobs = read_jobs(folder).jobs
        if not jobs:
            raise ValueError(f"{folder / 'jobs.json'}: lists no jobs, but a sweep has at least one")
        return [
            _read_run(folder / job.folder, root, job, os.path.relpath(folder, root)) for job in jobs
        ]
    if (folder / "result.json").is_file():
        return [_read_run(folder, root, None)]
    raise ValueError(
        f"{folder}: has no jobs.json and no result.json; expected the folder of a sweep, or of a "
        "run that has ended"
    )


def _read_run(folder: Path, root: Path, job: Job | None, sweep: str = "") -> RunRecord:
    """Read one run folder. `job`: entry of the run in jobs.json, or None for a run outside of a
    sweep.
    """
    result = flat(vars(read_result(folder))) if (folder / "result.json").is_file() else {}
    status, reason = (job.status, job.reason or "") if job else ("", "")
    if result and status not in ("waiting", "running"):
        status, reason = result["status"], result["reason"] or reason
    elif not result and status == "done":
        status, reason = "failed", f"{folder.name}: no result.json, although jobs.json says done"
    name = os.path.relpath(folder, root)
    config = _read(folder / "config.yaml", "YAML", lambda text: yaml.load(text, Loader=SafeLoader))
    if asks_for_accumulate(folder):
        # Undo the split of a batch by train.accumulate=auto. Repeats may need different numbers of
        # batches for the same training.
        count = config.get("train.accumulate") or 1
        config["train.accumulate"] = 1
        for values in (config, result):
            for key in ("data.batch_size", "data.batch_size_per_device", "batch_size"):
                if values.get(key) is not None:
                    values[key] *= count
    overrides = tuple(job.overrides) if job else ()
    code = parse_overrides(overrides).get(CODE)
    # Add the version of the code as a setting, because no config of a verdict holds it.
    if config and code:
        config[CODE] = code
    return RunRecord(
        name=folder.name if name == "." else name,
        folder=folder,
        status=status,
        reason=" ".join(str(reason).split()),
        sweep=sweep,
        block=job.block if job else 0,
        position=job.id if job else None,
        configuration=job.configuration if job else None,
        overrides=overrides,
        is_trial=((root / sweep if job else folder.parent) / SEARCH).is_file(),
        seed=job.seed if job else None,
        changes=_hash(folder / CODE_DIFF),
        result=result,
        config={
            key: value
            for key, value in config.items()
            if key.partition(".")[0] not in ("defaults", "hydra")
        },
        environment=_read(folder / "environment.json", "JSON", json.loads),
    )


def read_record(folder: Path) -> Record | None:
    """Read verdict.json of a sweep folder: base, head and number of the verdict. Return None if the
    sweep is no verdict.
    """
    if not (folder / VERDICT).is_file():
        return None
    return Record(**read_json(folder / VERDICT, Record.format, "is this a verdict?"))


def read_curve(folder: Path, metric: str) -> dict[int, float]:
    """Read the values of a metric by step from a run's metrics.jsonl. Return an empty dictionary if
    the metric was not logged.
    """
    path = folder / "metrics.jsonl"
    lines = read_metrics(path) if path.is_file() else ()
    return {
        line["step"]: value for line in lines if (value := as_number(line.get(metric))) is not None
    }


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:6] if path.is_file() else ""


def _read(path: Path, kind: str, parse: Callable[[str], Any]) -> dict[str, Any]:
    """Read a file as a dictionary from dotted key to value. Return an empty dictionary if the file
    does not exist. Raises ValueError if it cannot be parsed.
    """
    try:
        tree = parse(path.read_text(encoding="utf-8")) or {} if path.is_file() else {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        first = str(error).splitlines()[0]
        raise ValueError(f"{path}: the file cannot be read as {kind} ({first})") from None
    if not isinstance(tree, dict):
        raise ValueError(
            f"{path}: expected a {kind} file with keys and values, got {type(tree).__name__}"
        )
    return flat(tree)


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten a nested dictionary: `{"data": {"root": 1}}` becomes `{"data.root": 1}`."""
    values: dict[str, Any] = {}
    for key, value in tree.items():
        values |= (
            flat(value, f"{prefix}{key}.")
            if isinstance(value, dict) and value
            else {f"{prefix}{key}": value}
        )
    return values

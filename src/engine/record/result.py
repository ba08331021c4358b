"""What a run leaves in its folder, written whole or not at all, and read back by everything downstream.

Nothing here imports torch: sweeps, reports and the command line read records in milliseconds.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from src.engine.machine.files import finite, write_json, write_text

FORMAT = 1
STATUSES = ("done", "failed", "out_of_memory", "not_finite", "skipped", "interrupted", "pruned")


@dataclass
class Result:
    """`result.json`: the one interface between a job and whoever asked for it. Times in seconds, memory in bytes."""

    status: str
    reason: str = ""
    format: int = FORMAT
    strategy: str = ""
    accelerator: str = ""
    devices: int = 0  # asked
    threads_per_device: int | None = None
    world_size: int | None = None  # measured by an all-reduce of ones
    processes: int | None = None
    nodes: int = 1
    hosts: list[str] = field(default_factory=list)  # one per node, node 0's first
    backend: str | None = None
    tags: list[str] = field(default_factory=list)  # whatever the user calls this run
    model: str = ""
    parameters: int | None = None
    batch_size: int | None = None  # global
    steps: int = 0
    epochs: float = 0
    samples_seen: int = 0
    dropped_per_epoch: int | None = None  # tail of the shuffled epoch that fills no global batch
    skipped: dict[str, int] = field(default_factory=dict)  # unreadable images by split, with data.on_error=skip
    train: dict[str, Any] = field(default_factory=dict)
    val: dict[str, Any] = field(default_factory=dict)
    test: dict[str, Any] = field(default_factory=dict)
    throughput: dict[str, Any] = field(default_factory=dict)
    memory: list[dict[str, Any]] = field(default_factory=list)
    cpu: dict[str, Any] = field(default_factory=dict)
    data_wait: float | None = None  # share of the timed steps spent waiting for data
    communication: dict[str, Any] = field(default_factory=dict)
    neighbours: int = 0  # other jobs that ran beside it on this machine; then its speed says little
    seconds: dict[str, Any] = field(default_factory=dict)
    objective: float | None = None
    parameters_hash: str | None = None
    checkpoint: str | None = None
    proof: dict[str, Any] = field(default_factory=dict)  # what was counted: indices seen, chunks, optimizers, files
    failure: dict[str, Any] | None = None  # rank, exception, traceback, log of the first rank that failed


def write_result(folder: Path, result: Result) -> None:
    assert result.status in STATUSES, result.status
    write_json(folder / "result.json", dataclasses.asdict(result))


def read_result(folder: Path) -> Result:
    """Read `folder/result.json`.

    Errors: ValueError when the file is missing, is no result, or was written by a newer version of this project.
    """
    path = folder / "result.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{folder}: no result.json here; is this a run folder, and has the run ended?") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read as JSON ({error})") from None
    if not isinstance(values, dict) or "status" not in values:
        raise ValueError(f"{path}: not a result of this project (it has no status)")
    if not isinstance(values.get("format", 0), int):
        raise ValueError(f"{path}: format {values['format']!r} is no number, so this is no result of this project")
    if values.get("format", 0) > FORMAT:
        raise ValueError(f"{path}: format {values['format']} is newer than this code reads ({FORMAT}); update the code")
    if values["status"] not in STATUSES:
        raise ValueError(f"{path}: status {values['status']!r} is not one of {', '.join(STATUSES)}")
    known = {f.name for f in dataclasses.fields(Result)}
    return Result(**{key: value for key, value in values.items() if key in known})


class MetricsLog:
    """`metrics.jsonl`: one line per logging step and per evaluation; only rank 0 has one."""

    def __init__(self, path: Path, resume_step: int | None = None) -> None:
        """With `resume_step`, lines past that step are dropped: the steps are about to be run again."""
        if resume_step is not None and path.exists():
            kept = [line for line in read_metrics(path) if line["step"] <= resume_step]
            write_text(path, "".join(json.dumps(line) + "\n" for line in kept))
        self._file = open(path, "a", encoding="utf-8", buffering=1)  # one write per line, so a crash loses none

    def write(self, step: int, **values: Any) -> None:
        self._file.write(json.dumps(finite({"step": step, **values}), allow_nan=False) + "\n")

    def close(self) -> None:
        self._file.close()


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a metrics.jsonl; a last line cut off by a crash is left out."""
    with open(path, encoding="utf-8") as file:
        for line in file:
            try:
                yield json.loads(line)
            except ValueError:
                return

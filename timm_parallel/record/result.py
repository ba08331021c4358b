"""Results of a run: result.json and metrics.jsonl. Imports no torch, so that sweeps and reports
read them quickly.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from timm_parallel.machine.files import finite, read_json, write_json, write_text
from timm_parallel.machine.text import plural

log = logging.getLogger(__name__)
FORMAT = 1
STATUSES = ("done", "failed", "out_of_memory", "not_finite", "skipped", "interrupted", "pruned")


@dataclass
class Result:
    """`result.json`, the only interface between a job and its caller. docs/outputs.md explains
    every field.
    """

    status: str
    reason: str = ""
    format: int = FORMAT
    strategy: str = ""
    accelerator: str = ""
    devices: int = 0  # requested
    threads_per_device: int | None = None
    world_size: int | None = None  # measured by an all-reduce of ones
    processes: int | None = None
    nodes: int = 1
    hosts: list[str] = field(default_factory=list)  # one per node, node 0's first
    backend: str | None = None
    tags: list[str] = field(default_factory=list)  # of the user
    model: str = ""
    parameters: int | None = None
    # Side of a training image in pixels, or its height and width.
    image_size: int | list[int] | None = None
    batch_size: int | None = None  # global
    accumulate: int | None = None  # batches per optimizer step
    # Floating-point operations of an optimizer step over all devices: forward and backward passes
    # of the model.
    flops_per_step: int | None = None
    steps: int = 0
    epochs: float = 0
    samples_seen: int = 0
    dropped_per_epoch: int | None = None  # tail of the shuffled epoch that fills no optimizer step
    skipped: dict[str, int] = field(
        default_factory=dict
    )  # unreadable images by split, with data.on_error=skip
    # Fingerprints of names and labels: of each split, and under `all` of all images, however they
    # are divided.
    data: dict[str, str] = field(default_factory=dict)
    train: dict[str, Any] = field(default_factory=dict)
    val: dict[str, Any] = field(default_factory=dict)
    test: dict[str, Any] = field(default_factory=dict)
    throughput: dict[str, Any] = field(default_factory=dict)
    memory: list[dict[str, Any]] = field(default_factory=list)
    cpu: dict[str, Any] = field(default_factory=dict)
    data_wait: float | None = None  # share of the window spent waiting for data
    step: dict[str, Any] = field(default_factory=dict)
    ranks: list[dict[str, Any]] = field(default_factory=list)
    communication: dict[str, Any] = field(default_factory=dict)
    energy: dict[str, float | None] = field(default_factory=dict)  # of the GPUs, by NVML
    guard: dict[str, Any] = field(default_factory=dict)
    flags: list[str] = field(default_factory=list)
    neighbours: int = 0  # concurrent jobs on this machine, which make its speed meaningless
    started: str | None = None  # ISO time of the command; for a resumed run, of the first one
    segments: list[dict[str, Any]] = field(default_factory=list)
    commit: str | None = None  # of the code
    profile: list[dict[str, Any]] = field(
        default_factory=list
    )  # one entry per rank, with train.profile_steps
    seconds: dict[str, Any] = field(default_factory=dict)
    objective: float | None = None
    parameters_hash: str | None = None
    checkpoint: str | None = None
    # Equal parameters on all ranks: `parameters_hash_start`, `hashes_equal`. Images per replica:
    # `chunk_sizes`.
    proof: dict[str, Any] = field(default_factory=dict)
    failure: dict[str, Any] | None = (
        None  # rank, exception, traceback, log of the first rank that failed
    )


def write_result(folder: Path, result: Result) -> None:
    assert result.status in STATUSES, result.status
    write_json(folder / "result.json", dataclasses.asdict(result))


def read_result(folder: Path) -> Result:
    """Read `folder/result.json`, written by this version or an older one."""
    path = folder / "result.json"
    values = read_json(path, FORMAT, "is this a run folder, and has the run ended?")
    if values.get("status") not in STATUSES:
        raise ValueError(
            f"{path}: status {values.get('status')!r}, expected one of {', '.join(STATUSES)}; not "
            "of this project"
        )
    known = {f.name for f in dataclasses.fields(Result)}
    return Result(**{key: value for key, value in values.items() if key in known})


def read_status(folder: Path) -> str | None:
    """Return the status in `folder/result.json`; None if the run has not ended or the file cannot
    be read.
    """
    try:
        return read_result(folder).status
    except ValueError:
        return None


def read_segments(folder: Path) -> list[dict[str, Any]]:
    """Return the attempts (start, resumes) that the newest checkpoint of a run folder lists; [] if
    unknown.
    """
    try:
        segments = json.loads((folder / "checkpoints" / "last.json").read_text(encoding="utf-8"))[
            "segments"
        ]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return segments if isinstance(segments, list) else []


class MetricsLog:
    """`metrics.jsonl`: one line per logging step and per evaluation. Only rank 0 writes it."""

    def __init__(self, path: Path, resume_step: int | None = None) -> None:
        """Open the file. Drops lines of steps after `resume_step`, because those steps will run
        again.
        """
        if resume_step is not None and path.exists():
            kept = [line for line in read_metrics(path) if line["step"] <= resume_step]
            write_text(path, "".join(json.dumps(line) + "\n" for line in kept))
        # Line buffering: a crash loses no line.
        self._file = open(path, "a", encoding="utf-8", buffering=1)

    def write(self, step: int, **values: Any) -> None:
        self._file.write(json.dumps(finite({"step": step, **values}), allow_nan=False) + "\n")

    def close(self) -> None:
        self._file.close()


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the parsed lines of a metrics.jsonl file. Skips damaged lines, and logs how many.

    An incomplete last line is no damage: a crash cut it off, or the run is writing it.
    """
    skipped = 0
    with open(path, "rb") as file:
        for text in file:
            line = _parsed(text)
            if line is not None:
                yield line
            elif text.endswith(b"\n"):
                skipped += 1
    if skipped:
        _warn_of_damage(path, skipped)


def _parsed(text: bytes) -> dict[str, Any] | None:
    """Parse a line of metrics.jsonl; None if it is no JSON object with a step."""
    try:
        line = json.loads(text)
    # RecursionError: thousands of opening brackets.
    except (ValueError, RecursionError):
        return None
    return line if isinstance(line, dict) and isinstance(line.get("step"), int) else None


# Cached, because a search reads the same file after every evaluation.
@cache
def _warn_of_damage(path: Path, skipped: int) -> None:
    log.warning("%s: skipped %s, which cannot be read", path, plural(skipped, "damaged line"))

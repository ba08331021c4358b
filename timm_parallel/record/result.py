"""Read and write the results of a run, result.json and metrics.jsonl, and `jobs.json`, which lists
all jobs of a sweep and their status. A killed sweep is resumed from jobs.json.

This module does not import torch, so that sweeps and reports start fast.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import shlex
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from timm_parallel.errors import UnknownFormatError
from timm_parallel.machine.files import finite, read_json, write_json, write_text
from timm_parallel.machine.text import plural

log = logging.getLogger(__name__)
FORMAT = 1
# Format of checkpoints, which is also in the .json file next to each.
CHECKPOINT_FORMAT = 3
# Older formats that can still be read.
READABLE_FORMATS = (2,)
STATUSES = ("done", "failed", "out_of_memory", "not_finite", "skipped", "interrupted", "pruned")


@dataclass
class Result:
    """Contents of `result.json`, the only interface between a job and the sweep that starts it.

    docs/outputs.md explains every field.
    """

    status: str
    reason: str = ""
    format: int = FORMAT
    strategy: str = ""
    accelerator: str = ""
    # Number of devices that the config requested.
    devices: int = 0
    threads_per_device: int | None = None
    # Number of devices that took part in training, measured by an all-reduce of ones.
    world_size: int | None = None
    processes: int | None = None
    nodes: int = 1
    # Host names of the nodes, starting with node 0.
    hosts: list[str] = field(default_factory=list)
    backend: str | None = None
    # Tags that the user gave to the run.
    tags: list[str] = field(default_factory=list)
    model: str = ""
    parameters: int | None = None
    # Size of the training images in pixels: one side of a square, or height and width.
    image_size: int | list[int] | None = None
    # Images per forward pass over all devices.
    batch_size: int | None = None
    # Number of batches per optimizer step.
    accumulate: int | None = None
    # Floating-point operations of the model in an optimizer step over all devices, forward and
    # backward.
    flops_per_step: int | None = None
    steps: int = 0
    epochs: float = 0
    samples_seen: int = 0
    # Images per epoch that are not used, because they do not fill an optimizer step.
    dropped_per_epoch: int | None = None
    # Number of unreadable images per split that data.on_error=skip left out.
    skipped: dict[str, int] = field(default_factory=dict)
    # Fingerprints of image names and labels, one per split. The key `all` holds the fingerprint of
    # all images together, which does not depend on how they are divided into splits.
    data: dict[str, str] = field(default_factory=dict)
    # The properties `lower_is_better` and `is_proportion` of each metric, by its name. Reports read
    # them here, because the code may define the metric differently later.
    metrics: dict[str, dict[str, bool]] = field(default_factory=dict)
    train: dict[str, Any] = field(default_factory=dict)
    val: dict[str, Any] = field(default_factory=dict)
    test: dict[str, Any] = field(default_factory=dict)
    throughput: dict[str, Any] = field(default_factory=dict)
    memory: list[dict[str, Any]] = field(default_factory=list)
    cpu: dict[str, Any] = field(default_factory=dict)
    # Share of the timed seconds, from 0 to 1, in which the device waited for data.
    data_wait: float | None = None
    # Images per second if the rank that waited most for data had not waited.
    images_per_sec_without_wait: float | None = None
    step: dict[str, Any] = field(default_factory=dict)
    ranks: list[dict[str, Any]] = field(default_factory=list)
    communication: dict[str, Any] = field(default_factory=dict)
    # Energy that the GPUs used, read from NVML.
    energy: dict[str, float | None] = field(default_factory=dict)
    guard: dict[str, Any] = field(default_factory=dict)
    flags: list[str] = field(default_factory=list)
    # Number of other jobs that ran on this machine at the same time. They make the speed
    # meaningless.
    neighbours: int = 0
    # Time in ISO format at which the first attempt of the run was started.
    started: str | None = None
    segments: list[dict[str, Any]] = field(default_factory=list)
    # Git commit of the code that ran.
    commit: str | None = None
    # Profiles of training steps, one entry per rank, if train.profile_steps is set.
    profile: list[dict[str, Any]] = field(default_factory=list)
    seconds: dict[str, Any] = field(default_factory=dict)
    # Share of the wall time of all segments, from 0 to 1, in training steps that were kept.
    goodput: float | None = None
    objective: float | None = None
    parameters_hash: str | None = None
    checkpoint: str | None = None
    # The record that all ranks started and ended with equal parameters (`parameters_hash_start`,
    # `hashes_equal`), and the number of images per replica (`chunk_sizes`).
    proof: dict[str, Any] = field(default_factory=dict)
    # Rank, exception, traceback and log of the first rank that failed.
    failure: dict[str, Any] | None = None


def write_result(folder: Path, result: Result) -> None:
    assert result.status in STATUSES, result.status
    write_json(folder / "result.json", dataclasses.asdict(result))


def read_result(folder: Path) -> Result:
    """Read result.json of a run folder, which this version or an older one may have written."""
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
    """Return the status in result.json of a run folder.

    Returns None if the run has not ended or the file is damaged. Raises UnknownFormatError if newer
    code wrote the file, because the caller would otherwise replace it.
    """
    try:
        return read_result(folder).status
    except UnknownFormatError:
        raise
    except ValueError:
        return None


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object. Returns an empty dictionary if the file cannot be read, for example on a
    node that does not see it, or has no object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def check_format(sidecar: Path) -> None:
    """Raise UnknownFormatError if another version of the code wrote the .json file of a checkpoint.
    A missing or damaged file is ignored.
    """
    version = read_object(sidecar).get("format")
    if isinstance(version, int) and version not in (CHECKPOINT_FORMAT, *READABLE_FORMATS):
        raise UnknownFormatError(
            f"{sidecar.with_suffix('.pt')}: the checkpoint has the format {version}, expected "
            f"{CHECKPOINT_FORMAT}; use the code that wrote the file"
        )


def read_segments(folder: Path) -> list[dict[str, Any]]:
    """Read the segments of a run, which are its start and each resume, from its newest checkpoint.

    Returns an empty list if they cannot be read.
    """
    segments = read_object(folder / "checkpoints" / "last.json").get("segments")
    return segments if isinstance(segments, list) else []


class MetricsLog:
    """Writer of `metrics.jsonl`, with one line per logging step and per evaluation. Only rank 0
    writes it.
    """

    def __init__(self, path: Path, resume_step: int | None = None) -> None:
        """Open metrics.jsonl to append lines.

        Lines of steps after `resume_step` are removed first, because the resumed run trains these
        steps again.
        """
        if resume_step is not None and path.exists():
            kept = [line for line in read_metrics(path) if line["step"] <= resume_step]
            write_text(path, "".join(json.dumps(line) + "\n" for line in kept))
        # Write each line at once, so that a crash loses no line.
        self._file = open(path, "a", encoding="utf-8", buffering=1)

    def write(self, step: int, **values: Any) -> None:
        self._file.write(json.dumps(finite({"step": step, **values}), allow_nan=False) + "\n")

    def close(self) -> None:
        self._file.close()


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the parsed lines of a metrics.jsonl file.

    Damaged lines are skipped, and a warning says how many. An incomplete last line does not count
    as damaged: the run may still be writing it, or has crashed.
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
    """Parse one line of metrics.jsonl. Returns None if it is not a JSON object with an integer
    `step`.
    """
    try:
        line = json.loads(text)
    # json.loads raises RecursionError for a damaged line with thousands of opening brackets.
    except (ValueError, RecursionError):
        return None
    return line if isinstance(line, dict) and isinstance(line.get("step"), int) else None


# Warn only once per file, because a search reads the same file after every evaluation.
@cache
def _warn_of_damage(path: Path, skipped: int) -> None:
    log.warning("%s: skipped %s, which cannot be read", path, plural(skipped, "damaged line"))


JOBS_FORMAT = 1
# File that scripts/verdict.py writes into its sweep folder. It says what the sweep compares.
VERDICT = "verdict.json"
# File with the base config of all trials, in the folder of a search.
SEARCH = "search.yaml"
UNFINISHED = ("waiting", "running", "interrupted")
FAILED = ("failed", "out_of_memory", "not_finite")


@dataclass
class Job:
    # Number of the job in the order in which jobs run, from 0.
    id: int
    name: str
    # Path of the run folder, relative to the sweep folder.
    folder: str
    # Settings of the job, without the seed. They are equal for all repeats of a configuration.
    overrides: list[str]
    # Number of the repeat to which the job belongs, from 0.
    block: int = 0
    # The seed of the job is the seed of the first repeat plus the number of its repeat.
    seed: int | None = None
    # Number of the configuration in the folder configs/. None for a trial of a search, whose config
    # is in its run folder.
    configuration: int | None = None
    # The status is waiting, running, or a status of result.json.
    status: str = "waiting"
    reason: str = ""
    # `refused` if a version of the code rejected the config of a verdict, otherwise empty.
    code: str = ""
    started: str | None = None
    ended: str | None = None
    seconds: float | None = None
    # Largest number of other jobs that ran on the same machine at the same time.
    neighbours: int = 0

    def reset(self) -> None:
        """Set the status of a job to waiting, and clear the reason and the times of its earlier
        attempt.
        """
        self.status, self.reason, self.code, self.neighbours = "waiting", "", "", 0
        self.started = self.ended = self.seconds = None


@dataclass
class Jobs:
    folder: Path
    command: str
    jobs: list[Job]
    created: str = field(default_factory=lambda: now())
    # The status of the sweep is running, done or interrupted.
    status: str = "running"
    # Seed of the random order of the jobs in each repeat. None: jobs run in the order as written.
    order_seed: int | None = None

    def write(self) -> None:
        values = {key: getattr(self, key) for key in ("command", "created", "status", "order_seed")}
        jobs = [dataclasses.asdict(job) for job in self.jobs]
        write_json(self.folder / "jobs.json", {"format": JOBS_FORMAT, **values, "jobs": jobs})

    def counts(self) -> str:
        """Format the number of jobs per status, for example `3 done, 1 failed`."""
        return ", ".join(
            f"{count} {status}"
            for status, count in Counter(job.status for job in self.jobs).items()
        )

    @property
    def num_blocks(self) -> int:
        """Return the number of repeats of the sweep."""
        return 1 + max(job.block for job in self.jobs)

    @property
    def have_ended(self) -> bool:
        return not any(job.status in UNFINISHED for job in self.jobs)

    def exit_code(self) -> int:
        """Return the exit code of the sweep: 0 if every job is done or was skipped, else 1."""
        return int(any(job.status in (*UNFINISHED, *FAILED) for job in self.jobs))


def new_jobs(folder: Path) -> Jobs:
    return Jobs(folder, shlex.join([Path(sys.executable).name, *sys.argv]), [])


def read_jobs(folder: Path) -> Jobs:
    """Read jobs.json of a sweep folder. Raises ValueError if the file is missing or damaged."""
    path, quoted = folder / "jobs.json", shlex.quote(str(folder))
    fix = (
        f"; compare ended jobs of a sweep with: python scripts/report.py --out {quoted} $(dirname "
        f"{quoted}/*/result.json)"
    )
    try:
        values = read_json(path, JOBS_FORMAT, "a sweep writes this file when it starts")
    except ValueError as error:
        raise ValueError(f"{error}; expected a sweep folder with its jobs.json{fix}") from None
    known = {entry.name for entry in dataclasses.fields(Job)}
    try:
        jobs = [
            Job(**{key: value for key, value in job.items() if key in known})
            for job in values["jobs"]
        ]
        return Jobs(
            folder,
            values["command"],
            jobs,
            values["created"],
            values["status"],
            values.get("order_seed"),
        )
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: damaged, or not of this project ({error}){fix}") from None


def now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S")

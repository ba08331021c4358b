"""Folders -> typed runs. The only part of the report that knows how sweeps and runs lie on disk."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from src.records import Result, read_metrics, read_result
from src.study.jobs import Job, Jobs, read_jobs


@dataclass(frozen=True, eq=False)  # compared by identity: two runs are never the same run
class Run:
    """One job of a sweep, or one run folder. What was not recorded is None, never 0."""

    name: str  # folder, relative to what all folders of the report have in common
    folder: Path  # a skipped or waiting job's may not exist
    status: str
    reason: str = ""
    repeat: int = 0
    overrides: tuple[str, ...] = ()
    result: Result | None = None
    config: dict[str, Any] = field(default_factory=dict)  # flat: {"data.batch_size": 64}
    environment: dict[str, Any] = field(default_factory=dict)

    @property
    def strategy(self) -> str:
        return (self.result and self.result.strategy) or self._override("parallel", "parallel.strategy")

    @property
    def devices(self) -> int:
        """For ddp the measured world size, which also counts the devices of other nodes."""
        if self.result is None:
            asked = self._override("parallel.devices")
            return int(asked) if asked.isdigit() else 0
        if self.result.strategy == "ddp" and self.result.world_size:
            return self.result.world_size
        return self.result.devices

    @property
    def accelerator(self) -> str:
        return (self.result and self.result.accelerator) or ""

    @property
    def stand_in(self) -> bool:
        """dp over CPU threads: it trains as dp does, but its speed and memory say nothing about GPUs."""
        return self.strategy == "dp" and self.accelerator == "cpu"

    @property
    def doubt(self) -> str:
        """Why this finished run must not be compared; empty when it may be."""
        result = self.result
        if result is None or not result.world_size or not result.devices:
            return ""
        if result.world_size % result.devices:  # a multiple is the same devices on several nodes
            return f"{result.devices} devices asked, world size {result.world_size} measured: not compared"
        return ""

    @property
    def comparable(self) -> bool:
        return self.status == "done" and self.result is not None and not self.doubt

    @property
    def images_per_sec(self) -> float | None:
        return self._number("throughput", "images_per_sec")

    @property
    def step_ms(self) -> float | None:
        return self._number("throughput", "step_ms")

    @property
    def data_wait(self) -> float | None:
        """Share of the timed steps, 0 to 1."""
        return finite(self.result.data_wait) if self.result else None

    @property
    def bytes_per_step(self) -> float | None:
        return self._number("communication", "bytes_per_step")

    @property
    def communication_ms(self) -> float | None:
        return self._number("communication", "ms_per_step")

    @property
    def exposed_ms(self) -> float | None:
        """Communication per step not hidden behind the backward pass."""
        return self._number("communication", "exposed_ms_per_step")

    @property
    def cpu_seconds(self) -> float | None:
        """CPU seconds of all processes per second of wall time."""
        return self._number("cpu", "seconds_per_second")

    @property
    def first_step_seconds(self) -> float | None:
        return self._number("seconds", "start_to_first_step")

    @property
    def accuracy(self) -> float | None:
        return self._number("val", "acc")

    @property
    def memory(self) -> list[dict[str, Any]]:
        """One entry per device, by device."""
        entries = (self.result and self.result.memory) or []
        known = [entry for entry in entries if isinstance(entry, dict) and finite(entry.get("peak_bytes")) is not None]
        return sorted(known, key=lambda entry: str(entry.get("device", "")).zfill(16))

    @property
    def shared_memory(self) -> bool:
        """Devices that are threads of one process: one figure for all of them."""
        return any(entry.get("shared") for entry in self.memory)

    @property
    def peak_bytes(self) -> list[float]:
        """Per device; one figure, of the whole process, where devices are threads."""
        peaks = [float(entry["peak_bytes"]) for entry in self.memory]
        return [max(peaks)] if self.shared_memory else peaks

    @property
    def imbalance(self) -> float | None:
        """Largest peak over the mean of all devices: 1 is even. None where devices cannot be told apart."""
        peaks = self.peak_bytes
        return max(peaks) * len(peaks) / sum(peaks) if sum(peaks) > 0 and not self.shared_memory else None

    @property
    def least_utilisation(self) -> float | None:
        """Of the idlest device, as recorded; None unless every device has it."""
        values = [finite(entry.get("utilisation")) for entry in self.memory]
        known = [value for value in values if value is not None]
        return min(known) if known and len(known) == len(values) else None

    @property
    def needless_threads(self) -> tuple[int, int] | None:
        """(threads asked for, cores) of a CPU run that wants more threads than there are cores."""
        cores = finite((self.environment.get("cpu") or {}).get("cores"))
        threads = self.devices * ((self.result and self.result.threads_per_device) or 1)
        return (threads, int(cores)) if self.accelerator == "cpu" and cores and threads > cores else None

    def proof(self, key: str) -> Any:
        """What the run counted about itself under `key`; None when it did not."""
        return self.result.proof.get(key) if self.result and isinstance(self.result.proof, dict) else None

    def accuracy_curve(self) -> list[tuple[float, float]]:
        """(seconds since the run's start, validation accuracy) of every evaluation."""
        path = self.folder / "metrics.jsonl"
        lines = read_metrics(path) if path.is_file() else iter(())
        pairs = [(finite(line.get("time")), finite(line.get("val/acc"))) for line in lines if isinstance(line, dict)]
        return [(time, accuracy) for time, accuracy in pairs if time is not None and accuracy is not None]

    def _number(self, section: str, key: str) -> float | None:
        values = getattr(self.result, section) if self.result else None
        return finite(values.get(key)) if isinstance(values, dict) else None

    def _override(self, *keys: str) -> str:
        for override in self.overrides:
            key, _, value = override.lstrip("+").partition("=")
            if key in keys:
                return value
        return ""


def finite(value: Any) -> float | None:
    """`value` as a float if it is a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def collect(folders: list[Path]) -> list[Run]:
    """All jobs of sweep folders and of single run folders, in order.

    Errors: ValueError, one line with path and remedy, on a folder that is neither or whose records cannot be read.
    """
    if not folders:
        raise ValueError("no folder given; give a sweep folder, e.g. outputs/sweeps/<date>/<time>")
    unique = list(dict.fromkeys(folder.resolve() for folder in folders))
    root = Path(os.path.commonpath(unique))
    return [run for folder in unique for run in _read_folder(folder, root)]


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
            yield _read_run(folder / job.folder, root, job)
    elif (folder / "result.json").is_file():
        yield _read_run(folder, root, None)
    elif not folder.is_dir():
        raise ValueError(f"{folder}: no such folder; give a sweep folder, e.g. outputs/sweeps/<date>/<time>")
    else:
        raise ValueError(f"{folder}: no jobs.json and no result.json here; give a sweep folder or an ended run's")


def _read_run(folder: Path, root: Path, job: Job | None) -> Run:
    """`job` is None where the folder is a run by itself."""
    try:
        result = read_result(folder) if (folder / "result.json").is_file() else None
    except ValueError as error:
        raise ValueError(f"{error}; or run that job again, or leave the folder out") from None
    environment = folder / "environment.json"
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
        repeat=job.repeat if job else 0,
        overrides=tuple(job.overrides) if job else (),
        result=result,
        config=_read_config(folder / "config.yaml"),
        environment=_read_json(environment) if environment.is_file() else {},
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
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
    return _flat({key: value for key, value in (tree or {}).items() if key not in ("defaults", "hydra")})


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            values.update(_flat(value, f"{prefix}{key}."))
        else:
            values[f"{prefix}{key}"] = value
    return values

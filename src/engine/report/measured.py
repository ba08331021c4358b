"""One run as the report sees it: typed figures from its records, None for what was not recorded."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from src.engine.record.result import Result, read_metrics


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

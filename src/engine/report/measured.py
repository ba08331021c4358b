"""One run as the report sees it: typed figures from its records, None for what was not recorded."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

STEP_PARTS = ("data_ms", "compute_ms", "communication_ms", "other_ms")
# Measure -> where result.json has it. Times are in seconds, or in milliseconds where their name says so.
_TIMED = ("images_per_sec", "step_ms", "step_ms_p95", "steps_timed", "seconds_timed")
_RECORDED = {name: f"throughput.{name}" for name in _TIMED} | {
    "communication_ms": "communication.ms_per_step",
    "exposed_ms": "communication.exposed_ms_per_step",  # not hidden behind the backward pass
    "bytes_per_step": "communication.bytes_per_step",
    "bytes_busiest_link": "communication.bytes_busiest_link",
    "cpu_seconds": "cpu.seconds_per_second",  # of all processes, per second of wall time
    "first_step_seconds": "seconds.start_to_first_step",
    "data_wait": "data_wait",  # share of the timed steps, 0 to 1
}
MEASURES = (*_RECORDED, "imbalance", "busy", "accuracy")


@dataclass(frozen=True, eq=False)  # compared by identity: two runs are never the same run
class RunRecord:
    """One job of a sweep, or one run folder. What was not recorded is None, never 0.

    Its records are flat, `{"data.batch_size": 64}`, and empty where there is no such file.
    """

    name: str  # folder, relative to what all folders of the report have in common
    folder: Path  # a skipped or waiting job's may not exist
    status: str
    reason: str = ""
    sweep: str = ""  # the sweep's folder; empty for a run by itself
    block: int | None = 0  # of the sweep; None: the baseline once more, which belongs to no block
    position: int | None = None  # in run order
    overrides: tuple[str, ...] = ()
    result: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)

    @property
    def strategy(self) -> str:
        return str(self.result.get("strategy") or self._asked("parallel") or self._asked("parallel.strategy"))

    @property
    def devices(self) -> int:
        """For ddp the measured world size, which also counts the devices of other nodes. 0: not known."""
        if not self.result:
            asked = self._asked("parallel.devices")
            return int(asked) if asked.isdigit() else 0
        world = self.integer("world_size")
        return world if self.strategy == "ddp" and world else self.integer("devices") or 0

    @property
    def nodes(self) -> int:
        return self.integer("nodes") or 1

    @property
    def hosts(self) -> tuple[str, ...]:
        """Names of the machines it ran on, the first node's first."""
        return tuple(self.entries(str, "hosts") or filter(None, [str(self.environment.get("host") or "")]))

    @property
    def hardware(self) -> str:
        """What must be equal for two runs to be compared: devices, processor, driver, and the versions of torch and CUDA."""
        has = self.environment.get
        processor = f"{has('cpu.model') or 'unknown processor'}, {has('cpu.cores') or '?'} cores"
        torch = f"torch {has('libraries.torch') or '—'}"
        if self.accelerator != "cuda":
            return f"{'Apple GPU' if self.accelerator == 'mps' else 'CPU'}: {processor}; {torch}"
        # Names only, no count: a run may have been shown only some of the machine's devices.
        names = sorted({str(device.get("name") or "") for device in has("devices") or ()})
        versions = [f"{name} {has(name.lower())}" for name in ("CUDA", "driver") if has(name.lower())]
        return "; ".join([" + ".join(names) or "unknown GPU", processor, torch, *versions])

    @property
    def commit(self) -> str:
        """The code it ran, e.g. `0123abc` or `0123abc with changes`."""
        commit = str(self.result.get("commit") or self.environment.get("commit") or "")[:10]
        return f"{commit} with changes" if commit and self.environment.get("dirty") else commit

    @property
    def accelerator(self) -> str:
        return str(self.result.get("accelerator") or "")

    @property
    def stand_in(self) -> bool:
        """dp over CPU threads: it trains as dp does, but its speed and memory say nothing about GPUs."""
        return self.strategy == "dp" and self.accelerator == "cpu"

    @property
    def doubt(self) -> str:
        """Why this finished run must not be compared; empty when it may be."""
        asked, world, devices = self.result.get("devices"), self.integer("world_size"), self.integer("devices")
        if asked is not None and devices is None:
            return f"devices: {asked!r} is no number: not compared"
        if world and devices and world % devices:  # a multiple is the same devices on several nodes
            return f"{devices} devices asked, world size {world} measured: not compared"
        return ""

    @property
    def comparable(self) -> bool:
        return self.status == "done" and bool(self.result) and not self.doubt

    @property
    def neighbours(self) -> int:
        """Other jobs that ran beside it: then its speed is shown and never compared."""
        return self.integer("neighbours") or 0

    @property
    def flags(self) -> list[str]:
        """Why its figures may be disturbed, one short sentence each."""
        beside = [f"{self.neighbours} other job{'s' * (self.neighbours > 1)} ran beside it"] if self.neighbours else []
        return beside + self.entries(str, "flags")

    @property
    def step_parts(self) -> dict[str, float] | None:
        """Milliseconds of the parts of a mean step of rank 0, which add up to it; None unless all were recorded."""
        known = {name: value for name in STEP_PARTS if (value := self.number(f"step.{name}")) is not None}
        return known if len(known) == len(STEP_PARTS) and sum(known.values()) > 0 else None

    @property
    def profiled_parts(self) -> dict[str, float]:
        """Milliseconds of the parts of rank 0's mean step by name, where `train.profile_steps` split it; else empty."""
        parts = next((entry.get("parts") for entry in self.entries(dict, "profile") if entry.get("rank") == 0), None)
        known = {name: as_number(value) for name, value in parts.items()} if isinstance(parts, dict) else {}
        return {name.removesuffix("_ms"): value for name, value in known.items() if value is not None}

    @property
    def accuracy(self) -> float | None:
        """None unless it was trained to its end: after the few steps of a benchmark it says nothing."""
        return self.number("val.acc") if self.config and self.config.get("train.max_steps") is None else None

    @property
    def memory(self) -> list[dict[str, Any]]:
        """One entry per device, the first rank's first."""
        return [entry for entry in self.entries(dict, "memory") if as_number(entry.get("peak_bytes")) is not None]

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
    def busy(self) -> float | None:
        """Utilisation of the idlest device, 0 to 1, less the share of a step in which it waited for other ranks.

        NCCL waits in a kernel, which NVML counts as use. None unless every device, and under ddp this wait, is known.
        """
        known = [use for entry in self.memory if (use := as_number(entry.get("utilisation"))) is not None]
        if not known or len(known) < len(self.memory):
            return None
        if self.strategy != "ddp":
            return min(known)
        parts = self.step_parts
        return max(0.0, min(known) - parts["communication_ms"] / sum(parts.values())) if parts else None

    @property
    def needless_threads(self) -> tuple[int, int] | None:
        """(threads asked for, cores) of a CPU run that wants more threads on a node than this has cores."""
        cores = as_number(self.environment.get("cpu.cores"))
        threads = self.devices // self.nodes * (self.integer("threads_per_device") or 1)
        return (threads, int(cores)) if self.accelerator == "cpu" and cores and threads > cores else None

    def measure(self, name: str) -> float | None:
        """One of MEASURES."""
        value: float | None = self.number(_RECORDED[name]) if name in _RECORDED else getattr(self, name)
        return value

    @property
    def chunk_sizes(self) -> list[int]:
        """Images that dp gave each device; empty where not recorded."""
        return self.entries(int, "proof.chunk_sizes")

    def integer(self, key: str) -> int | None:
        """A count of result.json, None where it is not one."""
        value = self.result.get(key)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def number(self, key: str) -> float | None:
        """One of result.json, None where it is no finite number."""
        return as_number(self.result.get(key))

    def entries(self, kind: type, key: str) -> list[Any]:
        """Those of this kind in a list of result.json; none where there is no list."""
        found = self.result.get(key)
        return [entry for entry in found if isinstance(entry, kind)] if isinstance(found, list) else []

    def _asked(self, key: str) -> str:
        return dict(word.lstrip("+").partition("=")[::2] for word in self.overrides).get(key, "")


def as_number(value: Any) -> float | None:
    """`value` as a float if it is a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)

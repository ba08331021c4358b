"""RunRecord: the values of result.json, config.yaml and environment.json of one run. A value that
was not recorded is None.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from timm_parallel.machine.text import as_number, plural
from timm_parallel.metric import metric_name
from timm_parallel.record.result import FAILED

STEP_PARTS = ("data_ms", "compute_ms", "communication_ms", "other_ms")
# Name of a measure -> its key in result.json. Times are in seconds, or in milliseconds if the name
# contains _ms.
_TIMED = ("images_per_sec", "step_ms", "step_ms_p95", "steps_timed", "seconds_timed")
_RECORDED = {name: f"throughput.{name}" for name in _TIMED} | {
    "communication_ms": "communication.ms_per_step",
    # Communication time that is not hidden behind the backward pass.
    "exposed_ms": "communication.exposed_ms_per_step",
    "bytes_per_step": "communication.bytes_per_step",
    # Processor seconds of all processes per second of wall time.
    "cpu_seconds": "cpu.seconds_per_second",
    "first_step_seconds": "seconds.start_to_first_step",
    # Joules of all GPUs per image.
    "joules_per_image": "energy.joules_per_image",
    # Share of the timed steps in which the devices wait for data, 0 to 1.
    "data_wait": "data_wait",
}
# The headline metric of a tuning (`sweep.tune`).
IMAGES_PER_SECOND = "images/s"
MEASURES = (*_RECORDED, "imbalance", "busy")


# RunRecords are compared by identity, so two of them are never equal.
@dataclass(frozen=True, eq=False)
class RunRecord:
    """Recorded data of one run, which may be a job of a sweep.

    `result`, `config` and `environment` hold the contents of the files as dotted keys, such as
    `{"data.batch_size": 64}`. A missing file gives an empty dictionary.
    """

    # The run folder, relative to the common parent of all folders of the report.
    name: str
    # The run folder, which may not exist for a skipped or waiting job.
    folder: Path
    status: str
    reason: str = ""
    # Folder of the sweep. Empty for a run outside of a sweep.
    sweep: str = ""
    # Number of the repeat to which the run belongs in its sweep.
    block: int = 0
    # Position of the run in the order in which the jobs of its sweep start.
    position: int | None = None
    # Number of the configuration in the order of the command. None for a trial of a search, and for
    # a run outside of a sweep.
    configuration: int | None = None
    overrides: tuple[str, ...] = ()
    # True if the run is a trial of a hyper-parameter search.
    is_trial: bool = False
    # Seed according to jobs.json. None for a run outside of a sweep.
    seed: int | None = None
    # Hash of code.diff, which holds the uncommitted changes. Empty if the file does not exist.
    changes: str = ""
    result: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)

    @property
    def strategy(self) -> str:
        return str(self.result.get("strategy") or "")

    @property
    def devices(self) -> int:
        """Number of devices, or 0 if it is unknown. If each device has a rank, this is the measured
        world size, which counts the devices of all nodes.
        """
        world = self.integer("world_size") or 0
        return world if world > 1 else self.integer("devices") or 0

    @property
    def nodes(self) -> int:
        return self.integer("nodes") or 1

    @property
    def hosts(self) -> tuple[str, ...]:
        """Host names of the run's nodes. The first is that of node 0."""
        host = self.environment.get("host")
        return tuple(self.entries(str, "hosts")) or ((str(host),) if host else ())

    @property
    def hardware(self) -> str:
        """Devices, processor, driver, torch and CUDA of a run as text. Only the speeds of runs with
        equal texts are compared.
        """
        has = self.environment.get
        processor = f"{has('cpu.model') or 'unknown processor'}, {has('cpu.cores') or '?'} cores"
        torch = f"torch {has('libraries.torch') or '—'}"
        if self.accelerator != "cuda":
            return f"{'Apple GPU' if self.accelerator == 'mps' else 'CPU'}: {processor}; {torch}"
        # Use the names of the devices but not their number, because CUDA_VISIBLE_DEVICES may hide
        # some devices from a run.
        names = sorted({str(device.get("name") or "") for device in has("devices") or ()})
        versions = [
            f"{name} {has(name.lower())}" for name in ("CUDA", "driver") if has(name.lower())
        ]
        return "; ".join([" + ".join(names) or "unknown GPU", processor, torch, *versions])

    @cached_property
    def commit(self) -> str:
        """Commit of the code, such as `0123abc`, or `0123abc with changes 4f2a` if there were
        uncommitted changes. Runs with different changes count as runs of different code.
        """
        commit = str(self.result.get("commit") or self.environment.get("commit") or "")[:10]
        return (
            f"{commit} with changes {self.changes}".rstrip()
            if commit and self.environment.get("dirty")
            else commit
        )

    @property
    def data(self) -> str:
        """Fingerprint of all images and labels. Runs on different data do not count as repeats of
        each other.
        """
        return str(self.result.get("data.all") or "")

    @property
    def accelerator(self) -> str:
        return str(self.result.get("accelerator") or "")

    @property
    def is_simulated(self) -> bool:
        """True for dp over CPU threads. Such a run trains as dp does on GPUs, but its speed and
        memory say nothing about GPUs.
        """
        return self.strategy == "dp" and self.accelerator == "cpu"

    @cached_property
    def doubt(self) -> str:
        """Reason not to compare this finished run with others. Empty if it can be compared."""
        requested, world, devices = (
            self.result.get("devices"),
            self.integer("world_size"),
            self.integer("devices"),
        )
        if requested is not None and devices is None:
            return f"not compared: devices is {requested!r}, expected an integer"
        # The world size counts all nodes and `devices` counts one node, so it must be a multiple.
        if world and devices and world % devices:
            return f"not compared: {devices} devices requested, world size {world} measured"
        # A job is started with the seed in jobs.json, so one of the two files was edited.
        if self.seed is not None and self.config.get("seed", self.seed) != self.seed:
            return (
                f"not compared: jobs.json says seed {self.seed}, config.yaml {self.config['seed']}"
            )
        return ""

    @property
    def comparable(self) -> bool:
        return self.status == "done" and bool(self.result) and not self.doubt

    @property
    def batch(self) -> tuple[str, int | None]:
        """Kind of scaling, and the batch size that it keeps: (strong, global batch) or (weak, batch
        per device).
        """
        per_device = self.config.get("data.batch_size_per_device")
        if per_device is not None:
            return "weak", per_device
        return "strong", self.integer("batch_size") or self.config.get("data.batch_size")

    @property
    def scaling(self) -> str:
        kind, batch = self.batch
        of_what = "batch {} per device" if kind == "weak" else "global batch {}"
        return f"{kind} scaling, {of_what.format('—' if batch is None else batch)}"

    @property
    def neighbours(self) -> int:
        """Number of other jobs that ran on the machine at the same time. If there were any, the
        report does not compare the speed of the run.
        """
        return self.integer("neighbours") or 0

    @property
    def flags(self) -> list[str]:
        """Reasons to distrust the measurements of this run, a short sentence each."""
        others = plural(self.neighbours, "other job")
        crowded = [f"{others} ran at the same time"] if self.neighbours else []
        return [*crowded, *self.entries(str, "flags")]

    @property
    def step_parts(self) -> dict[str, float] | None:
        """Mean milliseconds per step of rank 0 for data, computing, communication and the rest.
        None if one of the values was not recorded.
        """
        parts = {name: self.number(f"step.{name}") for name in STEP_PARTS}
        known = {name: value for name, value in parts.items() if value is not None}
        return known if len(known) == len(STEP_PARTS) and sum(known.values()) > 0 else None

    @cached_property
    def is_of_tuning(self) -> bool:
        """True if the run is a job of a tuning (`sweep.tune`), which compares settings by their
        speed.
        """
        return bool(self.config.get("sweep.tune")) and self.is_benchmark

    @cached_property
    def metric(self) -> str:
        """Name of the headline metric, such as `val/loss`: `optimized_metric` for a trial of a
        search, else `checkpoint.metric`.
        """
        if self.is_of_tuning:
            return IMAGES_PER_SECOND
        metric = str(self.config.get("checkpoint.metric") or "val/loss")
        best = f"{metric.removesuffix('_ema')}_best"
        return str(self.config.get("optimized_metric") or best) if self.is_trial else metric

    @cached_property
    def metric_is(self) -> tuple[bool, bool] | None:
        """Pair (lower_is_better, is_proportion) of the headline metric. None if result.json does
        not state it.
        """
        if self.is_of_tuning:
            return False, False
        of_metric = f"metrics.{metric_name(self.metric)}"
        lower = self.result.get(f"{of_metric}.lower_is_better")
        proportion = self.result.get(f"{of_metric}.is_proportion")
        if isinstance(lower, bool) and isinstance(proportion, bool):
            return lower, proportion
        return None

    @cached_property
    def is_benchmark(self) -> bool:
        """True if the run measures speed in a few steps: it has a value of `train.max_steps`, and
        `sweep.timed` is set or evaluation is off.
        """
        is_timed = self.config.get("sweep.timed") or self.config.get("train.evaluate_every") == 0
        return bool(is_timed) and self.config.get("train.max_steps") is not None

    @cached_property
    def metric_value(self) -> float | None:
        """Value of the headline metric. None for a run that measures speed in a few steps, unless
        the metric is its speed.
        """
        if self.is_of_tuning:
            return None if self.neighbours else self.measure("images_per_sec")
        if not self.config or self.is_benchmark:
            return None
        return self.number(self.metric.replace("/", "."))

    @cached_property
    def is_lost(self) -> bool:
        """True if the run has ended without a usable value of the headline metric, because it
        failed or the value is not finite.
        """
        return self.status in FAILED or self._has_no_finite_value

    @property
    def lost_by_settings(self) -> bool:
        """True if the settings of the run caused its failure: it ran out of memory, or a value was
        not finite.
        """
        return self.status in FAILED[1:] or self._has_no_finite_value

    @property
    def _has_no_finite_value(self) -> bool:
        value = self.result.get(self.metric.replace("/", "."))
        return self.comparable and isinstance(value, float) and not math.isfinite(value)

    @property
    def memory(self) -> list[dict[str, Any]]:
        return [
            entry
            for entry in self.entries(dict, "memory")
            if as_number(entry.get("peak_bytes")) is not None
        ]

    @property
    def shared_memory(self) -> bool:
        """True if the devices are threads of one process, whose memory can only be measured as a
        whole.
        """
        return any(entry.get("shared") for entry in self.memory)

    @property
    def peak_bytes(self) -> list[float]:
        """Peak memory in bytes of each device. If the devices are threads, the list has one value
        for the whole process.
        """
        peaks = [float(entry["peak_bytes"]) for entry in self.memory]
        return [max(peaks)] if self.shared_memory else peaks

    @property
    def imbalance(self) -> float | None:
        """Largest peak memory of a device, divided by the mean over the devices. None if the
        devices are threads of one process.
        """
        peaks = self.peak_bytes
        return (
            max(peaks) * len(peaks) / sum(peaks)
            if sum(peaks) > 0 and not self.shared_memory
            else None
        )

    @property
    def busy(self) -> float | None:
        """Utilization of the least busy device, 0 to 1, without the time in which it waits for
        other ranks. None if it was not recorded.
        """
        known = [
            use for entry in self.memory if (use := as_number(entry.get("utilisation"))) is not None
        ]
        if not known or len(known) < len(self.memory):
            return None
        if self.strategy != "ddp":
            return min(known)
        # Subtract the time for communication, because NVML counts waiting for other ranks as use.
        parts = self.step_parts
        return (
            max(0.0, min(known) - parts["communication_ms"] / sum(parts.values()))
            if parts
            else None
        )

    @property
    def needless_threads(self) -> tuple[int, int] | None:
        """(threads, cores) of a node if a run on CPU has more threads than the node has cores, else
        None.
        """
        cores = as_number(self.environment.get("cpu.cores"))
        threads = self.devices // self.nodes * (self.integer("threads_per_device") or 1)
        return (
            (threads, int(cores))
            if self.accelerator == "cpu" and cores and threads > cores
            else None
        )

    def measure(self, name: str) -> float | None:
        value: float | None = (
            self.number(_RECORDED[name]) if name in _RECORDED else getattr(self, name)
        )
        return value

    def integer(self, key: str) -> int | None:
        value = self.result.get(key)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def number(self, key: str) -> float | None:
        return as_number(self.result.get(key))

    def entries(self, kind: type, key: str) -> list[Any]:
        """Return the entries of a list in result.json that have the type `kind`, such as dict.
        `key`: dotted key of the list. The result is empty if the file has no such list.
        """
        entries = self.result.get(key)
        return (
            [entry for entry in entries if isinstance(entry, kind)]
            if isinstance(entries, list)
            else []
        )


def parse_overrides(overrides: Iterable[str]) -> dict[str, str]:
    """Convert overrides to a dictionary: `optim.lr=0.1` and `+optim.lr=0.1` become `{"optim.lr":
    "0.1"}`.
    """
    return dict(override.lstrip("+~").partition("=")[::2] for override in overrides)

"""Measure processor time of this process and of the machine, and memory, utilization, temperature
and energy of the devices of a run.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil
import torch

from timm_parallel.machine.hardware import Gpu, visible_cuda_devices
from timm_parallel.machine.platform import peak_memory
from timm_parallel.machine.process import scheduled_seconds
from timm_parallel.parallel.group import ProcessGroup


@dataclass
class Usage:
    """Processor seconds of this process and of the machine, summed over all periods from `begin` to
    `end`. A value is 0 if the kernel does not report it.
    """

    wall: float = 0.0
    # Processor seconds of this process and its children, such as loader workers.
    own: float = 0.0
    # Processor seconds of all processes on the machine.
    busy: float = 0.0
    # Processor seconds that a hypervisor gave to other virtual machines.
    stolen: float = 0.0
    # Seconds of all processors, idle or not.
    all: float = 0.0
    # Seconds that the threads of this process spent on a processor.
    ran: float = 0.0
    # Seconds that the threads of this process were ready to run and waited for a processor.
    queued: float = 0.0

    def begin(self) -> None:
        self._at = _now()

    def end(self) -> None:
        now = _now()
        for entry in dataclasses.fields(self):
            passed = getattr(now, entry.name) - getattr(self._at, entry.name)
            setattr(self, entry.name, getattr(self, entry.name) + max(0.0, passed))


class Energy:
    """Energy meter of GPUs, in joules. It measures two values per GPU: the energy since this object
    was built, and the sum over all periods from `begin` to `end`.

    The counter of a GPU includes other programs that use the GPU. An unknown energy is NaN, and so
    is a sum that includes it.
    """

    def __init__(self, gpus: Sequence[Gpu] = ()) -> None:
        self._gpus, self._window = gpus, np.zeros(len(gpus))
        self._at_start = self._at = self._read()

    def begin(self) -> None:
        self._at = self._read()

    def end(self) -> None:
        self._window += self._read() - self._at

    def by_gpu(self) -> dict[str, list[float]]:
        """Return a dictionary from the UUID of each GPU to two energies in joules. The first is the
        sum over all periods from `begin` to `end`. The second is the energy since this object was
        built.
        """
        values = np.stack([self._window, self._read() - self._at_start], axis=1).tolist()
        return {str(gpu.uuid): joules for gpu, joules in zip(self._gpus, values, strict=True)}

    def _read(self) -> Any:
        return np.array([gpu.joules() for gpu in self._gpus], dtype=float)


class Telemetry:
    """Measurements of the GPUs or CPUs of a run. Each rank measures the devices that its process
    drives, and methods gather the values from all ranks.
    """

    def __init__(self, devices: list[torch.device], group: ProcessGroup) -> None:
        self._devices, self._group = devices, group
        self._gpus: list[Gpu] = []
        if devices[0].type == "cuda":
            uuids = {device.index: device.uuid for device in visible_cuda_devices()}
            self._gpus = [Gpu(uuids.get(device.index)) for device in devices]
        self.energy = Energy(self._gpus)

    def sample(self) -> None:
        """Record utilization and temperature of the GPUs that this process drives."""
        for gpu in self._gpus:
            gpu.sample()

    def gpu_states(self) -> list[dict[str, Any]]:
        """Return temperature and throttling of all GPUs of the run, one dictionary per GPU.

        All ranks must call this function.
        """
        states_by_rank = self._group.gather([gpu.state() for gpu in self._gpus])
        return [state for states in states_by_rank for state in states if state]

    def joules(self) -> tuple[float, float]:
        """Return the energy in joules that all GPUs of the run used, as two numbers.

        The first is for the timed window, the second since the start of the run. Both are NaN if
        the energy of a GPU is unknown. All ranks must call this function.
        """
        # Count each GPU once by its UUID, because several ranks may share a GPU.
        by_gpu: dict[str, list[float]] = {}
        for of_rank in self._group.gather(self.energy.by_gpu()):
            by_gpu |= of_rank
        window, total = zip(*by_gpu.values(), strict=True) if by_gpu else ([math.nan], [math.nan])
        return sum(window), sum(total)

    def memory(self) -> list[dict[str, Any]]:
        """Return the peak memory in bytes of every device of the run, one dictionary per device.

        All ranks must call this function.
        """
        # The peak memory of a CPU device is the peak resident memory of its process, including
        # libraries. CPU devices that are threads of one process share this memory.
        by_rank = self._group.gather(self._local_memory())
        entries = [(rank, entry) for rank, entries in enumerate(by_rank) for entry in entries]
        names = [entry["device"] for _, entry in entries]
        for rank, entry in entries:
            # Add the rank to a device name that occurs twice. Ranks with the same device name share
            # a GPU, or run on different nodes.
            if names.count(entry["device"]) > 1:
                entry["device"] += f"_rank_{rank}"
        return [entry for _, entry in entries]

    def _local_memory(self) -> list[dict[str, Any]]:
        kind = self._devices[0].type
        if kind == "cuda":
            return [
                {
                    "device": str(device),
                    "peak_bytes": torch.cuda.max_memory_allocated(device),
                    "utilisation": gpu.utilisation(),
                }
                for device, gpu in zip(self._devices, self._gpus, strict=True)
            ]
        peak = peak_memory()
        if len(self._devices) == 1:
            return [{"device": f"{kind}:{self._group.rank}", "peak_bytes": peak}]
        return [
            {"device": f"{kind}:{i}", "peak_bytes": peak, "shared": True}
            for i in range(len(self._devices))
        ]


def _now() -> Usage:
    machine = psutil.cpu_times()
    idle = machine.idle + getattr(machine, "iowait", 0.0)
    stolen = getattr(machine, "steal", 0.0)
    # Subtract the time of guest systems, which is also contained in user and nice.
    guests = getattr(machine, "guest", 0.0) + getattr(machine, "guest_nice", 0.0)
    total = sum(machine) - guests
    own = 0.0
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        # Skip a process that has ended since the processes were listed.
        with suppress(psutil.Error):
            user, system = process.cpu_times()[:2]
            own += user + system
    ran, queued = scheduled_seconds()
    return Usage(time.perf_counter(), own, total - idle - stolen, stolen, total, ran, queued)

"""Measure memory, utilization, temperature and energy of the devices of a run."""

from __future__ import annotations

import math
from typing import Any

import torch

from timm_parallel.machine.hardware import visible_cuda_devices
from timm_parallel.machine.nvidia import Gpu
from timm_parallel.machine.platform import peak_memory
from timm_parallel.measure.usage import Energy
from timm_parallel.parallel.group import ProcessGroup


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

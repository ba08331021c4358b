"""What this machine has, without importing torch: cores, CUDA devices, library builds."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True)
class CudaDevice:
    index: int  # as NVML counts, before CUDA_VISIBLE_DEVICES
    name: str
    memory_bytes: int
    uuid: str


def cores() -> int:
    """Processor cores this process may use (respects affinity masks, as set by Slurm or taskset)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@cache
def nvml_devices() -> tuple[CudaDevice, ...]:
    """All NVIDIA devices of the machine; empty without a driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        found = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            name, uuid = pynvml.nvmlDeviceGetName(handle), pynvml.nvmlDeviceGetUUID(handle)
            found.append(CudaDevice(index, str(name), int(pynvml.nvmlDeviceGetMemoryInfo(handle).total), str(uuid)))
        return tuple(found)
    except pynvml.NVMLError:
        return ()
    finally:
        pynvml.nvmlShutdown()


def visible_cuda_devices() -> tuple[CudaDevice, ...]:
    """The devices torch will see: NVML's list through CUDA_VISIBLE_DEVICES (numbers or UUID prefixes).

    As in CUDA, the list ends at the first entry that names no device. With a torch built without CUDA there are none.
    """
    if torch_build("cuda") is None:
        return ()
    devices = nvml_devices()
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return devices
    visible: list[CudaDevice] = []
    for entry in (part.strip() for part in wanted.split(",")):
        named = [d for d in devices if entry and (d.uuid.startswith(entry) or str(d.index) == entry)]
        if not named and entry.startswith("MIG-") and devices:  # a slice of some device: counts as one
            named = [devices[0]]
        if len(named) != 1:
            break
        visible.append(named[0])
    return tuple(visible)


def oom_kills() -> int:
    """How often the kernel has killed a process for want of memory since it started; 0 where it does not say."""
    try:
        text = Path("/proc/vmstat").read_text(encoding="utf-8")
    except OSError:
        return 0
    match = re.search(r"^oom_kill (\d+)$", text, re.MULTILINE)
    return int(match.group(1)) if match else 0


def has_mps() -> bool:
    """Apple's GPU: torch's wheels for macOS on arm64 carry it."""
    return platform.system() == "Darwin" and platform.machine() == "arm64"


@cache
def torch_build(key: str) -> str | None:
    """A line of torch/version.py, read as text: importing torch to learn it would take a second."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    match = re.search(rf"^{key}\b[^=]*= '([^']*)'", text, re.MULTILINE)
    return match.group(1) if match else None


class Utilisation:
    """Mean utilisation of CUDA devices, sampled through NVML whenever `sample` is called."""

    def __init__(self, indices: list[int]) -> None:
        """`indices` as torch counts."""
        import pynvml

        pynvml.nvmlInit()
        visible = visible_cuda_devices()
        self._handles = [pynvml.nvmlDeviceGetHandleByIndex(visible[index].index) for index in indices]
        self._read = pynvml.nvmlDeviceGetUtilizationRates
        self._sums, self._count = [0.0] * len(indices), 0

    def sample(self) -> None:
        self._sums = [total + self._read(handle).gpu for total, handle in zip(self._sums, self._handles, strict=True)]
        self._count += 1

    def means(self) -> list[float | None]:
        """Share of the time in 0..1 that each device was busy; None before the first sample."""
        return [total / self._count / 100 if self._count else None for total in self._sums]

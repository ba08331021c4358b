"""NVIDIA's devices: counted by the CUDA driver, as torch counts them; watched through NVML, where it can be asked.

The driver (libcuda) alone knows which devices a program gets: CUDA_VISIBLE_DEVICES with its numbers, UUIDs and slices
(MIG), the order of unlike devices, what a container hands on. NVML lists all that the machine has, in another order, and
may be missing, or refuse some of what it is asked. So each query to it stands for itself, and what is unknown is None.
"""

from __future__ import annotations

import ctypes
import os
import sys
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HIDING = ("", "-1", "none", "NoDevFiles", "void")  # of CUDA_VISIBLE_DEVICES, where somebody wants no device
TEMPERATURE_GPU, CLOCK_SM = 0, 1  # nvml.h
SLOWED_BY = {  # bits of nvmlDeviceGetCurrentClocksThrottleReasons; a power cap is how large models run, so it is not here
    0x8: "hardware slowdown",
    0x20: "heat (by the driver)",
    0x40: "heat (by the hardware)",
    0x80: "power brake",
}


@dataclass(frozen=True)
class CudaDevice:
    index: int  # as torch counts
    name: str
    memory_bytes: int | None
    uuid: str  # as CUDA_VISIBLE_DEVICES takes it: GPU-… or, for a slice, MIG-…


@dataclass(frozen=True)
class Driver:
    """What the CUDA driver gives this process."""

    devices: tuple[CudaDevice, ...] = ()
    problem: str | None = None  # why a machine that shows NVIDIA devices has none that torch can use

    @classmethod
    def ask(cls, torch_cuda: str | None) -> Driver:
        """`torch_cuda`: the CUDA version that torch is built for, None without."""
        if torch_cuda is None:
            return cls(problem=_if_shown("this torch is built without CUDA; install a build for it"))
        try:
            library = _open_driver()
        except OSError:
            return cls(problem=_if_shown("the driver's library libcuda.so.1 cannot be loaded here"))
        version, count = ctypes.c_int(), ctypes.c_int()
        if failure := library.cuInit(0):
            return cls(problem=_if_shown(_driver_error(library, "cuInit", failure)))
        unknown = library.cuDriverGetVersion(ctypes.byref(version))
        if not unknown and version.value // 1000 < int(torch_cuda.partition(".")[0]):
            known = _cuda_version(version.value)
            said = f"the driver knows CUDA {known}, but this torch is built for {torch_cuda}; update the driver"
            return cls(problem=said)
        if failure := library.cuDeviceGetCount(ctypes.byref(count)):
            return cls(problem=_if_shown(_driver_error(library, "cuDeviceGetCount", failure)))
        found = tuple(_device(library, index) for index in range(count.value))
        return cls(found, None if found else _if_shown("the driver gives this process none"))


def _open_driver() -> Any:
    """libcuda, whose functions return 0 or an error number (cuda.h: CUresult)."""
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


def _driver_error(library: Any, query: str, failure: int) -> str:
    text = ctypes.c_char_p()
    library.cuGetErrorString(failure, ctypes.byref(text))
    return f"{query} says {(text.value or b'error').decode()} ({failure})"


def _cuda_version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def _device(library: Any, index: int) -> CudaDevice:
    device, memory = ctypes.c_int(), ctypes.c_size_t()
    name, number = ctypes.create_string_buffer(256), (ctypes.c_ubyte * 16)()
    library.cuDeviceGet(ctypes.byref(device), index)
    unnamed = library.cuDeviceGetName(name, len(name), device)
    unknown = library.cuDeviceTotalMem_v2(ctypes.byref(memory), device)
    anonymous = library.cuDeviceGetUuid_v2(ctypes.byref(number), device)
    called = "unknown" if unnamed else name.value.decode(errors="replace")
    kind = "MIG" if "MIG" in called.split() else "GPU"
    return CudaDevice(
        index=index,
        name=called,
        memory_bytes=None if unknown else memory.value,
        uuid=str(index) if anonymous else f"{kind}-{uuid.UUID(bytes=bytes(number))}",
    )


def _if_shown(reason: str) -> str | None:
    """`reason`, where this machine shows NVIDIA devices that nobody has hidden on purpose."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not devices_shown() or (visible is not None and visible.strip() in HIDING):
        return None
    return reason if visible is None else f"{reason} (CUDA_VISIBLE_DEVICES={visible})"


def devices_shown(root: Path = Path("/")) -> list[str]:
    """Signs of NVIDIA devices that need no library: the kernel module's files, and device files."""
    places = [*(root / "proc/driver/nvidia/gpus").glob("*"), *(root / "dev").glob("nvidia[0-9]*")]
    return sorted(str(place) for place in places)


def listed() -> list[dict[str, Any]]:
    """`name` and `memory` (bytes) of all devices that NVML lists, whoever may use them; None where it does not say."""
    found = []
    for index in range(_ask_nvml("nvmlDeviceGetCount") or 0):
        handle = _ask_nvml("nvmlDeviceGetHandleByIndex", index)
        memory = _ask_nvml("nvmlDeviceGetMemoryInfo", handle)
        name = _ask_nvml("nvmlDeviceGetName", handle)
        found.append({"name": name or "unknown", "memory": None if memory is None else int(memory.total)})
    return found


def driver_cuda() -> str | None:
    """The newest CUDA that the driver runs, `13.0`; None where NVML does not say."""
    number = _ask_nvml("nvmlSystemGetCudaDriverVersion_v2")
    return None if number is None else _cuda_version(number)


def driver_version() -> str | None:
    """The driver's, as people know it (580.65.06); None where NVML does not say."""
    said = _ask_nvml("nvmlSystemGetDriverVersion")
    return None if said is None else str(said)


class Gpu:
    """How busy a device was, how hot and how slow at the most, and why, of the moments at which `sample` was called.

    What NVML does not say is None: slices (MIG) and virtual GPUs have no utilisation.
    """

    def __init__(self, uuid: str | None) -> None:
        """`uuid`: that of CudaDevice, whose order is not NVML's; None for a device without."""
        self._handle = uuid and _ask_nvml("nvmlDeviceGetHandleByUUID", uuid)
        self._busy = self._samples = self._slowed_by = 0
        self._celsius: int | None = None
        self._mhz: int | None = None

    def sample(self) -> None:
        if self._handle is None:
            return
        if (rates := _ask_nvml("nvmlDeviceGetUtilizationRates", self._handle)) is not None:
            self._busy, self._samples = self._busy + rates.gpu, self._samples + 1
        celsius = _ask_nvml("nvmlDeviceGetTemperature", self._handle, TEMPERATURE_GPU)
        mhz = _ask_nvml("nvmlDeviceGetClockInfo", self._handle, CLOCK_SM)
        self._celsius = max(filter(None, (self._celsius, celsius)), default=None)
        self._mhz = min(filter(None, (self._mhz, mhz)), default=None)
        self._slowed_by |= _ask_nvml("nvmlDeviceGetCurrentClocksThrottleReasons", self._handle) or 0

    def utilisation(self) -> float | None:
        """Share of the time in 0..1, on average."""
        return self._busy / self._samples / 100 if self._samples else None

    def state(self) -> dict[str, Any] | None:
        """`celsius` (highest), `sm_mhz` (lowest), `sm_mhz_max`, `slowed_by` (reasons); None if NVML does not know it."""
        if self._handle is None:
            return None
        return {
            "celsius": self._celsius,
            "sm_mhz": self._mhz,
            "sm_mhz_max": _ask_nvml("nvmlDeviceGetMaxClockInfo", self._handle, CLOCK_SM),
            "slowed_by": [reason for bit, reason in SLOWED_BY.items() if self._slowed_by & bit],
        }


def _ask_nvml(question: str, *arguments: Any) -> Any:
    """The answer, or None: without a driver or its library, without permission, or where a device has none."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()  # counts its callers: cheap after the first
        return getattr(pynvml, question)(*arguments)
    except (pynvml.NVMLError, OSError):
        return None

"""Hardware of this machine, queried without importing torch: CPU cores, memory and devices. The
CUDA driver lists the NVIDIA devices that this process can use, in the order of torch.
"""

from __future__ import annotations

import ctypes
import importlib.util
import math
import os
import platform
import re
import uuid
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import psutil

# True after cuInit. The CUDA driver then works in no process that is forked from this one.
has_initialized_driver = False
# Error code of cuInit in a process that was forked after cuInit (cuda.h).
NOT_INITIALIZED = 3
# Values of CUDA_VISIBLE_DEVICES with which a user hides all devices on purpose.
HIDING = (
    "",
    "-1",
    "none",
    "NoDevFiles",
    "void",
)
# Constants of nvml.h.
TEMPERATURE_GPU, CLOCK_SM = 0, 1
# Bits of nvmlDeviceGetCurrentClocksThrottleReasons that mean a slower GPU. The power cap is left
# out, because large models normally reach it.
SLOWED_BY = {
    0x8: "hardware slowdown",
    0x20: "heat (by the driver)",
    0x40: "heat (by the hardware)",
    0x80: "power brake",
}


@dataclass(frozen=True)
class CudaDevice:
    # Number i of the device, which is `cuda:i` in torch.
    index: int
    name: str
    memory_bytes: int | None
    # UUID as in CUDA_VISIBLE_DEVICES: GPU-… or, for a MIG slice, MIG-….
    uuid: str


@dataclass(frozen=True)
class Driver:
    """Devices that the CUDA driver gives this process, or the reason why torch can use none."""

    devices: tuple[CudaDevice, ...] = ()
    # Reason why torch can use no device. None if there is a device, or if the machine has no NVIDIA
    # device at all.
    problem: str | None = None

    @classmethod
    def ask(cls, torch_cuda: str | None) -> Driver:
        """Query the CUDA driver for the devices of this process. `torch_cuda`: the CUDA version
        that torch was built for, None for a build without CUDA.
        """
        if torch_cuda is None:
            return cls(
                problem=_if_shown("this torch is built without CUDA; install a build with CUDA")
            )
        try:
            library = _open_driver()
        except OSError:
            return cls(problem=_if_shown("the driver's library libcuda.so.1 cannot be loaded"))
        version, count = ctypes.c_int(), ctypes.c_int()
        global has_initialized_driver
        has_initialized_driver = True
        if code := library.cuInit(0):
            reason = _driver_error(library, "cuInit", code)
            forked = (
                f"{reason}: this process was forked from one that had initialized CUDA; "
                "start it as a command"
            )
            return cls(problem=forked if code == NOT_INITIALIZED else _if_shown(reason))
        is_unknown = library.cuDriverGetVersion(ctypes.byref(version))
        if not is_unknown and version.value // 1000 < int(torch_cuda.partition(".")[0]):
            supported = _cuda_version(version.value)
            return cls(
                problem=f"the driver supports CUDA {supported}, but torch is built for "
                f"{torch_cuda}; update the driver, or install a torch built for CUDA {supported}"
            )
        if code := library.cuDeviceGetCount(ctypes.byref(count)):
            return cls(problem=_if_shown(_driver_error(library, "cuDeviceGetCount", code)))
        devices = tuple(_device(library, index) for index in range(count.value))
        return cls(
            devices, None if devices else _if_shown("the driver gives this process no device")
        )


def _open_driver() -> Any:
    """Load the CUDA driver library libcuda. Its functions return 0 or an error code (CUresult in
    cuda.h).
    """
    return ctypes.CDLL("libcuda.so.1")


def _driver_error(library: Any, query: str, code: int) -> str:
    text = ctypes.c_char_p()
    library.cuGetErrorString(code, ctypes.byref(text))
    return f"{query} failed: {(text.value or b'error').decode()} ({code})"


def _cuda_version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def _device(library: Any, index: int) -> CudaDevice:
    device, memory = ctypes.c_int(), ctypes.c_size_t()
    name, number = ctypes.create_string_buffer(256), (ctypes.c_ubyte * 16)()
    library.cuDeviceGet(ctypes.byref(device), index)
    no_name = library.cuDeviceGetName(name, len(name), device)
    no_memory = library.cuDeviceTotalMem_v2(ctypes.byref(memory), device)
    no_uuid = library.cuDeviceGetUuid_v2(ctypes.byref(number), device)
    text = "unknown" if no_name else name.value.decode(errors="replace")
    kind = "MIG" if "MIG" in text.split() else "GPU"
    identity = str(index) if no_uuid else f"{kind}-{uuid.UUID(bytes=bytes(number))}"
    return CudaDevice(index, text, None if no_memory else memory.value, identity)


def _if_shown(reason: str) -> str | None:
    """Return `reason`, the message why torch can use no NVIDIA device. Return None if the machine
    has no such device, or if the user hides all devices with CUDA_VISIBLE_DEVICES, because nothing
    is then wrong.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not nvidia_device_files() or (visible is not None and visible.strip() in HIDING):
        return None
    return reason if visible is None else f"{reason} (CUDA_VISIBLE_DEVICES={visible})"


def nvidia_device_files(root: Path = Path("/")) -> list[str]:
    """List the paths of NVIDIA device files in /proc and /dev. The list is empty on a machine
    without NVIDIA device.
    """
    paths = [*(root / "proc/driver/nvidia/gpus").glob("*"), *(root / "dev").glob("nvidia[0-9]*")]
    return sorted(str(path) for path in paths)


def driver_version() -> str | None:
    """Return the version of the NVIDIA driver, e.g. `580.65.06`; None if it is unknown."""
    version = _ask_nvml("nvmlSystemGetDriverVersion")
    return None if version is None else str(version)


class Gpu:
    """Monitor of one GPU through NVML. It keeps the mean utilization, the highest temperature and
    the lowest clock over all calls of `sample`.
    """

    def __init__(self, uuid: str | None) -> None:
        """`uuid`: UUID of the GPU, from CudaDevice. With None, all values are unknown."""
        self.uuid = uuid
        self._handle: Any = uuid and _ask_nvml("nvmlDeviceGetHandleByUUID", uuid)
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
        """Return the mean utilization of the GPU from 0 to 1; None if it is unknown."""
        return self._busy / self._samples / 100 if self._samples else None

    def joules(self) -> float:
        """Return the energy in joules that the GPU has used since the driver was loaded. NaN if it
        is unknown, as for GPUs older than Volta and for MIG slices.
        """
        millijoules = self._handle and _ask_nvml(
            "nvmlDeviceGetTotalEnergyConsumption", self._handle
        )
        return math.nan if millijoules is None else millijoules / 1000

    def state(self) -> dict[str, Any] | None:
        """Return a dictionary: `celsius` (highest temperature), `sm_mhz` (lowest clock),
        `sm_mhz_max` and `slowed_by` (reasons for a lower clock). Return None without NVML.
        """
        if self._handle is None:
            return None
        return {
            "celsius": self._celsius,
            "sm_mhz": self._mhz,
            "sm_mhz_max": _ask_nvml("nvmlDeviceGetMaxClockInfo", self._handle, CLOCK_SM),
            "slowed_by": [reason for bit, reason in SLOWED_BY.items() if self._slowed_by & bit],
        }


def _ask_nvml(question: str, *arguments: Any) -> Any:
    """Call a function of NVML by its name and return the result. Return None if NVML, the
    permission or the value is missing.
    """
    try:
        import pynvml
    except ImportError:
        return None
    try:
        # Initialize NVML before each query, because repeated initialization is cheap.
        pynvml.nvmlInit()
        return getattr(pynvml, question)(*arguments)
    except (pynvml.NVMLError, OSError):
        return None


CGROUP = Path("/sys/fs/cgroup")


def core_numbers() -> list[int]:
    """Return the numbers of the CPU cores on which this process may run (its affinity mask)."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def cores() -> int:
    """Return the number of CPU cores on which this process may run (its affinity mask)."""
    return len(core_numbers())


@cache
def cpu_model() -> str:
    return (
        _search(Path("/proc/cpuinfo"), r"^model name\s*: (.+)$")
        or platform.processor()
        or platform.machine()
    )


def available_memory() -> int:
    """Return the bytes of memory that are available without swapping. The limits of this process's
    cgroup (version 2) are included.
    """
    available = [int(psutil.virtual_memory().available)]
    cgroup = CGROUP / (_search(Path("/proc/self/cgroup"), r"^0::/(.*)$") or "")
    for folder in (cgroup, *cgroup.parents):
        # A missing file, or the text `max`, means that the cgroup has no limit.
        with suppress(OSError, ValueError):
            limit, used = (
                int((folder / f"memory.{name}").read_text()) for name in ("max", "current")
            )
            # Count cached files as available, because the kernel frees them first.
            files = _search(folder / "memory.stat", r"^inactive_file (\d+)$")
            available.append(max(0, limit - used + int(files or 0)))
    return min(available)


@cache
def cuda() -> Driver:
    """Return the devices that the CUDA driver gives this process. The driver is queried once per
    process, because torch does so too.
    """
    return Driver.ask(torch_cuda())


def visible_cuda_devices() -> tuple[CudaDevice, ...]:
    """Return the CUDA devices of this process in torch's order: item i is `cuda:i`."""
    return cuda().devices


def oom_kills() -> int:
    """Read the number of processes that the kernel has killed for lack of memory since boot; 0 if
    the number is unknown.
    """
    return int(_search(Path("/proc/vmstat"), r"^oom_kill (\d+)$") or 0)


def has_mps() -> bool:
    """Return True if torch can use an Apple GPU (MPS), which is the case on macOS on arm64."""
    return platform.system() == "Darwin" and platform.machine() == "arm64"


@cache
def torch_cuda() -> str | None:
    """Return the CUDA version that torch was built for; None for a build without CUDA."""
    return _search_torch("version.py", r"^cuda\b[^=]*= '([^']*)'")


@cache
def other_gpus() -> str | None:
    """Return the type of GPUs that torch was built for if they are not NVIDIA's, e.g. `ROCm 6.4` or
    `XPU 20250301`; None otherwise.
    """
    for name, variable in (("ROCm", "hip"), ("XPU", "xpu")):
        if version := _search_torch("version.py", rf"^{variable}\b[^=]*= '([^']*)'"):
            return f"{name} {version}"
    return None


def _search_torch(file: str, pattern: str) -> str | None:
    """Search a file of the torch package with a regular expression, without importing torch. Return
    group 1 of the first match; None without a match.
    """
    spec = importlib.util.find_spec("torch")
    return _search(Path(spec.origin).parent / file, pattern) if spec and spec.origin else None


def _search(path: Path, pattern: str) -> str | None:
    """Search a file with a regular expression. Return group 1 of the first match; None if there is
    no match or no file.
    """
    try:
        match = re.search(pattern, path.read_text(encoding="utf-8", errors="replace"), re.MULTILINE)
    except OSError:
        return None
    return match.group(1) if match else None

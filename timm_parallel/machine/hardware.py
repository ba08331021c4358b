"""Hardware of this machine, queried without importing torch: CPU cores, memory, CUDA devices, and
the features that torch was built with.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
from contextlib import suppress
from functools import cache
from pathlib import Path

import psutil

from timm_parallel.machine.nvidia import CudaDevice, Driver

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

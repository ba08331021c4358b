"""Hardware of this machine, without importing torch: cores, memory, CUDA devices,
library builds.
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
    """Return the numbers of the CPU cores that the affinity mask of this process allows."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def cores() -> int:
    """Return the number of CPU cores that the affinity mask of this process allows."""
    return len(core_numbers())


@cache
def cpu_model() -> str:
    return (
        _search(Path("/proc/cpuinfo"), r"^model name\s*: (.+)$")
        or platform.processor()
        or platform.machine()
    )


def available_memory() -> int:
    """Return the bytes of memory available without swapping, within this process's cgroup limits
    (version 2).
    """
    available = [int(psutil.virtual_memory().available)]
    cgroup = CGROUP / (_search(Path("/proc/self/cgroup"), r"^0::/(.*)$") or "")
    for folder in (cgroup, *cgroup.parents):
        with suppress(OSError, ValueError):  # the file is missing, or its text is `max`: no limit
            limit, used = (
                int((folder / f"memory.{name}").read_text()) for name in ("max", "current")
            )
            # The kernel frees cached files first.
            files = _search(folder / "memory.stat", r"^inactive_file (\d+)$")
            available.append(max(0, limit - used + int(files or 0)))
    return min(available)


@cache
def cuda() -> Driver:
    """Return the devices that the CUDA driver gives this process, queried once per process, as
    torch does.
    """
    return Driver.ask(torch_cuda())


def visible_cuda_devices() -> tuple[CudaDevice, ...]:
    """Return the CUDA devices in torch's order: item i is `cuda:i`."""
    return cuda().devices


def oom_kills() -> int:
    """Return the number of processes that the kernel has killed for lack of memory; 0 if the number
    is unknown.
    """
    return int(_search(Path("/proc/vmstat"), r"^oom_kill (\d+)$") or 0)


@cache
def has_mpi() -> bool:
    """Return True if the headers of torch say that it is built with MPI. The wheels on PyPI are
    built without MPI.
    """
    return _search_torch("include/caffe2/core/macros.h", r'{"USE_MPI", "(OFF)"}') is None


def has_mps() -> bool:
    """Return True if torch can use Apple's GPU (MPS): on macOS on arm64."""
    return platform.system() == "Darwin" and platform.machine() == "arm64"


@cache
def torch_cuda() -> str | None:
    """Return the CUDA version that torch is built for; None for a build without CUDA."""
    return _search_torch("version.py", r"^cuda\b[^=]*= '([^']*)'")


@cache
def other_gpus() -> str | None:
    """Return the kind of GPUs that torch is built for if they are not NVIDIA's: `ROCm 6.4` or `XPU
    20250301`; None if they are.
    """
    for name, variable in (("ROCm", "hip"), ("XPU", "xpu")):
        if version := _search_torch("version.py", rf"^{variable}\b[^=]*= '([^']*)'"):
            return f"{name} {version}"
    return None


@cache
def ddp_has(option: str) -> bool:
    """Return True if torch's DistributedDataParallel has this option, read from its source."""
    return _search_torch("nn/parallel/distributed.py", rf"^ +({option})=") is not None


def _search_torch(file: str, pattern: str) -> str | None:
    """Return group 1 of the first match of `pattern` in a file of the torch package, without
    importing torch.
    """
    spec = importlib.util.find_spec("torch")
    return _search(Path(spec.origin).parent / file, pattern) if spec and spec.origin else None


def _search(path: Path, pattern: str) -> str | None:
    """Return group 1 of the match of `pattern` in a file;
    None if the file or the match is missing.
    """
    try:
        match = re.search(pattern, path.read_text(encoding="utf-8", errors="replace"), re.MULTILINE)
    except OSError:
        return None
    return match.group(1) if match else None

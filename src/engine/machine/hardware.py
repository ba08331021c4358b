"""Hardware of this machine, without importing torch: cores, memory, CUDA devices, library builds."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
from contextlib import suppress
from functools import cache
from pathlib import Path

import psutil

from src.engine.machine.nvidia import CudaDevice, Driver

CGROUP = Path("/sys/fs/cgroup")


def cores() -> int:
    """Return the number of cores that the affinity mask of this process allows."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@cache
def cpu_model() -> str:
    return _search(Path("/proc/cpuinfo"), r"^model name\s*: (.+)$") or platform.processor() or platform.machine()


def available_memory() -> int:
    """Return the bytes of memory available without swapping, within this process's cgroup limits (version 2)."""
    available = [int(psutil.virtual_memory().available)]
    cgroup = CGROUP / (_search(Path("/proc/self/cgroup"), r"^0::/(.*)$") or "")
    for folder in (cgroup, *cgroup.parents):
        with suppress(OSError, ValueError):  # the file is missing, or its text is `max`: no limit
            limit, used = (int((folder / f"memory.{name}").read_text()) for name in ("max", "current"))
            # The kernel frees cached files first.
            files = _search(folder / "memory.stat", r"^inactive_file (\d+)$")
            available.append(max(0, limit - used + int(files or 0)))
    return min(available)


@cache
def cuda() -> Driver:
    """Return what the CUDA driver reports about the devices. Queried once per process, as in torch."""
    return Driver.ask(torch_cuda())


def visible_cuda_devices() -> tuple[CudaDevice, ...]:
    """Return the CUDA devices in torch's order: item i is `cuda:i`."""
    return cuda().devices


def oom_kills() -> int:
    """Return the number of processes that the kernel has killed for lack of memory; 0 if the number is unknown."""
    return int(_search(Path("/proc/vmstat"), r"^oom_kill (\d+)$") or 0)


@cache
def has_mpi() -> bool:
    """Return True if torch is built with MPI, according to its headers. The wheels on PyPI are built without MPI."""
    return _search_torch("include/caffe2/core/macros.h", r'{"USE_MPI", "(OFF)"}') is None


def has_mps() -> bool:
    """Return True if torch can use Apple's GPU (MPS): true for the wheels for macOS on arm64."""
    return platform.system() == "Darwin" and platform.machine() == "arm64"


@cache
def torch_cuda() -> str | None:
    """Return the CUDA version that torch is built for; None for a build without CUDA."""
    return _search_torch("version.py", r"^cuda\b[^=]*= '([^']*)'")


def _search_torch(file: str, pattern: str) -> str | None:
    """Return the first match of `pattern` in a file of torch. Importing torch instead would take a second."""
    spec = importlib.util.find_spec("torch")
    return _search(Path(spec.origin).parent / file, pattern) if spec and spec.origin else None


def _search(path: Path, pattern: str) -> str | None:
    """Return group 1 of the match of `pattern` in a file; None if the file or the match is missing."""
    try:
        match = re.search(pattern, path.read_text(encoding="utf-8", errors="replace"), re.MULTILINE)
    except OSError:
        return None
    return match.group(1) if match else None

"""What this machine has, without importing torch: cores, memory, CUDA devices, library builds. More on NVIDIA's in nvidia.py."""

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
    """Processor cores this process may use (respects affinity masks, as set by Slurm or taskset)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@cache
def cpu_model() -> str:
    return _said(Path("/proc/cpuinfo"), r"^model name\s*: (.+)$") or platform.processor() or platform.machine()


def available_memory() -> int:
    """Bytes that can be taken without swapping: what /proc/meminfo says, or less where a container or job has a limit.

    Such limits are those of this process's cgroup and of those above it (version 2). Cached files count as free: the
    kernel drops them first.
    """
    left = [int(psutil.virtual_memory().available)]
    own = CGROUP / (_said(Path("/proc/self/cgroup"), r"^0::/(.*)$") or "")
    for folder in (own, *own.parents):
        with suppress(OSError, ValueError):  # `max`, or no such file: no limit here
            limit, used = (int((folder / f"memory.{name}").read_text()) for name in ("max", "current"))
            files = _said(folder / "memory.stat", r"^inactive_file (\d+)$")
            left.append(max(0, limit - used + int(files or 0)))
    return min(left)


@cache
def cuda() -> Driver:
    """What the CUDA driver says; asked once, as torch asks it once."""
    return Driver.ask(torch_cuda())


def visible_cuda_devices() -> tuple[CudaDevice, ...]:
    """The devices that torch will see, counted and numbered by the driver as it does for torch."""
    return cuda().devices


def oom_kills() -> int:
    """How often the kernel has killed a process for want of memory since it started; 0 where it does not say."""
    return int(_said(Path("/proc/vmstat"), r"^oom_kill (\d+)$") or 0)


@cache
def has_mpi() -> bool:
    """True if torch was built with MPI, as its wheels are not; read from its headers, and assumed where they are missing."""
    return _torch_says("include/caffe2/core/macros.h", r'{"USE_MPI", "(OFF)"}') is None


def has_mps() -> bool:
    """Apple's GPU: torch's wheels for macOS on arm64 carry it."""
    return platform.system() == "Darwin" and platform.machine() == "arm64"


@cache
def torch_cuda() -> str | None:
    """The version of CUDA that torch is built for; None without."""
    return _torch_says("version.py", r"^cuda\b[^=]*= '([^']*)'")


def _torch_says(file: str, pattern: str) -> str | None:
    """As `_said`, of a file of torch's: importing torch to learn it would take a second."""
    spec = importlib.util.find_spec("torch")
    return _said(Path(spec.origin).parent / file, pattern) if spec and spec.origin else None


def _said(path: Path, pattern: str) -> str | None:
    """The group of `pattern` in a file; None where there is no such file, or no such line in it."""
    try:
        match = re.search(pattern, path.read_text(encoding="utf-8", errors="replace"), re.MULTILINE)
    except OSError:
        return None
    return match.group(1) if match else None

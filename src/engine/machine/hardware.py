"""What this machine has, without importing torch: cores, CUDA devices, library builds. More on NVIDIA's in nvidia.py."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
from functools import cache
from pathlib import Path

from src.engine.machine.nvidia import CudaDevice, Driver


def cores() -> int:
    """Processor cores this process may use (respects affinity masks, as set by Slurm or taskset)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@cache
def cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


@cache
def cuda() -> Driver:
    """What the CUDA driver says; asked once, as torch asks it once."""
    return Driver.ask(torch_build("cuda"))


def visible_cuda_devices() -> tuple[CudaDevice, ...]:
    """The devices that torch will see, counted and numbered by the driver as it does for torch."""
    return cuda().devices


def oom_kills() -> int:
    """How often the kernel has killed a process for want of memory since it started; 0 where it does not say."""
    try:
        text = Path("/proc/vmstat").read_text(encoding="utf-8")
    except OSError:
        return 0
    match = re.search(r"^oom_kill (\d+)$", text, re.MULTILINE)
    return int(match.group(1)) if match else 0


@cache
def has_mpi() -> bool:
    """True if torch was built with MPI, as its wheels are not; read from its headers, and assumed where they are missing."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    try:
        said = (Path(spec.origin).parent / "include/caffe2/core/macros.h").read_text(encoding="utf-8")
    except OSError:
        return True
    return '{"USE_MPI", "OFF"}' not in said


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

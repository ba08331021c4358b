"""`environment.json`: where and with what a run ran. No torch: versions and devices are read from metadata and NVML."""

from __future__ import annotations

import dataclasses
import platform
import shlex
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from src.engine.machine import hardware, nvidia
from src.schema import Config

LIBRARIES = ("torch", "torchvision", "timm", "hydra-core", "omegaconf", "numpy", "tensorboard")
ROOT = Path(__file__).resolve().parents[3]


def environment_facts(config: Config) -> dict[str, Any]:
    """`config` is resolved. Values of environment variables are not recorded: they may be secrets."""
    git = ("git", "-C", str(ROOT))
    devices, changes = hardware.visible_cuda_devices(), _output(*git, "status", "--porcelain")
    return {
        "format": 1,
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": shlex.join([Path(sys.executable).name, *sys.argv]),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "host": platform.node(),
        "commit": _output(*git, "rev-parse", "HEAD"),
        "dirty": None if changes is None else changes != "",
        "libraries": {name: version_of(name) for name in LIBRARIES},
        "cpu": {
            "model": hardware.cpu_model(),
            "cores": hardware.cores(),
            "memory_bytes": psutil.virtual_memory().total,
        },
        "devices": [dataclasses.asdict(device) for device in devices],
        "driver": nvidia.driver_version(),
        "cuda": hardware.torch_cuda(),
        "nccl": version_of("nvidia-nccl-cu13") or version_of("nvidia-nccl-cu12"),
        "backend": config.parallel.backend if config.parallel.has_ranks else None,
        "backend_reason": f"{config.parallel.backend} for {config.parallel.accelerator}",
        "topology": topology() if devices else None,
    }


def version_of(name: str) -> str | None:
    """Of an installed package."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _output(*command: str) -> str | None:
    """What a command prints; None where it is missing, fails, or takes too long."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def topology() -> str | None:
    """How the devices are connected (NVLink, PCIe), as the driver's tool prints it."""
    return _output("nvidia-smi", "topo", "-m")

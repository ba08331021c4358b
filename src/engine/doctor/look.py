"""What this machine has and can do, looked at and tried; examine.py says what it means."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from src.engine.config.compose import ROOT
from src.engine.launch.supervisor import with_project_on_path
from src.engine.machine import hardware, nvidia
from src.engine.machine.platform import open_file_limit
from src.engine.machine.process import SAFE_PATH
from src.engine.record import environment

TRY = ("debug=fast", "model=tiny", "data=synthetic", "data.batch_size=32", "print_config=false")
PROBE_SECONDS, TRY_SECONDS = 120.0, 180.0


@dataclass
class Facts:
    """As they stand in `--json`. Bytes and seconds."""

    python: str = platform.python_version()
    system: str = platform.platform()
    in_container: bool = False
    libraries: dict[str, tuple[str | None, str]] = field(default_factory=dict)  # name -> (here, pinned)
    devices: list[dict[str, Any]] = field(default_factory=list)  # as NVML lists them
    visible: int = 0  # of them, after CUDA_VISIBLE_DEVICES
    driver: str | None = None
    driver_cuda: str | None = None  # the newest CUDA that the driver runs
    topology: str | None = None
    torch: dict[str, Any] = field(default_factory=dict)  # what torch says, or {"error": …}
    timm: dict[str, Any] = field(default_factory=dict)
    cores: int = 1
    memory: int = 0  # that can still be taken
    shm: int | None = None  # free in /dev/shm; None where there is none
    open_files: int | None = None
    outputs: str = "outputs"
    disk: int = 0  # free where runs go
    can_write: bool = True
    compiler: bool = True  # for model.compile
    rendezvous: dict[str, Any] = field(default_factory=dict)
    tries: dict[str, dict[str, Any]] = field(default_factory=dict)  # strategy -> {"seconds"} or {"error"}


def look() -> Facts:
    """Everything that needs no training."""
    devices = nvidia.listed()
    place = ROOT / "outputs" if (ROOT / "outputs").exists() else ROOT
    return Facts(
        in_container=any(Path(mark).exists() for mark in ("/.dockerenv", "/run/.containerenv")),
        libraries={name: (environment.version_of(name), version) for name, version in pins().items()},
        devices=devices,
        visible=len(hardware.visible_cuda_devices()),
        driver=nvidia.driver_version(),
        driver_cuda=nvidia.driver_cuda(),
        topology=environment.topology() if devices else None,
        torch=probe("torch"),
        timm=probe("timm"),
        cores=hardware.cores(),
        memory=hardware.available_memory(),
        shm=shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else None,
        open_files=open_file_limit(),
        outputs=str(place),
        disk=shutil.disk_usage(place).free,
        can_write=os.access(place, os.W_OK),
        compiler=any(shutil.which(name) for name in ("g++", "clang++", "c++", "cl")),
        rendezvous=probe("rendezvous"),
    )


def pins() -> dict[str, str]:
    """name -> version of requirements.txt."""
    text = (ROOT / "requirements.txt").read_text(encoding="utf-8")
    return dict(re.findall(r"^([\w.-]+)==(\S+)$", text, re.MULTILINE))


def probe(what: str) -> dict[str, Any]:
    """What src/engine/doctor/probe.py answers, or {"error": its last line}."""
    command = [sys.executable, *SAFE_PATH, "-m", "src.engine.doctor.probe", what]
    return _last_line(command, PROBE_SECONDS, as_json=True)


def try_strategy(strategy: str, devices: int) -> dict[str, Any]:
    """Two steps of a tiny model and an evaluation, by the command that anybody would type."""
    with tempfile.TemporaryDirectory(prefix="doctor_") as folder:
        words = [f"parallel={strategy}", f"parallel.devices={devices}", f"hydra.run.dir={folder}/run", *TRY]
        began = time.monotonic()
        found = _last_line([sys.executable, str(ROOT / "train.py"), *words], TRY_SECONDS, as_json=False)
        return found if "error" in found else {"devices": devices, "seconds": round(time.monotonic() - began, 1)}


def _last_line(command: list[str], seconds: float, as_json: bool) -> dict[str, Any]:
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=with_project_on_path(os.environ), capture_output=True, text=True, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {seconds:.0f} s"}
    lines = [line for line in (done.stdout if done.returncode == 0 else done.stderr).splitlines() if line.strip()]
    if done.returncode != 0:
        said = next((line for line in lines if line.startswith("Failed: ")), lines[-1] if lines else "")
        return {"error": said.strip() or f"exit code {done.returncode}"}
    return dict(json.loads(lines[-1])) if as_json else {}

"""Collect the machine, versions and command of a run for `environment.json`, and uncommitted
changes for `code.diff`. The values come from package metadata and the driver, without importing
torch.
"""

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

from timm_parallel.app import code_hashes, root
from timm_parallel.keys import Config
from timm_parallel.machine import hardware
from timm_parallel.machine.files import write_text
from timm_parallel.machine.secrets import mask_code
from timm_parallel.record.result import read_object

# Files that an attempt of a run writes until its end. Slurm writes logs/slurm.log before the next
# attempt starts, so that file is not among them.
WRITTEN = ("metrics.jsonl", "result.json", "logs/rank_*.log", "checkpoints/last.json")
LIBRARIES = ("torch", "torchvision", "timm", "hydra-core", "omegaconf", "numpy", "tensorboard")


def environment_facts(config: Config) -> dict[str, Any]:
    """Build the contents of environment.json: commit, versions, devices and command.

    Environment variables are left out, because they may hold secrets.
    """
    git = ("git", "-C", str(root()))
    devices, changes = hardware.visible_cuda_devices(), output_of(*git, "status", "--porcelain")
    return {
        "format": 1,
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": shlex.join([Path(sys.executable).name, *sys.argv]),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "host": platform.node(),
        "commit": output_of(*git, "rev-parse", "HEAD"),
        "dirty": None if changes is None else changes != "",
        "code": code_hashes(),
        "libraries": {name: version_of(name) for name in LIBRARIES},
        "cpu": {
            "model": hardware.cpu_model(),
            "cores": hardware.cores(),
            "memory_bytes": psutil.virtual_memory().total,
        },
        "devices": [dataclasses.asdict(device) for device in devices],
        "driver": hardware.driver_version(),
        "cuda": hardware.torch_cuda(),
        "nccl": version_of("nvidia-nccl-cu13") or version_of("nvidia-nccl-cu12"),
        "backend": config.parallel.backend if config.parallel.has_ranks else None,
        "backend_reason": f"{config.parallel.backend} for {config.parallel.accelerator}",
        # Links between the GPUs, such as NVLink or PCIe.
        "topology": output_of("nvidia-smi", "topo", "-m") if devices else None,
    }


def read_environment(folder: Path) -> dict[str, Any]:
    """Read environment.json of a run folder. Returns an empty dictionary if it cannot be read."""
    return read_object(folder / "environment.json")


def run_seconds(folder: Path, until: float | None = None) -> float:
    """Return the wall seconds of all attempts of a run, without the time between them.

    `until`: end of the newest attempt, on the clock of time.time(); None: the time at which it last
    wrote a file. Returns 0 for a folder without environment.json.
    """
    path = folder / "environment.json"
    if not path.exists():
        return 0.0
    began = path.stat().st_mtime
    files = [file for pattern in WRITTEN for file in folder.glob(pattern)]
    end = until or max((file.stat().st_mtime for file in files), default=began)
    return float(read_environment(folder).get("seconds_before", 0)) + max(0.0, end - began)


def version_of(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def output_of(*command: str) -> str | None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=5, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


CODE_DIFF = "code.diff"
# Limits of code.diff: bytes to keep, and seconds that git may take. The diff of a changed notebook
# or data file can have any size.
LARGEST, SECONDS = 1_000_000, 5
# If a diff is incomplete, its last line starts with this text.
CUT = "cut: "
# These options override the git settings of the user, which may add colors or run other programs.
# `git apply` needs the prefixes a/ and b/.
DIFF = (
    "diff",
    "HEAD",
    "--no-color",
    "--no-ext-diff",
    "--no-textconv",
    "--src-prefix=a/",
    "--dst-prefix=b/",
)
UNTRACKED = ("ls-files", "--others", "--exclude-standard", "--directory")


def write_code_diff(folder: Path, dirty: bool | None) -> None:
    """Write `code.diff` into a run folder if the code has uncommitted changes, else delete an older
    one.

    Secrets are masked. A diff of more than LARGEST bytes is cut, and its last line says so.
    `dirty`: whether there are uncommitted changes.
    """
    path = folder / CODE_DIFF
    path.unlink(missing_ok=True)
    if dirty:
        # Put the names of untracked files first, because `git apply` ignores lines before the first
        # diff.
        names = output_of("git", "-C", str(root()), *UNTRACKED) or ""
        untracked = "".join(f"untracked: {name}\n" for name in names.splitlines())
        write_text(path, mask_code(untracked + _diff()))


def _diff() -> str:
    """Return the output of `git diff HEAD`, cut to LARGEST bytes and ended by a line that
    says so.
    """
    command = ("git", "-C", str(root()), *DIFF)
    try:
        output = subprocess.run(command, capture_output=True, timeout=SECONDS, check=True).stdout
        if len(output) <= LARGEST:
            return output.decode(errors="replace")
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        output = error.stdout or b""
    # Drop the incomplete last line, because a secret that is cut in two would not be masked.
    lines = output[: output.rfind(b"\n", 0, LARGEST) + 1].decode(errors="replace")
    return f"{lines}{CUT}larger than {LARGEST:,} bytes, or git failed\n"

"""Examine this machine: list its hardware and versions, problems with their fixes, and a train.py
command to start with.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from timm_parallel.app import current, root
from timm_parallel.keys import STRATEGIES, ParallelConfig
from timm_parallel.launch.supervisor import with_project_on_path
from timm_parallel.machine import hardware
from timm_parallel.machine.hardware import Driver
from timm_parallel.machine.process import SAFE_PATH
from timm_parallel.machine.secrets import hide_in
from timm_parallel.record.result import read_result

REINSTALL = "pip install --force-reinstall -r requirements.txt"
GIB = 2**30
TIMEOUT = 180.0  # seconds


def outputs() -> Path:
    """Return the default folder of outputs, or the project's folder if no run has created it
    yet.
    """
    folder = root() / "outputs"
    return folder if folder.exists() else root()


def probe(module: str) -> dict[str, Any]:
    """Run a Python module in a separate process and return the JSON object that it prints. If the
    module fails, return {"error": <last line of its output>}.
    """
    error, output = _run([sys.executable, *SAFE_PATH, "-m", module])
    return {"error": error} if error else dict(json.loads(output.splitlines()[-1]))


def try_strategy(strategy: str, devices: int) -> str:
    """Train and evaluate a tiny model for two steps with the given strategy. Return an empty text
    if this works on this machine, else the last line of the error.
    """
    with tempfile.TemporaryDirectory(prefix="doctor_") as folder:
        arguments = [
            f"parallel={strategy}",
            f"parallel.devices={devices}",
            f"hydra.run.dir={folder}/run",
            *current().trial,
            "print_config=false",
        ]
        error, _ = _run([sys.executable, str(root() / "train.py"), *arguments])
        # Prefer the reason in result.json. A command that train.py rejected before the start has no
        # such file, and the last line of its output is the reason.
        with suppress(ValueError):
            error = error and read_result(Path(folder, "run")).reason
        return error


def _run(command: list[str]) -> tuple[str, str]:
    """Run a command in the project's folder. Return (last line of its error output, its output).
    The first is empty if the command succeeded.
    """
    environment = with_project_on_path(os.environ)
    try:
        done = subprocess.run(
            command, cwd=root(), env=environment, capture_output=True, text=True, timeout=TIMEOUT
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {TIMEOUT:.0f} s", ""
    if done.returncode == 0:
        return "", done.stdout
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()] or [
        f"exit code {done.returncode}"
    ]
    return lines[-1], ""


@dataclass
class MachineReport:
    """Hardware and versions of this machine, and the results of trial runs. Sizes are in bytes."""

    # GPUs of this process, or the reason why torch can use none.
    cuda: Driver = field(default_factory=hardware.cuda)
    driver: str | None = field(default_factory=hardware.driver_version)
    torch: dict[str, Any] = field(default_factory=lambda: probe("timm_parallel.lab.doctor"))
    cores: int = field(default_factory=hardware.cores)
    # Free bytes in /dev/shm, through which loader workers pass batches. None on a system without
    # it.
    shm: int | None = field(
        default_factory=lambda: (
            shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else None
        )
    )
    disk: int = field(default_factory=lambda: shutil.disk_usage(outputs()).free)
    can_write: bool = field(default_factory=lambda: os.access(outputs(), os.W_OK))
    # Strategy -> error of its trial run, or an empty text if the run succeeded.
    tries: dict[str, str] = field(default_factory=dict)


@dataclass
class Finding:
    """Result of one check of this machine. `remedy` says how to fix a problem, and is None if there
    is none.
    """

    name: str
    text: str
    remedy: str | None = None
    # True if training cannot start before the problem is fixed.
    stops: bool = False


def examine(as_json: bool, quick: bool = False) -> int:
    """Check this machine and print the findings, as text or as JSON. Return 1 if training cannot
    start here, else 0.

    `quick`: train no steps, so that the check takes seconds and leaves the machine to other users.
    """
    if not quick:
        print(
            "trains two steps with each strategy, which takes a minute; quick=true leaves them out",
            file=sys.stderr,
        )
    print("querying torch and timm …", file=sys.stderr, flush=True)
    facts = MachineReport()
    for strategy, devices in ({} if quick else strategies_to_try(facts)).items():
        print(
            f"trying two steps with parallel={strategy} on {devices} device(s) …",
            file=sys.stderr,
            flush=True,
        )
        facts.tries[strategy] = try_strategy(strategy, devices)
    findings = findings_of(facts)
    can_train = not any(finding.stops for finding in findings)
    if as_json:
        report = {
            "can_train": can_train,
            "command": advice(facts) if can_train else None,
            "findings": [asdict(finding) for finding in findings],
            "facts": asdict(facts),
        }
        print(json.dumps(hide_in(report), indent=2))
    else:
        print(as_text(facts, findings))
    return 0 if can_train else 1


def as_text(facts: MachineReport, findings: list[Finding]) -> str:
    """Format the findings about this machine, one per line. Append the numbered fixes and, if
    training can start, a train.py command.
    """
    width = max(len(finding.name) for finding in findings)
    lines = []
    for finding in findings:
        mark = "✗" if finding.stops else "!" if finding.remedy else "✓"
        lines.append(f"{mark} {finding.name:<{width}}  {finding.text}")
    stops = [finding for finding in findings if finding.stops]
    fixes = stops or [finding for finding in findings if finding.remedy]
    if fixes:
        lines += [
            "",
            "Training cannot start. Fix, in this order:" if stops else "Recommended fixes:",
        ]
        lines += [
            f"  {number}. {finding.name}: {finding.remedy}"
            for number, finding in enumerate(fixes, 1)
        ]
    if not stops:
        lines += ["", f"Start with:  {advice(facts)}"]
    return "\n".join(lines)


def findings_of(facts: MachineReport) -> list[Finding]:
    """Return the findings about system, torch, GPUs, storage and each strategy. Their order is the
    order in which problems should be fixed.
    """
    return [
        Finding(
            "system",
            f"{platform.platform()}, Python {platform.python_version()}, {facts.cores} cores",
        ),
        _torch(facts),
        _devices(facts),
        *_storage(facts),
        *(_try(name, error) for name, error in facts.tries.items()),
    ]


def strategies_to_try(facts: MachineReport) -> dict[str, int]:
    """Choose the strategies that the check of this machine tries out, as a dictionary from strategy
    to number of devices. It is empty if a problem prevents any training.
    """
    if any(finding.stops for finding in findings_of(facts)):
        return {}
    several = len(facts.cuda.devices) or min(2, facts.cores)
    single = {name: 1 for name in STRATEGIES if ParallelConfig(name).has_one_device}
    others = {name: several for name in STRATEGIES if name not in single}
    return single | others if several > 1 else single


def advice(facts: MachineReport) -> str:
    """Build a train.py command that suits this machine: all GPUs unless a trial run on several
    devices failed, else one device.
    """
    parallel = ParallelConfig()
    parallel.choose_strategy(several=len(facts.cuda.devices) > 1)
    if facts.tries.get(parallel.strategy):
        parallel = ParallelConfig()
        parallel.choose_strategy(several=False)
    devices = 1 if parallel.has_one_device else len(facts.cuda.devices)
    without_workers = " data.workers=0" if facts.shm is not None and facts.shm < GIB else ""
    return (
        f"python train.py parallel={parallel.strategy} parallel.devices={devices}{without_workers}"
    )


def _try(name: str, error: str) -> Finding:
    if not error:
        return Finding(name, "runs")
    remedy = f"python train.py {' '.join(current().trial[:3])} parallel={name}   # shows all of it"
    return Finding(
        name, f"does not run: {error}", remedy, stops=ParallelConfig(name).has_one_device
    )


def _torch(facts: MachineReport) -> Finding:
    if "error" in facts.torch:
        return Finding(
            "torch",
            f"torch or timm cannot be imported: {facts.torch['error']}",
            REINSTALL,
            stops=True,
        )
    target = f"CUDA {facts.torch['cuda']}" if facts.torch["cuda"] else "CPU"
    return Finding(
        "torch", f"{facts.torch['version']}, built for {target}; timm {facts.torch['timm']}"
    )


def _devices(facts: MachineReport) -> Finding:
    if facts.cuda.problem is not None:
        remedy = "as it says; in a container, give it --gpus all; then unset CUDA_VISIBLE_DEVICES"
        return Finding("GPUs", f"none can be used: {facts.cuda.problem}", remedy)
    if not facts.cuda.devices:
        return Finding(
            "GPUs", "an Apple GPU" if facts.torch.get("mps") else "none; training uses CPU devices"
        )
    names = ", ".join(
        f"{device.name} ({(device.memory_bytes or 0) / GIB:.0f} GiB)"
        for device in facts.cuda.devices
    )
    text = f"{len(facts.cuda.devices)}: {names}; driver {facts.driver}"
    # The trial steps would fail too, but quick=true leaves them out.
    is_fine = facts.torch.get("devices") or "error" in facts.torch
    return Finding("GPUs", text, None if is_fine else f"torch sees none of them: {REINSTALL}")


def _storage(facts: MachineReport) -> list[Finding]:
    memory = Finding("/dev/shm", "none")
    if facts.shm is not None:
        memory.text = f"{facts.shm / GIB:.1f} GiB free"
        if facts.shm < GIB:
            memory.remedy = (
                "loader workers pass batches through it: docker run --shm-size 8g, or "
                "data.workers=0"
            )
    disk = Finding(
        "disk", f"{facts.disk / GIB:.0f} GiB free in {outputs()}", stops=not facts.can_write
    )
    if disk.stops or facts.disk < 2 * GIB:
        disk.remedy = (
            f"free space in {outputs()} and make it writable, or choose another folder: "
            "paths.output_dir=…"
        )
    return [memory, disk]


def print_torch() -> None:
    """Print the versions of torch and timm and the devices that torch sees, as one line of JSON. A
    separate process runs this function, because a broken torch may crash.
    """
    # Import timm too, because it loads torchvision, which may not match this version of torch.
    import timm
    import torch

    report = {
        "version": torch.__version__,
        "timm": timm.__version__,
        "cuda": torch.version.cuda,
        "devices": torch.cuda.device_count() if torch.cuda.is_available() else 0,
        "mps": torch.backends.mps.is_available(),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    print_torch()

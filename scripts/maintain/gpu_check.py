"""Run all checks that need a CUDA device, in nine minutes: `make gpu-check`. FULL=1 adds slower
checks.

    make gpu-wheels && make gpu-check BIN=/usr/bin    # an interpreter with torch, no package index

Each check has a time limit, and a failed check does not stop the next one. With two or more GPUs,
more checks compare the strategies and test faults. The script writes one file to attach to an
issue: outputs/gpu-check/<time>/gpu_check.md. Exit code 1 if a figure is wrong.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

# Python searches the folder of a script for modules, so add the root of the project.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.maintain import gpu_runs, gpu_speed
from scripts.maintain.gpu_rows import ROOT, Part, Row, tests
from timm_parallel.machine import hardware
from timm_parallel.machine.files import claim_folder, write_text
from timm_parallel.machine.process import terminate_descendants

# Total time limit in seconds of the checks that need one GPU, without FULL=1.
SECONDS = 520.0
NOT_SEEN = (
    "skipped: {}, so these were not checked: training on a device, sweeps, waits, speed, memory, "
    "checkpoints on other devices, faults, NCCL"
)
NEEDED = (
    *(
        "torch",
        "torchvision",
        "timm",
        "hydra",
        "omegaconf",
        "tensorboard",
        "psutil",
        "sklearn",
        "pandas",
        "pynvml",
    ),
    *("optuna", "matplotlib", "pytest", "pytest_timeout"),
)
RESNET, VIT = gpu_speed.TRAININGS["ResNet-50"], gpu_speed.TRAININGS["ViT-B/16"]
# Tests that a step does not wait for the device.
WAITS = ("timm_parallel/tests/test_speed.py", "timm_parallel/tests/test_feed.py")
ON_DEVICE = ("timm_parallel/tests/test_gpu.py", "timm_parallel/tests/test_gpu_faults.py")
# The most informative checks run first, so that an interrupted script has run them.
PARTS = (
    Part("machine", 15, gpu_runs.topology),
    Part("sweep and search", 65, gpu_runs.jobs),
    Part("speed: ResNet-50", 60, gpu_speed.against_by_hand("ResNet-50", RESNET)),
    Part("speed: ViT-B/16", 55, gpu_speed.against_by_hand("ViT-B/16", VIT)),
    Part("feeding images of CIFAR's size", 25, gpu_speed.feed),
    Part("waits for the device", 45, tests(*WAITS)),
    Part("evaluate, predict, export, resume", 75, gpu_runs.other_devices),
    Part("out of memory", 35, gpu_runs.out_of_memory),
    Part("device-side assert", 20, gpu_runs.fault("device_assert", "failed", "parallel=single")),
    Part("fsdp over NCCL", 30, gpu_runs.fsdp_on_one),
    Part("deterministic steps", 35, gpu_runs.deterministic),
    Part("compile and resume", 35, gpu_runs.compiled),
    Part("reading JPEG files", 25, gpu_speed.jpeg),
    Part("all tests of GPUs", 400, tests(*ON_DEVICE), needs_full=True),
    Part("profile", 60, gpu_speed.profile, needs_full=True),
    Part(
        "speed: ResNet-50, three rounds",
        240,
        gpu_speed.against_by_hand("ResNet-50", RESNET, 3),
        needs_full=True,
    ),
    Part(
        "speed: ViT-B/16, three rounds",
        240,
        gpu_speed.against_by_hand("ViT-B/16", VIT, 3),
        needs_full=True,
    ),
    Part("speed of strategies", 240, gpu_speed.strategies, needs_full=True),
    Part("strategies on several GPUs", 240, gpu_runs.all_strategies, devices=2),
    Part("class weights under dp", 60, gpu_runs.class_weights_under_dp, devices=2),
    Part("SyncBatchNorm over NCCL", 90, gpu_runs.SYNC_BN, devices=2),
    Part(
        "a killed rank",
        60,
        gpu_runs.fault("kill", "failed", "parallel=ddp", "parallel.devices=2", rank=1),
        devices=2,
    ),
    Part(
        "a rank out of memory",
        60,
        gpu_runs.fault("no_memory", "out_of_memory", "parallel=ddp", "parallel.devices=2", rank=1),
        devices=2,
    ),
    Part("two jobs side by side", 60, gpu_runs.side_by_side, devices=2),
    Part("make compare", 900, gpu_runs.compare_strategies, devices=2),
)


def chosen(devices: int, is_full: bool) -> list[Part]:
    """Return the checks to run on a number of devices. Without `is_full`, those that need FULL=1
    are left out.
    """
    return [part for part in PARTS if part.devices <= devices and (is_full or not part.needs_full)]


def check(parts: Sequence[Part]) -> dict[str, list[Row]]:
    """Run checks one after the other. Return a dictionary from the name of a check to its rows. A
    check that raises an error or exceeds its time limit gets a row that says so.
    """
    done: dict[str, list[Row]] = {}
    for part in parts:
        print(f"--- {part.name}", flush=True)
        began = time.monotonic()
        try:
            # End processes that the check has left behind, because they would disturb the next
            # check.
            with terminate_descendants():
                rows = part.run(part.seconds)
        except subprocess.TimeoutExpired:
            rows = [Row(part.name, f"not run within {part.seconds:.0f} s", True)]
        # Catch all errors, so that the remaining checks still run.
        except Exception as error:
            reason = " ".join(str(error).split())[-300:]
            rows = [Row(part.name, f"broke: {type(error).__name__}: {reason}", True)]
        print(f"{lines(rows)}({time.monotonic() - began:.0f} of {part.seconds:.0f} s)", flush=True)
        done[part.name] = rows
    return done


def lines(rows: list[Row]) -> str:
    """Format the rows of the report for the console."""
    return "".join(f"{row.what}: {row.figure}{'   WRONG' if row.wrong else ''}\n" for row in rows)


def report(done: dict[str, list[Row]], device: str, seconds: float) -> str:
    """Build the report as Markdown: a verdict, a table for each check, and the rows that can be
    pasted into docs/dev/benchmarks.md.
    """
    wrong = [
        f"{name}: {row.what}: {row.figure}"
        for name, rows in done.items()
        for row in rows
        if row.wrong
    ]
    verdict = "Nothing is wrong." if not wrong else f"{len(wrong)} wrong:"
    text = [
        f"# gpu-check: {device}",
        "",
        f"{time.strftime('%Y-%m-%d')}, {seconds:.0f} s, {platform.platform()}, commit {_commit()}.",
        "",
        verdict,
        *(f"- {line}" for line in wrong),
    ]
    for name, rows in done.items():
        text += ["", f"## {name}", "", "| what | figure | |", "|---|---|---|"]
        text += [
            f"| {cell(row.what)} | {cell(row.figure)} | {'**wrong**' if row.wrong else ''} |"
            for row in rows
        ]
    measured = [
        row
        for name in done
        if name.startswith(("speed", "feeding", "reading"))
        for row in done[name]
    ]
    text += [
        "",
        "## Rows for docs/dev/benchmarks.md",
        "",
        f"| {cell(device)} | figure |",
        "|---|---|",
    ]
    text += [f"| {cell(row.what)} | {cell(row.figure)} |" for row in measured]
    return "\n".join([*text, ""])


def cell(text: str) -> str:
    """Escape a text for a cell of a Markdown table."""
    return " ".join(text.replace("|", "\\|").split())


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=10, check=False
        )
    except OSError:
        return "unknown"
    return done.stdout.strip() or "unknown"


def main() -> int:
    """Check the visible CUDA devices, and write the report. Return the exit code: 0 if all figures
    are right, 1 if one is wrong, 2 if a package is missing.
    """
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    devices = hardware.visible_cuda_devices()
    if not devices:
        print(NOT_SEEN.format(hardware.cuda().problem or "no CUDA device is visible here"))
        return 0
    if missing:
        print(
            f"{sys.executable} lacks {', '.join(missing)}: run make gpu-wheels on a machine with a "
            "package index, and copy the folder .gpu-wheels here; or name an interpreter that has "
            "them, BIN=<folder>"
        )
        return 2
    began = time.monotonic()
    done = check(chosen(len(devices), os.environ.get("FULL") == "1"))
    name = devices[0].name + (f" and {len(devices) - 1} more" if len(devices) > 1 else "")
    folder = claim_folder(ROOT / "outputs" / "gpu-check" / time.strftime("%Y-%m-%d/%H-%M-%S"))
    write_text(folder / "gpu_check.md", report(done, name, time.monotonic() - began))
    print(f"report: {folder / 'gpu_check.md'}")
    return int(any(row.wrong for rows in done.values() for row in rows))


if __name__ == "__main__":
    sys.exit(main())

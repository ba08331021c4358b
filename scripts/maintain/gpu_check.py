"""Run all checks that need a CUDA device, in six to ten minutes: `make gpu-check`. FULL=1
adds slower checks.

    make gpu-wheels && make gpu-check BIN=/usr/bin    # an interpreter with torch, no package index

Each check has a time limit, and a failed check does not stop the next one. Checks that measure
nothing run next to each other. With two or more GPUs, more checks compare the strategies and test
faults. The script writes one file to attach to an issue: outputs/gpu-check/<time>/gpu_check.md. The
exit code is 1 if a figure is wrong.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# Python searches the folder of a script for modules, so add the root of the project.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.maintain import bench_speed
from scripts.maintain.gpu_rows import ROOT, Check, Part, Row, python, read, tests
from timm_parallel.machine import hardware
from timm_parallel.machine.files import claim_folder, write_text
from timm_parallel.machine.process import terminate_descendants

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
# Tests that a step does not wait for the device.
WAITS = ("tests/template/library/test_speed.py", "tests/template/library/test_feed.py")
# These files have all other tests that need a device.
ON_DEVICE = (
    "tests/template/library/test_gpu.py",
    "tests/template/library/test_gpu_faults.py",
)
LOSSES = "test_gpu_training_loss_matches_cpu_for_each_strategy_and_precision"
KILLED = "test_error_of_a_gpu_run_names_the_killed_or_stopped_rank"
NO_MEMORY = "test_sweep_continues_with_the_next_job_when_a_rank_runs_out_of_memory"


def on_device(name: str) -> Check:
    """Return a check that runs a test of test_gpu.py."""
    return tests(f"{ON_DEVICE[0]}::{name}")


def fault(name: str) -> Check:
    """Return a check that runs a test of test_gpu_faults.py."""
    return tests(f"{ON_DEVICE[1]}::{name}")


def topology(seconds: float) -> list[Row]:
    """Return rows with the versions of the packages and the devices of this machine."""
    import timm
    import torch

    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    python_version = ".".join(map(str, sys.version_info[:3]))
    rows = [
        Row(
            "versions",
            f"torch {torch.__version__}, timm {timm.__version__}, Python {python_version}",
        ),
        Row("CUDA, cuDNN, NCCL", f"{torch.version.cuda}, {torch.backends.cudnn.version()}, {nccl}"),
        Row("cores", f"{hardware.cores()}"),
    ]
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        rows.append(Row(f"device {index}", f"{device.name}, {device.total_memory / 2**30:.0f} GiB"))
    return rows


def compare_strategies(seconds: float) -> list[Row]:
    """Run `make compare`, and return rows with the headline result of its report and the share of
    jobs that are done.
    """
    with tempfile.TemporaryDirectory(prefix="gpu_check_") as folder:
        words = ["train.py", "-m", "experiment=compare", "sweep.repeats=3"]
        python([*words, f"hydra.sweep.dir={folder}/compare"], seconds)
        lead = read(Path(folder, "compare", "report.json")).get("lead")
        jobs = read(Path(folder, "compare", "jobs.json")).get("jobs", [])
    # Ignore skipped jobs, because single cannot use two devices.
    tried = [job["status"] for job in jobs if job["status"] != "skipped"]
    done = f"{tried.count('done')} of {len(tried)}"
    is_wrong = not tried or tried.count("done") < len(tried)
    return [
        Row("make compare: headline", json.dumps(lead, ensure_ascii=False), lead is None),
        Row("make compare: tried jobs that are done", done, is_wrong),
    ]


# Number of checks that run at the same time.
AT_ONCE = 8
PARTS = (
    Part("machine", 20, topology),
    Part(
        "sweep and search",
        90,
        on_device("test_forked_jobs_train_on_the_gpu_and_record_its_count"),
    ),
    Part("waits for the device", 90, tests(*WAITS)),
    Part(
        "evaluate, predict, export, resume",
        120,
        on_device("test_gpu_run_is_evaluated_exported_and_resumed_without_a_gpu"),
    ),
    Part("fsdp over NCCL", 60, on_device(f"{LOSSES}[cuda-fsdp over NCCL-fp32]")),
    Part(
        "deterministic steps",
        90,
        on_device("test_two_deterministic_trainings_end_with_equal_weights"),
    ),
    Part("compile and resume", 90, on_device("test_compiled_run_trains_and_resumes")),
    Part("speed: ResNet-50", 120, bench_speed.in_turns("ResNet-50"), alone=True),
    Part("speed: ViT-B/16", 60, bench_speed.in_turns("ViT-B/16"), alone=True),
    Part(
        "speed: launch-bound steps", 100, bench_speed.in_turns("ResNet-18, 32 pixels"), alone=True
    ),
    Part("speed: JPEG files", 90, bench_speed.in_turns("ResNet-50, JPEG files"), alone=True),
    Part("speed: start", 45, bench_speed.start, alone=True),
    Part(
        "out of memory",
        35,
        fault("test_sweep_continues_after_a_batch_that_exceeds_the_memory_of_the_gpu"),
        alone=True,
    ),
    Part("device-side assert", 20, fault("test_device_side_assert_ends_the_run"), alone=True),
    Part("all tests of GPUs", 600, tests(*ON_DEVICE), needs_full=True),
    Part(
        "speed: compiled",
        200,
        bench_speed.in_turns("ResNet-50, compiled by hand"),
        needs_full=True,
        alone=True,
    ),
    Part(
        "strategies on several GPUs",
        240,
        on_device("test_loss_on_several_gpus_matches_that_on_a_cpu"),
        devices=2,
    ),
    Part(
        "SyncBatchNorm over NCCL",
        90,
        on_device("test_sync_bn_step_on_gpus_uses_statistics_of_the_whole_batch"),
        devices=2,
    ),
    Part(
        "a killed rank",
        60,
        fault(f"{KILLED}[killed-nccl]"),
        devices=2,
        alone=True,
    ),
    Part("a rank out of memory", 60, fault(f"{NO_MEMORY}[nccl]"), devices=2, alone=True),
    Part(
        "two jobs side by side",
        60,
        on_device("test_concurrent_jobs_of_a_sweep_use_different_gpus"),
        devices=2,
    ),
    Part("make compare", 900, compare_strategies, devices=2, alone=True),
)


def chosen(devices: int, is_full: bool) -> list[Part]:
    """Return the checks to run on a number of devices. Without `is_full`, those that need FULL=1
    are left out.
    """
    return [part for part in PARTS if part.devices <= devices and (is_full or not part.needs_full)]


def check(parts: Sequence[Part]) -> dict[str, list[Row]]:
    """Run checks: first those that run next to each other, then the others one after the other.
    Return a dictionary from the name of a check to its rows.
    """
    groups = [[part for part in parts if not part.alone]]
    groups += [[part] for part in parts if part.alone]
    done: dict[str, list[Row]] = {}
    for group in groups:
        # End processes that these checks have left behind, because they would disturb the next
        # check.
        with terminate_descendants(), ThreadPoolExecutor(AT_ONCE) as pool:
            done |= zip((part.name for part in group), pool.map(run_part, group), strict=True)
    return done


def run_part(part: Part) -> list[Row]:
    """Run a check, and print its rows. A check that raises an error or exceeds its time limit gets
    a row that says so.
    """
    began = time.monotonic()
    try:
        rows = part.run(part.seconds)
    except subprocess.TimeoutExpired:
        rows = [Row(part.name, f"not within {part.seconds:.0f} s", True, is_run=False)]
    # Catch all errors, so that the remaining checks still run.
    except Exception as error:
        reason = " ".join(str(error).split())[-300:]
        rows = [Row(part.name, f"broke: {type(error).__name__}: {reason}", True, is_run=False)]
    seconds = time.monotonic() - began
    print(f"--- {part.name}, {seconds:.0f} of {part.seconds:.0f} s\n{lines(rows)}", flush=True)
    return rows


def lines(rows: list[Row]) -> str:
    """Format the rows of the report for the console."""
    return "".join(f"{row.what}: {row.figure}{'   WRONG' if row.wrong else ''}\n" for row in rows)


def report(
    done: dict[str, list[Row]], left_out: dict[str, str], device: str, seconds: float
) -> str:
    """Build the report as Markdown: a verdict, what was not run, a table for each check, and the
    rows that can be pasted into docs/dev/benchmarks.md.

    `left_out`: dictionary from the checks that this call leaves out to the reasons.
    """
    named = [(f"{name}: {row.what}", row) for name, rows in done.items() for row in rows]
    wrong = [f"{name}: {row.figure}" for name, row in named if row.wrong]
    not_run = [f"{name}: {row.figure}" for name, row in named if not row.is_run]
    not_run += [f"{name}: {reason}" for name, reason in left_out.items()]
    text = [
        f"# gpu-check: {device}",
        "",
        f"{time.strftime('%Y-%m-%d')}, {seconds:.0f} s, {platform.platform()}, commit {_commit()}.",
        "",
        "Nothing is wrong." if not wrong else f"{len(wrong)} wrong:",
        *(f"- {line}" for line in wrong),
        "",
        "All rows were run." if not not_run else "Not run:",
        *(f"- {line}" for line in not_run),
    ]
    for name, rows in done.items():
        text += ["", f"## {name}", "", "| what | figure | |", "|---|---|---|"]
        text += [
            f"| {cell(row.what)} | {cell(row.figure)} | {'**wrong**' if row.wrong else ''} |"
            for row in rows
        ]
    text += ["", "## Rows for docs/dev/benchmarks.md", ""]
    text += [f"| {cell(device)} | figure |", "|---|---|"]
    text += [
        f"| {cell(row.what)} | {cell(row.figure)} |"
        for name, rows in done.items()
        if name.startswith("speed")
        for row in rows
    ]
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
    parts = chosen(len(devices), os.environ.get("FULL") == "1")
    left_out = {
        part.name: f"needs {part.devices} devices" if part.devices > len(devices) else "FULL=1"
        for part in PARTS
        if part not in parts
    }
    done = check(parts)
    name = devices[0].name + (f" and {len(devices) - 1} more" if len(devices) > 1 else "")
    folder = claim_folder(ROOT / "outputs" / "gpu-check" / time.strftime("%Y-%m-%d/%H-%M-%S"))
    write_text(folder / "gpu_check.md", report(done, left_out, name, time.monotonic() - began))
    print(f"report: {folder / 'gpu_check.md'}")
    return int(any(row.wrong for rows in done.values() for row in rows))


if __name__ == "__main__":
    sys.exit(main())

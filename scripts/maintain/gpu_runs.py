"""Checks of `make gpu-check` that start runs: sweeps, checkpoints on other devices, faults, and
several GPUs.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from pathlib import Path

from scripts.maintain.gpu_rows import (
    ROOT,
    Check,
    Clock,
    Row,
    Run,
    near,
    python,
    same,
    scratch,
    train,
)
from timm_parallel.machine import hardware
from timm_parallel.record.result import read_metrics

STEPS = 6
SHORT = (
    f"train.max_steps={STEPS}",
    "train.log_every=1",
    "data.batch_size=48",
    "optim.warmup_epochs=0",
    "train.precision=fp32",
    "model.channels_last=false",
)
FAULTY = ROOT / "timm_parallel" / "tests" / "promises" / "faulty"
# Batch size that exceeds the memory of any GPU.
HUGE = 8192


def topology(seconds: float) -> list[Row]:
    """Return rows with the versions of the packages and the devices of this machine."""
    import sys

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


def out_of_memory(seconds: float) -> list[Row]:
    """Check a sweep whose first job exceeds the memory of the device. The next job must still
    train.
    """
    with scratch() as base:
        sweep = train(
            base / "sweep",
            *(
                "parallel=single",
                "data=synthetic",
                f"data.kwargs.num_samples={HUGE}",
                "data.image_size=224",
            ),
            *(
                f"data.batch_size={HUGE},32",
                "model=resnet18",
                "model.name=resnet50",
                "train.max_steps=2",
            ),
            *("train.evaluate_every=0", "optim.warmup_epochs=0"),
            *("train.precision=fp32", "model.channels_last=false"),
            seconds=seconds,
            sweep=True,
        )
        return [
            same(
                "a batch that does not fit, and the job after it: status",
                sweep.statuses,
                ["out_of_memory", "done"],
            ),
            Row("a batch that does not fit, and the job after it: seconds", f"{sweep.seconds:.0f}"),
        ]


def fault(kind: str, expected: str, *overrides: str, rank: int = 0, limit: float = 15) -> Check:
    """Return a check that injects a fault into the forward pass of step 4. The check measures the
    seconds until all ranks have ended.
    """

    def run(seconds: float) -> list[Row]:
        with scratch() as base:
            mark = base / "mark"
            environment = {
                "PYTHONPATH": os.pathsep.join(
                    [str(FAULTY), str(ROOT), os.environ.get("PYTHONPATH", "")]
                ),
                "FAULT": f"{kind}:{rank}:4:the forward pass",
                "FAULT_MARK": str(mark),
            }
            run = train(base / "run", *overrides, *SHORT, seconds=seconds, environment=environment)
            ended = time.time()
            if not mark.is_file():
                return [Row(f"{kind}: the fault", "did not happen", True)]
            took = ended - float(mark.read_text(encoding="utf-8").split()[0])
            result = run.result
            failure = result.get("failure") or {}
            return [
                same(f"{kind}: status", result.get("status"), expected),
                same(f"{kind}: rank that failed first", failure.get("rank"), rank),
                Row(
                    f"{kind}: seconds until all had ended (<= {limit:g})",
                    f"{took:.1f}",
                    took > limit,
                ),
                same(f"{kind}: processes left on the devices", processes_on_devices(), 0),
            ]

    return run


def processes_on_devices() -> int:
    """Return the number of rank processes that still use a GPU, according to NVML. After a run has
    ended, the number must be 0.
    """
    import pynvml

    pynvml.nvmlInit()
    try:
        handles = [
            pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())
        ]
        found = {
            process.pid
            for handle in handles
            for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
        }
    except pynvml.NVMLError:
        return 0
    finally:
        pynvml.nvmlShutdown()
    # Count only processes that this machine knows as ranks, because in a container, NVML lists
    # process ids of the host.
    return sum(_is_ours(pid) for pid in found)


def _is_ours(pid: int) -> bool:
    try:
        return b"timm_parallel.rank" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


# Largest absolute difference of a loss between single and another strategy.
TOLERANCE = 2e-3
# Use 49 validation images, so that ranks evaluate different numbers of images.
UNEVEN = ("data=synthetic", "data.kwargs.num_samples=392")


def _losses(run: Run) -> list[float]:
    path = run.folder / "metrics.jsonl"
    if run.code != 0 or not path.is_file():
        return []
    return [line["train/loss"] for line in read_metrics(path) if "train/loss" in line]


# The checks of several devices follow. They need two or more GPUs.


def all_strategies(seconds: float) -> list[Row]:
    """Check that dp, ddp and fsdp on two devices have the same losses and evaluation results as
    single. With four devices, check HSDP too. A larger difference than TOLERANCE is wrong.
    """
    two = ("parallel.devices=2",)
    ways: list[tuple[str, tuple[str, ...]]] = [
        *((f"{name} on 2", (f"parallel={name}", *two)) for name in ("dp", "ddp", "fsdp")),
        *(
            (f"{name} on devices 1, 0", (f"parallel={name}", *two, "parallel.device_ids=[1,0]"))
            for name in ("dp", "ddp")
        ),
    ]
    count = len(hardware.visible_cuda_devices())
    if count >= 3:
        ways.append(("ddp on 3", ("parallel=ddp", "parallel.devices=3")))
    if count >= 4:
        ways.append(
            ("HSDP on 2 × 2", ("parallel=fsdp", "parallel.devices=4", "parallel.shard_size=2"))
        )
    clock, rows = Clock(seconds), []
    with scratch() as base:
        one = train(base / "single", "parallel=single", *SHORT, *UNEVEN, seconds=clock.left)
        expected = _losses(one)
        if not expected:
            return [Row("single: exit code", f"{one.code}", True)]
        for index, (name, overrides) in enumerate(ways):
            other = train(base / str(index), *overrides, *SHORT, *UNEVEN, seconds=clock.left)
            losses = _losses(other)
            if len(losses) != len(expected):
                rows.append(Row(f"{name}: exit code", f"{other.code}", True))
                continue
            apart = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
            val, val_of_single = other.result["val"], one.result["val"]
            rows += [
                Row(
                    f"{name}: largest difference of a loss from single's",
                    f"{apart:.1e}",
                    apart > TOLERANCE,
                ),
                near(
                    f"{name}: val/loss and single's", val["loss"], val_of_single["loss"], TOLERANCE
                ),
                same(f"{name}: images evaluated", val["samples"], val_of_single["samples"]),
            ]
    return rows


def class_weights_under_dp(seconds: float) -> list[Row]:
    """Check that dp with class weights ends without an error if the loss is computed on another
    device than the first.
    """
    words = ("parallel=dp", "parallel.devices=2", "parallel.output_device=1")
    with scratch() as base:
        run = train(base / "run", *words, "train.class_weights=auto", *SHORT, seconds=seconds)
    return [same("dp with class weights, parallel.output_device=1: exit code", run.code, 0)]


def side_by_side(seconds: float) -> list[Row]:
    """Check that a sweep runs two jobs at the same time, each on another device."""
    with scratch() as base:
        sweep = train(
            base / "sweep",
            *("parallel=single", "optim.lr=1e-3,1e-4", "sweep.jobs=2", *SHORT),
            seconds=seconds,
            sweep=True,
        )
        folders = sorted(path.parent for path in base.glob("sweep/*/environment.json"))
        listed = [
            json.loads((folder / "environment.json").read_text(encoding="utf-8"))
            for folder in folders
        ]
        uuids = {device["uuid"] for entry in listed for device in entry["devices"][:1]}
        return [
            same("two jobs side by side: status", sweep.statuses, ["done", "done"]),
            same("two jobs side by side: devices", len(uuids), 2),
        ]


def compare_strategies(seconds: float) -> list[Row]:
    """Run `make compare`, and return rows with the headline result of its report and the share of
    jobs that are done.
    """
    with scratch() as base:
        folder = base / "compare"
        words = [
            *("train.py", "-m", "experiment=compare", "sweep.repeats=3"),
            f"hydra.sweep.dir={folder}",
        ]
        done = python(words, seconds)
        run = Run(done.code, done.output, done.seconds, folder)
        lead = run.read("report.json").get("lead")
        # Ignore skipped jobs, because single cannot use two devices.
        tried = [status for status in run.statuses if status != "skipped"]
        done_jobs = statistics.fmean(status == "done" for status in tried) if tried else 0.0
        return [
            Row("make compare: headline", json.dumps(lead, ensure_ascii=False), lead is None),
            Row(
                "make compare: share of tried jobs that are done", f"{done_jobs:.2f}", done_jobs < 1
            ),
        ]

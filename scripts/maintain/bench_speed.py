"""Workloads that measure the speed of train.py, for `make bench` and `make gpu-check`.
bench_rounds.py trains each workload with several programs in turns.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripts.maintain.gpu_rows import ACCELERATOR, Check, Row, python, read
from timm_parallel.machine import hardware

ROUNDS = 5
RESNET_50 = (
    *("data=synthetic", "data.image_size=224", "model=resnet18", "model.name=resnet50"),
    *("train.precision=bf16", "model.channels_last=true"),
    *("train.evaluate_every=0", "optim.warmup_epochs=0"),
)
# Peak bf16 FLOPs per second of GPUs without sparsity, from NVIDIA's data sheets.
PEAK_BF16 = {
    "H200": 989e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "4090": 165e12,
}
BY_HAND, COMPILED_BY_HAND = "loop by hand", "loop by hand, compiled"
TIMMS_LOADER = "loop by hand, timm's loader"
OURS, COMPILED, FSDP = "train.py", "train.py, model.compile=true", "train.py, fsdp"
REDUCED, AUGMENTED = "train.py, model.compile=reduce-overhead", "train.py, flips and crops"
TORCHCODEC, PIL = "train.py, torchcodec", "train.py, PIL"
LIGHTNING = "Lightning, usual logging"


@dataclass(frozen=True)
class Workload:
    """A model and its batches, which all programs train."""

    model: str
    pixels: int
    batch: int
    channels_last: bool
    # Number of timed steps of a round.
    steps: int
    # Dictionary from each program to the program that its speed is compared with.
    programs: dict[str, str]
    # True if the batches come from JPEG files. Otherwise random images are in memory.
    reads_jpeg: bool = False
    # Number of times that a program trains `steps` steps before those that are timed. They use up
    # the batches that the workers have read while other programs trained.
    untimed: int = 0
    # True if train.py must be as fast as the loop by hand.
    is_judged: bool = True
    precision: str = "bf16"
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    # Number of batches of random images, which are read again and again.
    batches: int = 16

    @property
    def samples(self) -> int:
        return self.batches * self.batch

    @property
    def format(self) -> str:
        """Precision, memory format and batch size, for the report."""
        layout = "channels last" if self.channels_last else "contiguous"
        return f"{self.precision}, {layout}, batch {self.batch}"


WORKLOADS = {
    "ResNet-50": Workload(
        "resnet50",
        *(224, 256, True, 20),
        {OURS: BY_HAND, FSDP: BY_HAND, COMPILED: BY_HAND, LIGHTNING: BY_HAND},
    ),
    "ViT-B/16": Workload(
        "vit_base_patch16_224", *(224, 128, False, 20), {OURS: BY_HAND, FSDP: BY_HAND}
    ),
    # The kernels of this model are so short that launching them takes longer.
    "ResNet-18, 32 pixels": Workload(
        "resnet18",
        *(32, 512, True, 60),
        {
            OURS: BY_HAND,
            COMPILED: BY_HAND,
            REDUCED: BY_HAND,
            AUGMENTED: BY_HAND,
        },
        is_judged=False,
    ),
    "ResNet-50, JPEG files": Workload(
        "resnet50",
        *(224, 128, True, 20),
        {TORCHCODEC: TIMMS_LOADER, PIL: TIMMS_LOADER},
        reads_jpeg=True,
        untimed=2,
    ),
    "ResNet-50, compiled by hand": Workload(
        "resnet50", *(224, 256, True, 20), {COMPILED: COMPILED_BY_HAND}
    ),
}
ON_CPU: dict[str, Any] = {"precision": "fp32", "batches": 200}
TINY = {"embed_dim": 32, "depth": 2, "num_heads": 2}
# Workloads of `make bench`, with one thread on a CPU.
CPU_WORKLOADS = {
    # A step takes 5 ms, so this shows what train.py adds to it.
    "tiny ViT": Workload(
        "vit_tiny_patch16_224",
        *(32, 32, False, 200),
        {OURS: BY_HAND, LIGHTNING: BY_HAND},
        is_judged=False,
        kwargs={**TINY, "img_size": 32},
        **ON_CPU,
    ),
    "ResNet-18": Workload("resnet18", *(32, 32, False, 10), {OURS: BY_HAND}, **ON_CPU),
    "small ViT": Workload(
        "vit_tiny_patch16_224",
        *(32, 32, False, 10),
        {OURS: BY_HAND},
        kwargs={"img_size": 32, "patch_size": 4, "embed_dim": 96, "depth": 4, "num_heads": 3},
        **ON_CPU,
    ),
    # The model has few patches, so that the programs wait for the files.
    "JPEG files": Workload(
        "vit_tiny_patch16_224",
        *(224, 32, False, 10),
        {TORCHCODEC: TIMMS_LOADER, PIL: TIMMS_LOADER},
        reads_jpeg=True,
        untimed=2,
        kwargs={**TINY, "img_size": 224, "patch_size": 56},
        **ON_CPU,
    ),
}


def in_turns(name: str, accelerator: str = ACCELERATOR) -> Check:
    """Return a check that trains a workload with all of its programs in turns."""

    def run(seconds: float) -> list[Row]:
        done = python(["scripts/maintain/bench_rounds.py", name, accelerator, str(ROUNDS)], seconds)
        lines = [line for line in done.output.splitlines() if line.startswith('{"rates"')]
        devices = hardware.visible_cuda_devices() if accelerator == "cuda" else ()
        device = devices[0].name if devices else "CPU"
        workload = (WORKLOADS | CPU_WORKLOADS)[name]
        rows = compare(name, workload, json.loads(lines[-1]), device) if lines else []
        if done.code != 0:
            reason = "the time limit was reached" if done.code is None else f"exit code {done.code}"
            rows.append(Row(f"{name}: all rounds", reason, True, is_run=False))
        return rows

    return run


def compare(name: str, workload: Workload, measured: dict[str, Any], device: str) -> list[Row]:
    """Build the rows of a workload. `measured` has dictionaries from a program to its figures:
    `rates` (images/s of each round), `bytes` (peak memory), `waits` (share of each round that waits
    for data), and `missing` (why a program did not run).
    """
    rates: dict[str, list[float]] = measured["rates"]
    rows = [Row(f"{name}: settings", f"{workload.format}, {hardware.cores()} cores")]
    for program, other in measured["missing"].items():
        rows.append(Row(f"{name}: {program}", other, is_run=False))
    for program, values in rates.items():
        rows.append(Row(f"{name}: {program}: images/s", shown(values, ".0f")))
        reference = rates.get(workload.programs.get(program, ""))
        if reference is not None:
            # A program and its reference take turns, so compare those of the same round.
            ratios = [own / theirs for own, theirs in zip(values, reference, strict=True)]
            is_judged = program == OURS and workload.is_judged
            rows.append(
                Row(
                    f"{name}: {program} over the {workload.programs[program]}"
                    f"{' (>= 0.99)' if is_judged else ''}",
                    shown(ratios, ".3f"),
                    # Wrong if three quarters of the rounds miss the target.
                    is_judged and sorted(ratios)[3 * len(ratios) // 4] < 0.99,
                )
            )
    # Neither memory nor FLOPs are known on a CPU.
    if OURS in rates and BY_HAND in rates and device != "CPU":
        memory = measured["bytes"][OURS] / max(1, measured["bytes"][BY_HAND])
        peak = next((peak for part, peak in PEAK_BF16.items() if part in device), None)
        flops = model_flops(workload) * statistics.median(rates[OURS])
        mfu = "of an unknown peak" if peak is None else f"{flops / peak:.3f}"
        rows += [
            Row(f"{name}: peak memory over it (<= 1.02)", f"{memory:.3f}", memory > 1.02),
            Row(f"{name}: model-FLOPs utilization, bf16", mfu),
        ]
    rows += [
        Row(
            f"{name}: {program}: share of time that waits for data",
            shown(shares, ".3f"),
            program == AUGMENTED and statistics.median(shares) > 0.1,
        )
        for program, shares in measured["waits"].items()
    ]
    return rows


def shown(values: list[float], form: str) -> str:
    """Format the median of values, with the smallest and the largest value in parentheses."""
    median, least, most = (f(values) for f in (statistics.median, min, max))
    return f"{median:{form}} ({least:{form}} … {most:{form}})"


def model_flops(workload: Workload) -> float:
    """Count the training FLOPs per image: three times those of the forward pass. A multiply-add
    counts as two.
    """
    import timm
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter, torch.device("meta"):
        model = timm.create_model(workload.model, num_classes=10, **workload.kwargs)
        # Use two images, because BatchNorm of one value per channel raises an error.
        model(torch.empty(2, 3, workload.pixels, workload.pixels))
    return 3 * counter.get_total_flops() / 2


def start(seconds: float) -> list[Row]:
    """Measure the seconds to the first step of ResNet-50, in a process of its own and in a job that
    is forked from the warm server process of a sweep.
    """
    rows = []
    settings = (
        *("parallel=single", f"parallel.accelerator={ACCELERATOR}", *RESNET_50, "data.workers=0"),
        *("data.batch_size=64", "data.kwargs.num_samples=512", "train.max_steps=4"),
        "print_config=false",
    )
    with tempfile.TemporaryDirectory(prefix="gpu_check_") as folder:
        first, sweep = Path(folder, "first"), Path(folder, "sweep")
        python(["train.py", *settings, f"hydra.run.dir={first}"], seconds / 2)
        words = ["train.py", "-m", *settings, "seed=0,1", f"hydra.sweep.dir={sweep}"]
        python(words, seconds / 2)
        for name, run in (("first process", first), ("second job of a sweep", sweep / "1")):
            result = read(run / "result.json")
            # The parts of the start of the run.
            parts = {k: v for k, v in result.get("seconds", {}).items() if k != "total"}
            if not parts:
                rows.append(Row(f"start, {name}", f"status {result.get('status')}", True))
            rows += [Row(f"start, {name}: {key}, s", f"{v or 0:.1f}") for key, v in parts.items()]
    return rows

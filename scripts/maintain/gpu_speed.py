"""Checks of `make gpu-check` that measure speed: against a hand-written loop, of data loading, of
strategies, and between steps.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import replace

from scripts.maintain.bench_data import make
from scripts.maintain.bench_measures import Figures, Training
from scripts.maintain.gpu_rows import Check, Clock, Row, python, scratch, train
from timm_parallel.machine import hardware

# Peak bf16 FLOPs per second of GPUs without sparsity, from NVIDIA's data sheets.
PEAK_BF16 = {
    "H200": 989e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "4090": 165e12,
}
# Use few steps, because both programs create all images of the epoch before they start.
TRAININGS = {
    "ResNet-50": Training("resnet50", {}, 40, 20, batch_size=256, image_size=224, on_gpu=True),
    "ViT-B/16": Training(
        "vit_base_patch16_224", {}, 40, 20, batch_size=128, image_size=224, on_gpu=True
    ),
}


def against_by_hand(name: str, training: Training, rounds: int = 1) -> Check:
    """Return a check that compares the speed of train.py with the hand-written loop. It repeats the
    comparison until the rounds are done or the time is over.
    """

    def run(seconds: float) -> list[Row]:
        clock = Clock(seconds)
        pairs: list[tuple[Figures, Figures]] = []
        took = 0.0
        while len(pairs) < rounds and clock.left > 1.2 * took:
            before = clock.left
            own = replace(training, limit=clock.left).ours(1)
            pairs.append((own, replace(training, limit=clock.left).by_hand(1)))
            took = before - clock.left
        return compare(name, training, pairs, hardware.visible_cuda_devices()[0].name)

    return run


def compare(
    name: str, training: Training, pairs: list[tuple[Figures, Figures]], device: str
) -> list[Row]:
    """Build rows that compare speed and peak memory of train.py with those of the hand-written
    loop. `pairs`: for each round, the figures of train.py and of the loop.
    """
    rate, memory = (
        [ours[key] / other[key] for ours, other in pairs] for key in ("images_per_sec", "peak_mib")
    )
    own = statistics.median(ours["images_per_sec"] for ours, _ in pairs)
    start = statistics.median(ours["first_step"] for ours, _ in pairs)
    peak = next((peak for part, peak in PEAK_BF16.items() if part in device), None)
    mfu = "of an unknown peak" if peak is None else f"{model_flops(training) * own / peak:.3f}"
    is_slow, is_large = max(rate) < 0.99, min(memory) > 1.02
    return [
        Row(f"{name}: images/s", f"{own:.0f}"),
        Row(f"{name}: images/s over the hand-written loop's (>= 0.99)", shown(rate), is_slow),
        Row(f"{name}: peak memory over it (<= 1.02)", shown(memory), is_large),
        Row(f"{name}: model-FLOPs utilization, bf16", mfu),
        Row(f"{name}: seconds from the command to the first step", f"{start:.1f}"),
    ]


def shown(values: list[float]) -> str:
    """Format the median of values, with the smallest and the largest value in parentheses."""
    if len(values) == 1:
        return f"{values[0]:.3f}"
    return f"{statistics.median(values):.3f} ({min(values):.3f} … {max(values):.3f})"


def model_flops(training: Training) -> float:
    """Count the training FLOPs per image: three times those of the forward pass. A multiply-add
    counts as two.
    """
    import timm
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter, torch.device("meta"):
        model = timm.create_model(training.model, num_classes=10)
        model(torch.empty(1, 3, training.image_size, training.image_size))
    return float(3 * counter.get_total_flops())


def feed(seconds: float) -> list[Row]:
    """Measure a small ResNet on images of CIFAR's size with flips and padded crops. Data loading
    may limit the speed of such a model.
    """
    size, count = 512, 40
    with scratch() as base:
        run = train(
            base / "run",
            *(
                "data=synthetic",
                f"data.kwargs.num_samples={size * count}",
                f"data.batch_size={size}",
            ),
            *(
                "data.image_size=32",
                "data.augment.hflip=0.5",
                "data.augment.crop_padding=4",
                "data.workers=auto",
            ),
            *(
                "model=resnet18",
                "model.name=resnet18",
                "model.channels_last=true",
                "train.precision=bf16",
            ),
            *(
                "train.epochs=2",
                f"train.log_every={count // 2}",
                "train.evaluate_every=0",
                "optim.warmup_epochs=0",
            ),
            seconds=seconds,
        )
        if run.code != 0:
            return [Row("images of CIFAR's size, augmented", f"exit code {run.code}", True)]
        waited, speed = run.result["data_wait"], run.result["throughput"]["images_per_sec"]
    is_late = waited is None or waited > 0.1
    return [
        Row("ResNet-18, 32 pixels, flip and crop: images/s", f"{speed or 0:.0f}"),
        Row(
            "ResNet-18, 32 pixels: share of time that waits for data (<= 0.1)", f"{waited}", is_late
        ),
    ]


def jpeg(seconds: float) -> list[Row]:
    """Measure ResNet-50 on JPEG files with data.workers=auto. Return rows with images/s and the
    share of time that waits for data.
    """
    clock = Clock(seconds)
    model, pixels, size, links = "resnet50", 224, 128, 16
    with scratch() as base:
        make(base / "images", 64)
        # Add hard links to the same files, which stay in the page cache, so this measures decoding
        # and not the disk.
        for path in sorted((base / "images" / "train").rglob("*.jpg")):
            for link in range(links):
                path.with_stem(f"{path.stem}_{link}_more").hardlink_to(path)
        run = train(
            base / "run",
            *(
                "data=folder",
                f"data.root={base / 'images'}",
                f"data.batch_size={size}",
                "data.workers=auto",
            ),
            *(
                f"data.image_size={pixels}",
                "data.augment.scale=[0.08,1.0]",
                "model=resnet18",
                f"model.name={model}",
            ),
            *(
                "model.channels_last=true",
                "train.precision=bf16",
                "train.epochs=3",
                "train.log_every=5",
            ),
            *("train.evaluate_every=0", "optim.warmup_epochs=0"),
            seconds=clock.left,
        )
        if run.code != 0:
            return [Row("ResNet-50 on JPEG files", f"exit code {run.code}", True)]
        waited, speed = run.result["data_wait"], run.result["throughput"]["images_per_sec"]
    return [
        Row(f"ResNet-50 on JPEG files, {hardware.cores()} cores: images/s", f"{speed or 0:.0f}"),
        Row("ResNet-50 on JPEG files: share of time that waits for data", f"{waited}"),
    ]


def strategies(seconds: float) -> list[Row]:
    """Measure images/s of ResNet-50 with single, dp, ddp and fsdp, on one device and on all
    devices.
    """
    clock, rows = Clock(seconds), []
    count = len(hardware.visible_cuda_devices())
    ways = [
        (kind, devices)
        for devices in sorted({1, count})
        for kind in ("single", "dp", "ddp", "fsdp")
    ]
    for kind, devices in ways:
        if (kind != "single" or devices == 1) and clock.left > seconds / 8:
            base = TRAININGS["ResNet-50"]
            training = replace(
                base, batch_size=base.batch_size // devices * devices, limit=clock.left
            )
            rate = training.ours(devices, kind)["images_per_sec"]
            rows.append(Row(f"ResNet-50: {kind} on {devices}: images/s", f"{rate:.0f}"))
    return rows


def profile(seconds: float) -> list[Row]:
    """Run gpu_profile.py, which measures what the device does between training steps. Return a row
    for each figure.
    """
    done = python(["scripts/maintain/gpu_profile.py", "--accelerator", "cuda"], seconds)
    if done.code != 0:
        return [
            Row(
                "profile",
                f"not run within {seconds:.0f} s" if done.code is None else "failed",
                True,
            )
        ]
    rows = json.loads(done.output.splitlines()[-1])
    return [Row(f"between steps: {name}", f"{value:.2f} ms a step") for name, value in rows.items()]

"""Profile the training loop on a device: `python scripts/maintain/gpu_profile.py --accelerator
cuda`.

The script prints JSON with milliseconds per step: duration, kernels, gaps without a kernel, and
copies.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path

# Python searches the folder of a script for modules, so add the root of the project.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity

from src.app import app
from src.schema import ResolvedConfig
from src.train.build import build_run
from src.train.loop import run_steps
from timm_parallel.machine.ranks import Ranks
from timm_parallel.parallel.build import build_strategy
from timm_parallel.state.parts import RunParts

WARM_UP, STEPS = 5, 20


def busy_and_idle(intervals: Iterable[tuple[float, float]]) -> tuple[float, float, float]:
    """Return three times for a list of time intervals: the time that they cover, the time in the
    gaps between them, and the longest gap.
    """
    busy = idle = longest = 0.0
    end: float | None = None
    for start, stop in sorted(intervals):
        gap = 0.0 if end is None else max(0.0, start - end)
        idle, longest = idle + gap, max(longest, gap)
        busy += stop - (start if end is None else max(start, min(end, stop)))
        end = stop if end is None else max(end, stop)
    return busy, idle, longest


def prepare(*overrides: str) -> tuple[ResolvedConfig, RunParts]:
    """Build a training run on random images from config overrides. Return its config and its
    objects.
    """
    config = app.resolve(app.compose("parallel=single", "data=synthetic", *overrides))
    return config, build_run(config, build_strategy(config.parallel, Ranks(), None))


def measure(accelerator: str, *overrides: str) -> dict[str, float]:
    """Profile the training loop. Return milliseconds per step that the device spends in kernels, in
    gaps and in copies. On a CPU, operators are measured in place of kernels.
    """
    steps = WARM_UP + STEPS
    batch = 64 if accelerator == "cuda" else 8
    _, run = prepare(
        *(f"parallel.accelerator={accelerator}", "parallel.threads_per_device=1", "train.epochs=1"),
        *(
            f"data.batch_size={batch}",
            f"data.kwargs.num_samples={batch * steps}",
            f"train.log_every={WARM_UP}",
        ),
        *overrides,
    )
    cuda = accelerator == "cuda"
    reports = run_steps(run, run.train_loader.epoch(0))
    next(reports)
    began = time.perf_counter()
    with torch.profiler.profile(
        activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    ) as profile:
        for _ in reports:
            pass
    seconds = time.perf_counter() - began
    on = [e for e in profile.events() if (e.device_type == DeviceType.CUDA) == cuda]
    # Leave out annotations. The annotation of the optimizer spans its kernels and also the gaps
    # between them.
    events = [e for e in on if not e.is_user_annotation]
    kernels = [e for e in events if not cuda or not e.name.startswith("Mem")]
    busy, idle, longest = busy_and_idle((e.time_range.start, e.time_range.end) for e in kernels)
    copies, _, _ = busy_and_idle(
        (e.time_range.start, e.time_range.end) for e in events if e.name.startswith("Mem")
    )
    return {
        "step": 1e3 * seconds / STEPS,
        "kernels": busy / 1e3 / STEPS,
        "no kernel runs": idle / 1e3 / STEPS,
        "longest gap": longest / 1e3,
        "copies": copies / 1e3 / STEPS,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--accelerator", choices=["cpu", "cuda"], default="cuda")
    given = parser.parse_args()
    on_device = (
        "model.name=resnet50",
        "data.image_size=224",
        "train.precision=bf16",
        "model.channels_last=true",
    )
    on_cpu = ("model=tiny", "train.precision=bf16")
    print(
        json.dumps(
            measure(given.accelerator, *(on_device if given.accelerator == "cuda" else on_cpu))
        )
    )

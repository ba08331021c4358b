"""Measurements that scripts/maintain/bench.py runs: of train.py and the hand-written loop, of data
loaders, and of commands.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from timm_parallel.record.result import read_metrics, read_result

ROOT = Path(__file__).resolve().parents[2]
# Measurements that run only in every third round, so that all rounds take less than ten minutes.
SELDOM = "default AdamW"
ON_CPU = ("parallel.accelerator=cpu", "model.channels_last=false", "train.precision=fp32")
Figures = dict[str, float]
# Dictionary from the name of a measurement to its figures.
Round = dict[str, Figures]
Measure = Callable[[], Figures]
# Function that measures all rounds in one process.
Part = Callable[[], list[Figures]]


@dataclass
class Training:
    """A training on the CPU that all compared programs run: one epoch of random images. Each
    process has one thread.
    """

    model: str
    kwargs: dict[str, object]
    steps: int
    log_every: int
    batch_size: int = 32
    image_size: int = 32

    def ours(self, world: int) -> Figures:
        """Measure train.py with all its features: TensorBoard, metrics, measurement of speed and
        memory, progress bar, checkpoints, and comparison of the ranks' parameters.
        """
        arguments = [
            *("model=resnet18", f"model.name={self.model}"),
            *("data=synthetic", f"data.kwargs.num_samples={self.steps * self.batch_size}"),
            *(f"+model.kwargs.{key}={value}" for key, value in self.kwargs.items()),
            *(f"data.image_size={self.image_size}", f"data.batch_size={self.batch_size}"),
            *(f"parallel={'ddp' if world > 1 else 'single'}", f"parallel.devices={world}"),
            *("parallel.threads_per_device=1", "optim.warmup_epochs=0"),
            *ON_CPU,
            *("train.epochs=1", f"train.log_every={self.log_every}", "train.evaluate_every=0"),
        ]
        with tempfile.TemporaryDirectory(prefix="bench_") as base:
            folder = Path(base) / "run"
            call([sys.executable, "train.py", *arguments, f"hydra.run.dir={folder}"])
            lines = [
                line for line in read_metrics(folder / "metrics.jsonl") if "train/loss" in line
            ]
            result = read_result(folder)
        first, last = lines[0], lines[-1]
        return {
            "images_per_sec": (last["step"] - first["step"])
            * self.batch_size
            / (last["time"] - first["time"]),
            "first_step": float(result.seconds["start_to_first_step"]),
            "peak_mib": result.memory[0]["peak_bytes"] / 2**20,
            "data_wait": float(result.data_wait or 0),
        }

    def by_hand(self, world: int, optimizer: str = "fused") -> Figures:
        arguments = [
            *("--model", self.model, "--kwargs", json.dumps(self.kwargs), "--optimizer", optimizer),
            *(
                "--steps",
                str(self.steps),
                "--log-every",
                str(self.log_every),
            ),
            *("--batch-size", str(self.batch_size), "--samples", str(self.steps * self.batch_size)),
            *("--image-size", str(self.image_size)),
        ]
        torchrun = (
            ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
            if world > 1
            else []
        )
        with tempfile.TemporaryDirectory(prefix="bench_") as log:
            began = time.time()
            figures = parse_output(
                [
                    sys.executable,
                    *torchrun,
                    "scripts/maintain/bench_loop.py",
                    *arguments,
                    "--tensorboard",
                    log,
                ]
            )
        return {"first_step": figures.pop("first_step_at") - began, **figures}


TRAININGS = {
    "tiny": Training(
        "vit_tiny_patch16_224",
        {"img_size": 32, "embed_dim": 32, "depth": 2, "num_heads": 2},
        800,
        50,
    ),
    "resnet18": Training("resnet18", {}, 24, 6),
    "small ViT": Training(
        "vit_tiny_patch16_224",
        {"img_size": 32, "patch_size": 4, "embed_dim": 96, "depth": 4, "num_heads": 3},
        24,
        6,
    ),
}


def call(command: list[str]) -> str:
    """Run a command and return its stdout. Raises RuntimeError with the output if the command
    fails, and TimeoutExpired if it takes longer than five minutes.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    if done.returncode:
        raise RuntimeError(
            f"{' '.join(command)}: exited with code {done.returncode}, expected 0; the output ends "
            f"with\n{(done.stdout + done.stderr)[-2000:]}"
        )
    return done.stdout


def parse_output(command: list[str]) -> Any:
    """Run a command, and parse the last line of its output that is JSON."""
    return json.loads(
        [line for line in call(command).splitlines() if line.startswith(("{", "["))][-1]
    )


def timed(command: list[str], exit_code: int = 0) -> Figures:
    began = time.perf_counter()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, check=False, timeout=60)
    assert done.returncode == exit_code, (command, done.returncode)
    return {"seconds": time.perf_counter() - began}


def measures() -> dict[str, Measure]:
    """Return the measurements that start new processes, as a dictionary from name to function."""
    train = [sys.executable, "train.py"]
    functions: dict[str, Measure] = {}
    for name, training in TRAININGS.items():
        for world in (1, 2):
            functions[f"{name} x{world}"] = partial(training.ours, world)
            functions[f"{name} x{world} by hand"] = partial(training.by_hand, world)
    functions["default AdamW"] = partial(TRAININGS["resnet18"].by_hand, 1, "default")
    functions["import hydra"] = partial(timed, [sys.executable, "-c", "import hydra"])
    functions["--help"] = partial(timed, [*train, "--help"])
    functions["--cfg job"] = partial(timed, [*train, "--cfg", "job"])
    functions["a refused config"] = partial(timed, [*train, "optim.learning_rate=1"], exit_code=2)
    return functions


def parts(images: Path, rounds: int) -> dict[str, Part]:
    """Return the measurements that run all rounds in one process, as a dictionary from name to
    function.
    """
    command = [
        sys.executable,
        "scripts/maintain/bench_data.py",
        "measure",
        str(images),
        "--rounds",
        str(rounds),
    ]
    return {"JPEG loading": partial(parse_output, command)}


def derive(done: Round) -> None:
    """Add to the figures of a round those that are computed from other measurements, such as the
    speed-up of ddp.
    """
    for suffix in ("", " by hand"):
        one, two = (done[f"resnet18 x{world}{suffix}"]["images_per_sec"] for world in (1, 2))
        done[f"ddp{suffix}"] = {"speed-up": two / one}
    for name, rate in done["JPEG loading"].items():
        done[f"JPEG {name}"] = {"images_per_sec": rate}
    for workers in (1, 2):
        done[f"JPEG core x{workers}"] = {
            "images_per_sec": workers * done["JPEG core"]["images_per_sec"]
        }

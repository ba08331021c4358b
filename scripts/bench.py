"""train.py against a loop written by hand, on this machine: fresh processes, in turns, medians of the rounds' ratios.

    python scripts/bench.py              # everything: make bench
    python scripts/bench.py --only tiny  # the rows whose name has this in it

The table is printed, and written with every figure to outputs/bench/<time>/bench.json. A target that is missed, but lies
within the rounds' spread, is reported as such: the machine cannot tell. Peers are measured where they are installed
(pip install -r requirements-bench.txt).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a file: Python adds scripts/, not the root

from src import machine
from src.records import claim_folder, read_metrics, read_result, write_json

ROOT = Path(__file__).resolve().parent.parent
PEERS = ("lightning", "accelerate")
Figures = dict[str, float]
Round = dict[str, Figures]  # what was measured -> its figures
Measure = Callable[[], Figures]


@dataclass
class Training:
    """The same training for all sides: one epoch of random images of 32x32 on one thread per process."""

    model: str
    kwargs: dict[str, object]
    steps: int
    log_every: int
    batch_size: int = 32

    def ours(self, world: int) -> Figures:
        """With everything on: TensorBoard, metrics, meters, progress bar, checkpoints, proof."""
        words = [
            *("model=resnet18", f"model.name={self.model}", "data=synthetic", "data.image_size=32"),
            *(f"+model.kwargs.{key}={value}" for key, value in self.kwargs.items()),
            *(f"data.kwargs.num_samples={self.steps * self.batch_size}", f"data.batch_size={self.batch_size}"),
            *(f"parallel={'ddp' if world > 1 else 'single'}", f"parallel.devices={world}"),
            *("parallel.accelerator=cpu", "parallel.threads_per_device=1", "optim.warmup_epochs=0"),
            *("train.epochs=1", f"train.log_every={self.log_every}", "train.evaluate_every=0"),
        ]
        with tempfile.TemporaryDirectory(prefix="bench_") as base:
            folder = Path(base) / "run"
            call([sys.executable, "train.py", *words, f"hydra.run.dir={folder}"])
            lines = [line for line in read_metrics(folder / "metrics.jsonl") if "train/loss" in line]
            result = read_result(folder)
        first, last = lines[0], lines[-1]
        return {
            "images_per_sec": (last["step"] - first["step"]) * self.batch_size / (last["time"] - first["time"]),
            "first_step": float(result.seconds["start_to_first_step"]),
            "peak_mib": result.memory[0]["peak_bytes"] / 2**20,
            "data_wait": float(result.data_wait or 0),
        }

    def by_hand(self, world: int, optimizer: str = "fused", peer: str | None = None) -> Figures:
        words = [
            *("--model", self.model, "--kwargs", json.dumps(self.kwargs), "--optimizer", optimizer),
            *("--steps", str(self.steps), "--warm-up", str(self.log_every), "--log-every", str(self.log_every)),
            *("--batch-size", str(self.batch_size), "--samples", str(self.steps * self.batch_size)),
        ]
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)] if world > 1 else []
        script = ["scripts/bench_peers.py", peer] if peer else ["scripts/bench_loop.py"]
        with tempfile.TemporaryDirectory(prefix="bench_") as log:
            began = time.time()
            figures = said([sys.executable, *torchrun, *script, *words, "--tensorboard", log])
        return {**figures, "first_step": figures["first_step_at"] - began}


TRAININGS = {
    "tiny": Training("vit_tiny_patch16_224", {"img_size": 32, "embed_dim": 32, "depth": 2, "num_heads": 2}, 1000, 50),
    "resnet18": Training("resnet18", {}, 50, 10),
    "small ViT": Training(
        "vit_tiny_patch16_224", {"img_size": 32, "patch_size": 4, "embed_dim": 96, "depth": 4, "num_heads": 3}, 60, 10
    ),
}


def call(command: list[str]) -> str:
    """The standard output of a command that must succeed. Errors: RuntimeError with what it said."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=300)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: exit code {done.returncode}\n{(done.stdout + done.stderr)[-2000:]}")
    return done.stdout


def said(command: list[str]) -> Figures:
    """The figures that a command prints in JSON, on a line of their own."""
    figures: Figures = json.loads([line for line in call(command).splitlines() if line.startswith("{")][-1])
    return figures


def timed(command: list[str], exit_code: int = 0) -> Figures:
    began = time.perf_counter()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, check=False, timeout=60)
    assert done.returncode == exit_code, (command, done.returncode)
    return {"seconds": time.perf_counter() - began}


def measures(images: Path) -> dict[str, Measure]:
    """Name -> what measures it, in processes of its own."""
    train, data = [sys.executable, "train.py"], [sys.executable, "scripts/bench_data.py"]
    found: dict[str, Measure] = {}
    for name, training in TRAININGS.items():
        for world in (1, 2):
            found[f"{name} x{world}"] = partial(training.ours, world)
            found[f"{name} x{world} by hand"] = partial(training.by_hand, world)
    for peer in PEERS:
        if importlib.util.find_spec(peer):
            found[f"tiny x1 {peer}"] = partial(TRAININGS["tiny"].by_hand, 1, peer=peer)
    found["default AdamW"] = partial(TRAININGS["resnet18"].by_hand, 1, "default")
    for what, workers in (("ours", 1), ("timm", 1), ("ours", 2), ("timm", 2), ("core", 0)):
        found[f"JPEG {what} x{workers}"] = partial(said, [*data, what, str(images), "--workers", str(workers)])
    found["import hydra"] = partial(timed, [sys.executable, "-c", "import hydra"])
    found["--help"] = partial(timed, [*train, "--help"])
    found["--cfg job"] = partial(timed, [*train, "--cfg", "job"])
    found["a refused config"] = partial(timed, [*train, "optim.learning_rate=1"], exit_code=2)
    for part in ("evaluation", "checkpoint"):
        found[part] = partial(said, [sys.executable, "scripts/bench_parts.py", part])
    return found


def derive(done: Round) -> None:
    """Figures that are made of others."""
    for suffix in ("", " by hand"):
        one, two = (done[f"resnet18 x{world}{suffix}"]["images_per_sec"] for world in (1, 2))
        done[f"ddp{suffix}"] = {"speed-up": two / one}
    for workers in (1, 2):
        done[f"{workers} cores"] = {"images_per_sec": workers * done["JPEG core x0"]["images_per_sec"]}
    done["checkpoint"]["share"] = done["checkpoint"]["save_s"] / (500 * done["checkpoint"]["step_s"])


@dataclass
class Row:
    """One target: `figure` of `ours` over that of `other`; or less it, or alone where there is no other."""

    name: str
    figure: str
    ours: str
    other: str | None
    target: float | None  # None: told for comparison
    less_is_better: bool = False
    difference: bool = False

    def value(self, done: Round) -> float:
        own = done[self.ours][self.figure]
        if self.other is None:
            return own
        return own - done[self.other][self.figure] if self.difference else own / done[self.other][self.figure]

    def judge(self, values: list[float]) -> str:
        """met, MISSED, or that the rounds lie on both sides."""
        if self.target is None:
            return ""
        sign, median = -1 if self.less_is_better else 1, statistics.median(values)
        if sign * median >= sign * self.target:
            return "met"
        return "within the spread" if max(sign * value for value in values) >= sign * self.target else "MISSED"


def rows(measured: Collection[str]) -> list[Row]:
    """Every target, in the order of the table."""
    rate = "images_per_sec"
    found = []
    for name, target in (("tiny", 0.95), ("resnet18", 0.99), ("small ViT", 0.99)):
        for world in (1, 2):
            sides = (f"{name} x{world}", f"{name} x{world} by hand")
            found.append(Row(f"{name} x{world}: images/s over the hand-written loop's", rate, *sides, target))
    for peer in PEERS:
        if f"tiny x1 {peer}" in measured:
            sides = (f"tiny x1 {peer}", "tiny x1 by hand")
            found.append(Row(f"{peer}, tiny x1: images/s over the hand-written loop's", rate, *sides, None))
    found += [
        Row("resnet18: speed-up of ddp x2 over the hand-written", "speed-up", "ddp", "ddp by hand", 0.98),
        Row("resnet18 x1: images/s over torch's default AdamW", rate, "resnet18 x1", "default AdamW", 1.4),
        Row("command to first step, x1", "first_step", "tiny x1", "tiny x1 by hand", 1.15, True),
        Row("command to first step, x2", "first_step", "tiny x2", "tiny x2 by hand", 1.0, True),
        *(
            Row(f"{name}: peak memory", "peak_mib", f"{name} x1", f"{name} x1 by hand", 1.1, True)
            for name in ("tiny", "resnet18")
        ),
        *(
            Row(f"{name}: seconds more than import hydra", "seconds", name, "import hydra", 0.4, True, difference=True)
            for name in ("--help", "--cfg job", "a refused config")
        ),
    ]
    for workers in (1, 2):
        ours = f"JPEG ours x{workers}"
        found.append(
            Row(f"JPEG, {workers} workers: images/s over timm's loader", rate, ours, f"JPEG timm x{workers}", 1.4)
        )
        found.append(Row(f"JPEG, {workers} workers: images/s over a core's", rate, ours, f"{workers} cores", 0.9))
    return [
        *found,
        Row("synthetic data: share of a step spent waiting", "data_wait", "resnet18 x1", None, 0.005, True),
        Row("evaluation: images/s over a hand-written loop's", "ratio", "evaluation", None, 0.97),
        Row("resnet50: time that a checkpoint every 500 steps adds", "share", "checkpoint", None, 0.02, True),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="measure what has this in its name, without the table")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench_") as images:
        call([sys.executable, "scripts/bench_data.py", "make", images])
        wanted = {name: measure for name, measure in measures(Path(images)).items() if given.only in name}
        done = [measure_all(wanted, number, given.rounds) for number in range(given.rounds)]
    if given.only:
        for name in wanted:
            print(name, {figure: statistics.median(one[name][figure] for one in done) for figure in done[0][name]})
        return 0
    for one in done:
        derive(one)
    table = [(row, [row.value(one) for one in done]) for row in rows(wanted)]
    show(table)
    folder = claim_folder(ROOT / "outputs" / "bench" / time.strftime("%Y-%m-%d/%H-%M-%S"))
    lines = [
        {"name": row.name, "values": values, "target": row.target, "is": row.judge(values)} for row, values in table
    ]
    write_json(folder / "bench.json", {"machine": about(), "rows": lines, "rounds": done})
    print(f"every figure: {folder / 'bench.json'}")
    return 1 if any(row.judge(values) == "MISSED" for row, values in table) else 0


def measure_all(wanted: dict[str, Measure], number: int, of: int) -> Round:
    """One round: everything once, one after the other."""
    began, done = time.perf_counter(), {name: measure() for name, measure in wanted.items()}
    print(f"round {number + 1} of {of}: {time.perf_counter() - began:.0f} s, {about()['load']}", file=sys.stderr)
    return done


def about() -> dict[str, object]:
    """The machine and how busy it is."""
    versions = {name: metadata.version(name) for name in ("torch", "torchvision", "timm")}
    load = f"load {os.getloadavg()[0]:.1f} on {machine.cores()} cores"
    return {"processor": platform.processor() or platform.machine(), "load": load, **versions}


def show(table: list[tuple[Row, list[float]]]) -> None:
    """The table: what, median, spread, target, verdict."""
    width = max(len(row.name) for row, _ in table)
    print(f"{'':{width}s}  median  lowest highest   target")
    for row, values in table:
        numbers = "  ".join(f"{value:6.3f}" for value in (statistics.median(values), min(values), max(values)))
        sign = "<=" if row.less_is_better else ">="
        print(
            f"{row.name:{width}s}  {numbers}  {f'{sign} {row.target}' if row.target is not None else '':>8s}  {row.judge(values)}"
        )


if __name__ == "__main__":
    sys.exit(main())

"""Train a workload with several programs in turns, and measure images/s in each round.

    python scripts/maintain/bench_rounds.py ResNet-50 cuda 5    # workload, accelerator, rounds

All programs live in this process, and only one of them trains at a time. So they share the start,
the device and its clocks, and a round takes a second. The first round of a program is not measured:
it compiles and chooses kernels. The script prints a line of JSON after each round, with the figures
of all rounds so far.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from itertools import chain, count, repeat
from pathlib import Path
from typing import Any

# Python searches the folder of a script for modules, so add the root of the project.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch.distributed import TCPStore

from scripts.maintain import bench_data, bench_loop
from scripts.maintain.bench_speed import (
    AUGMENTED,
    BY_HAND,
    COMPILED,
    COMPILED_BY_HAND,
    CPU_WORKLOADS,
    FSDP,
    LIGHTNING,
    OURS,
    PIL,
    REDUCED,
    TIMMS_LOADER,
    TORCHCODEC,
    WORKLOADS,
    Workload,
)
from timm_parallel import compose, resolve, start_run
from timm_parallel.data import decode

# Number of different JPEG files. They stay in the page cache, so reading them measures decoding.
FILES = 64
# Generator that trains the steps of an interval and then waits for the device. It yields the
# seconds that the device waited for data (None: unknown), and the seconds that do not count.
Program = Generator[tuple[float | None, float], None, None]


def ours(
    workload: Workload, accelerator: str, folder: Path, images: Path, *overrides: str
) -> Program:
    """Train as train.py does, with all its logs."""
    jpeg = (
        *("data=folder", f"data.root={images}", "data.workers=auto"),
        *("data.augment.scale=[0.08,1.0]", "data.augment.hflip=0.5"),
    )
    random = ("data=synthetic", f"data.kwargs.num_samples={workload.samples}")
    config = resolve(
        compose(
            *("model=resnet18", f"model.name={workload.model}", "optim.warmup_epochs=0"),
            *(jpeg if workload.reads_jpeg else random),
            *(f"data.image_size={workload.pixels}", f"data.batch_size={workload.batch}"),
            *(f"+model.kwargs.{key}={value}" for key, value in workload.kwargs.items()),
            f"train.precision={workload.precision}",
            f"model.channels_last={workload.channels_last}".lower(),
            *(["parallel.threads_per_device=1"] if accelerator == "cpu" else []),
            *(f"train.log_every={workload.steps}", "print_config=false", "parallel=single"),
            *("train.evaluate_every=0", f"parallel.accelerator={accelerator}"),
            *overrides,
        )
    )
    folder.mkdir()
    store = None
    if config.parallel.has_ranks:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    run = start_run(config, folder, store=store)
    parts = run.parts
    # One endless epoch, because the end of an epoch saves a checkpoint.
    epochs = chain.from_iterable(map(parts.train_loader.epoch, count()))
    parts.train_loader.epoch = lambda *_: epochs  # type: ignore[method-assign]
    parts.steps_per_epoch = 10**9
    meter, waited = parts.hooks.meter, 0.0
    try:
        with run.training() as training:
            for step in training.steps():
                numbers = step.train()
                training.log(numbers)
                if numbers:
                    with parts.hooks.aside():
                        yield meter.data_seconds - waited, 0.0
                    waited = meter.data_seconds
    finally:
        parts.strategy.group.close()


def by_hand(
    workload: Workload, accelerator: str, folder: Path, images: Path, compiled: bool = False
) -> Program:
    """Train with bench_loop.py. Its batches come from memory or, if the workload reads JPEG files,
    from timm's loader.
    """
    device = bench_loop.prepare(accelerator)
    batches = bench_loop.batches(workload, device)
    if workload.reads_jpeg:
        loader = bench_data.timms_loader(workload, images, device)
        batches = (
            (inputs.contiguous(memory_format=bench_loop.layout(workload)), labels)
            for inputs, labels in chain.from_iterable(repeat(loader))
        )
    # The first report comes after one step.
    for step in bench_loop.train(workload, device, batches, folder, compiled):
        if step % workload.steps == 0:
            yield None, 0.0


def lightning(workload: Workload, accelerator: str, folder: Path, images: Path) -> Program:
    """Train with Lightning and its usual logs: bar, TensorBoard and a metric. Lightning cannot
    pause, so each interval is a call of `fit`, whose start, first step and end do not count.
    """
    import lightning as L
    import torchmetrics
    from lightning.pytorch.loggers import TensorBoardLogger

    device = bench_loop.prepare(accelerator)

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.optimizer = bench_loop.model_and_optimizer(workload, device)
            self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=10)
            self.times: list[float] = []

        def training_step(self, batch: bench_loop.Batch, index: int) -> torch.Tensor:
            outputs = self.model(batch[0])
            loss = torch.nn.functional.cross_entropy(outputs, batch[1])
            self.accuracy(outputs, batch[1])
            self.log("train/loss", loss, prog_bar=True)
            self.log("train/acc", self.accuracy)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return self.optimizer

        def on_train_batch_end(self, outputs: object, batch: object, index: int) -> None:
            if index in (0, workload.steps):
                if accelerator == "cuda":
                    torch.cuda.synchronize()
                self.times.append(time.perf_counter())

    module, batches = Module(), bench_loop.batches(workload, device)
    while True:
        began, module.times = time.perf_counter(), []
        trainer = L.Trainer(
            accelerator="gpu" if accelerator == "cuda" else "cpu",
            devices=1,
            precision="bf16-mixed" if workload.precision == "bf16" else "32-true",
            max_steps=workload.steps + 1,
            logger=TensorBoardLogger(folder),
            enable_checkpointing=False,
        )
        trainer.fit(module, batches)
        first, last = module.times
        yield None, time.perf_counter() - began - (last - first)


# Dictionary from the name of a program to its function and the further arguments of it.
PROGRAMS: dict[str, tuple[Callable[..., Program], tuple[Any, ...]]] = {
    BY_HAND: (by_hand, ()),
    COMPILED_BY_HAND: (by_hand, (True,)),
    TIMMS_LOADER: (by_hand, ()),
    OURS: (ours, ()),
    FSDP: (ours, ("parallel=fsdp", "parallel.devices=1")),
    COMPILED: (ours, ("model.compile=true",)),
    REDUCED: (ours, ("model.compile=reduce-overhead",)),
    AUGMENTED: (ours, ("data.augment.hflip=0.5", "data.augment.crop_padding=4")),
    TORCHCODEC: (ours, ()),
    PIL: (ours, ()),
    LIGHTNING: (lightning, ()),
}


def measure(workload: Workload, accelerator: str, rounds: int, base: Path) -> None:
    """Run the programs of a workload in turns, and print their figures after each round."""
    if workload.reads_jpeg:
        intervals = 1 + rounds * (1 + workload.untimed)
        images = intervals * workload.steps * workload.batch
        bench_data.make(base / "images", FILES, links=1 + images // FILES)
    programs: dict[str, Program] = {}
    missing: dict[str, str] = {}
    resident: dict[str, int] = {}
    for name in dict.fromkeys((*workload.programs.values(), *workload.programs)):
        function, more = PROGRAMS[name]
        folder = base / str(len(resident) + len(missing))
        program = function(workload, accelerator, folder, base / "images", *more)
        before = torch.cuda.memory_allocated()
        try:
            if name == TORCHCODEC:
                import torchcodec as torchcodec
            # The workers of a program start in its first interval, and keep their decoder. PIL is
            # the last program.
            if name == PIL:
                decode.find_jpeg_decoder = lambda: None  # type: ignore[assignment]
            next(program)
        # Catch all errors, so that the other programs still run.
        except Exception as error:
            missing[name] = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            continue
        programs[name], resident[name] = program, torch.cuda.memory_allocated() - before
    rates: dict[str, list[float]] = {name: [] for name in programs}
    peaks: dict[str, int] = dict.fromkeys(programs, 0)
    waits: dict[str, list[float]] = {}
    for done in range(1, rounds + 1):
        for name, program in programs.items():
            for _ in range(workload.untimed):
                next(program)
            if accelerator == "cuda":
                torch.cuda.reset_peak_memory_stats()
            others = torch.cuda.memory_allocated() - resident[name]
            began = time.perf_counter()
            waited, excluded = next(program)
            seconds = time.perf_counter() - began - excluded
            rates[name].append(workload.batch * workload.steps / seconds)
            if waited is not None:
                waits.setdefault(name, []).append(waited / seconds)
            peaks[name] = max(peaks[name], torch.cuda.max_memory_allocated() - others)
        figures = {"rates": rates, "bytes": peaks, "waits": waits, "missing": missing}
        print(json.dumps({**figures, "rounds": done}), flush=True)
    for program in programs.values():
        program.close()


if __name__ == "__main__":
    workload, accelerator, rounds = sys.argv[1:]
    with tempfile.TemporaryDirectory(prefix="bench_rounds_") as folder:
        measure((WORKLOADS | CPU_WORKLOADS)[workload], accelerator, int(rounds), Path(folder))

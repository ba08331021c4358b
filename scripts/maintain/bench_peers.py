"""The training of scripts/maintain/bench_loop.py in other people's frameworks, with their usual logging on.

    pip install -r requirements-bench.txt
    python scripts/maintain/bench_peers.py lightning|accelerate --steps 100
    [torchrun --nproc-per-node 2] scripts/maintain/bench_peers.py timm <folder of images> <loader workers> --steps 50

Options and output as of bench_loop.py. timm's train.py is not in its package: its pieces are put together as there.
"""

import argparse
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a file: Python adds its folder, not the root

import torch
from torch.nn.functional import cross_entropy

from scripts.maintain.bench_data import timms_loader
from scripts.maintain.bench_loop import data, model_and_optimizer, options, report


class Batches:
    """The batches of the hand-written loop, as an iterable of as many steps as were asked for."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given, (self.images, self.labels) = given, data(given)
        self.mean = torch.full((1, 3, 1, 1), 127.5)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for indices in torch.randperm(self.given.samples).split(self.given.batch_size)[: self.given.steps]:
            yield self.images[indices].sub(self.mean).div_(127.5), self.labels[indices]

    def __len__(self) -> int:
        return min(self.given.steps, self.given.samples // self.given.batch_size)


class Clock:
    """When the first step and the warm-up were done."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given, self.step, self.first, self.began = given, 0, 0.0, 0.0

    def step_done(self, reports: bool = True) -> None:
        self.step += 1
        if self.step == 1:
            self.first = time.time()
        if self.step == self.given.warm_up:
            self.began = time.perf_counter()
        if self.step == self.given.steps and reports:
            report(self.given, self.first, time.perf_counter() - self.began)


def accelerate(given: argparse.Namespace) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, log_with="tensorboard", project_dir=given.tensorboard)
    accelerator.init_trackers("bench")
    model, optimizer = accelerator.prepare(*model_and_optimizer(given, torch.device("cpu")))
    clock = Clock(given)
    for inputs, targets in Batches(given):
        loss = cross_entropy(model(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if (clock.step + 1) % given.log_every == 0:
            accelerator.log({"train/loss": loss.item()}, step=clock.step + 1)
        clock.step_done()
    accelerator.end_training()


def lightning(given: argparse.Namespace) -> None:
    import lightning
    from lightning.pytorch.loggers import TensorBoardLogger

    model, optimizer = model_and_optimizer(given, torch.device("cpu"))

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.clock = model, Clock(given)

        def training_step(self, batch: Any) -> torch.Tensor:
            loss = cross_entropy(self.model(batch[0]), batch[1])
            self.log("train/loss", loss, prog_bar=True)
            return loss

        def on_train_batch_end(self, *_: Any) -> None:
            self.clock.step_done()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer

    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=TensorBoardLogger(given.tensorboard),
        log_every_n_steps=given.log_every,
    )
    trainer.fit(Module(), Batches(given))


def timms(given: argparse.Namespace, folder: Path, workers: int) -> None:
    """What timm's train.py does in a step: its loader, optimizer, schedule and meters, torch's DDP, a line of log."""
    import timm
    import torch.distributed as dist
    from timm.optim import create_optimizer_v2
    from timm.scheduler import create_scheduler_v2
    from timm.utils import AverageMeter, reduce_tensor

    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    model = timm.create_model(given.model, num_classes=10, **given.kwargs).train()
    optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05)
    if world > 1:
        dist.init_process_group("gloo")
        model = torch.nn.parallel.DistributedDataParallel(model)
    loader = timms_loader(folder, workers, given.batch_size // world, distributed=world > 1)
    schedule, _ = create_scheduler_v2(optimizer, num_epochs=1, updates_per_epoch=len(loader), step_on_epochs=False)
    losses, clock = AverageMeter(), Clock(given)
    for inputs, targets in loader:
        loss = cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        if world == 1:
            losses.update(loss.item(), len(inputs))
        optimizer.zero_grad()
        if (clock.step + 1) % given.log_every == 0:
            if world > 1:
                losses.update(reduce_tensor(loss.data, world).item(), len(inputs))
            print(f"step {clock.step + 1} loss {losses.val:.3f} ({losses.avg:.3f})", file=sys.stderr)
        schedule.step_update(clock.step + 1, metric=losses.avg)
        clock.step_done(rank == 0)
        if clock.step == given.steps:
            break
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    peer = sys.argv.pop(1)
    if peer == "timm":
        images, loader_workers = Path(sys.argv.pop(1)), int(sys.argv.pop(1))
        timms(options(), images, loader_workers)
    else:
        {"accelerate": accelerate, "lightning": lightning}[peer](options())

"""What a run checks before its first step, shows on the console, and writes into result.json."""

from __future__ import annotations

import gc
import json
import logging
import os
import shlex
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil
import torch

from src.engine.machine.process import process_started_at
from src.engine.machine.ranks import host_name
from src.engine.record.result import Result
from src.models.build import count_parameters
from src.run.build import Run
from src.run.figures import figures
from src.schema import ResolvedConfig
from src.training.profile import summary_lines

log = logging.getLogger(__name__)


@dataclass
class Proof:
    """Measured before the first step."""

    world_size: int
    parameters_hash: str


def prove_start(run: Run) -> Proof:
    """Measure the world size and that all ranks hold the same parameters.

    Raises RuntimeError when they do not; training on would give each rank a model of its own.
    """
    digest, equal = run.strategy.parameters_hash(run.state.model)
    if not equal:
        raise RuntimeError("the ranks start with different parameters; does the model draw random numbers elsewhere?")
    measured, asked = run.strategy.measured_world_size(), run.config.parallel.devices
    if measured != asked:
        raise RuntimeError(f"world size: {asked} devices were asked for, but {measured} take part")
    return Proof(measured, digest)


def show_banner(run: Run, folder: Path) -> None:
    """A few aligned lines: what runs, where, on what."""
    if run.strategy.is_first:
        for name, fact in _facts(run, folder).items():
            log.info("%8s  %s", name, fact)


def _facts(run: Run, folder: Path) -> dict[str, str]:
    config, strategy, parallel = run.config, run.strategy, run.config.parallel
    batch, devices, requests = config.global_batch, parallel.devices, run.train.requests
    on = f"{devices} {parallel.accelerator} device{'s' * (devices > 1)}"
    if parallel.accelerator == "cpu":
        on += f" of {parallel.threads_per_device} thread{'s' * (parallel.threads_per_device > 1)}"
        on += " (threads on CPU: its speed says nothing about GPUs)" if strategy.kind == "dp" else ""
    rule = config.optim.lr_rule
    scaled = (
        "" if rule == "none" else f" = {config.optim.lr:g} x {rule} rule to batch {batch * config.train.accumulate}"
    )
    chunks = strategy.chunk_sizes(batch)
    per_device = str(chunks[0]) if len(set(chunks)) == 1 else str(chunks)
    steps = f"{run.total_steps} = {config.train.epochs} epochs x {run.steps_per_epoch}"
    if config.train.max_steps is not None:
        steps = f"{run.total_steps} (max_steps)"
    workers = run.train.num_workers
    loading = f"{workers} loader process{'es' * (workers > 1)} per rank" if workers else "read without loader processes"
    return {
        "model": f"{config.model.name}, {count_parameters(run.state.model):,} parameters, {config.train.precision}",
        "data": f"{config.data.name}, {requests.num_images:,} training images, {requests.dropped} dropped per epoch, "
        f"{loading}",
        "strategy": f"{strategy.kind} on {on}" + (f", {strategy.backend}" if strategy.backend else ""),
        "batch": f"{batch} global, {per_device} per device"
        + (f", x {config.train.accumulate} accumulated" * (config.train.accumulate > 1)),
        "steps": steps + (f", from {run.state.progress.step}" if run.state.progress.step else ""),
        "lr": f"{config.learning_rate:g}{scaled}, {config.optim.sched}",
        "folder": str(folder),
    }


def make_result(run: Run, folder: Path, proof: Proof, digest: str, drifted: list[str]) -> Result:
    """The result of a finished run. `digest` and `drifted` are drift.py's, of the last step. Collective."""
    config, strategy, step, meter = run.config, run.strategy, run.state.progress.step, run.moments.meter
    measured = figures(run)
    state_bytes = strategy.gather(_state_bytes(run.state.optimizer))
    result = Result(
        status="done",
        strategy=strategy.kind,
        accelerator=config.parallel.accelerator,
        devices=config.parallel.devices,
        threads_per_device=config.parallel.threads_per_device,
        world_size=proof.world_size,
        processes=strategy.world_size,
        nodes=config.cluster.nodes,
        hosts=list(dict(strategy.gather([strategy.node, host_name()])).values()),
        backend=strategy.backend,
        tags=config.tags,
        model=config.model.name,
        parameters=count_parameters(run.state.model),
        batch_size=config.global_batch,
        steps=step,
        epochs=step / run.steps_per_epoch,
        samples_seen=step * config.global_batch * config.train.accumulate,
        dropped_per_epoch=run.train.requests.dropped,
        skipped=_skipped(run),
        train={"loss": run.state.progress.epoch_loss},
        val=run.numbers["val"],
        test=run.numbers.get("test", {}),
        **(measured | {"flags": measured["flags"] + drifted}),
        memory=strategy.memory(),
        started=datetime.fromtimestamp(_started()).astimezone().isoformat(timespec="seconds"),
        commit=_commit(folder),
        profile=[own for own in strategy.gather(run.moments.profile(folder)) if own],
        seconds=_seconds(meter.first_step_at),
        parameters_hash=digest,
        checkpoint=f"checkpoints/{'best' if (folder / 'checkpoints' / 'best.pt').exists() else 'last'}.pt",
        proof={
            "parameters_hash_start": proof.parameters_hash,
            "hashes_equal": not drifted,
            "chunk_sizes": strategy.chunk_sizes(config.global_batch),
            "optimizers": sum(strategy.gather(_count_optimizers())),
            "optimizer_state_bytes": state_bytes,
            "files_per_rank": dict(enumerate(strategy.gather(_open_files(folder)))),
            **_count_indices(run),
        },
    )
    result.objective = objective(result, config.optimized_metric)
    return result


def objective(result: Result, name: str) -> float | None:
    """The value of `optimized_metric` in a result."""
    if name == "images_per_sec":
        return result.throughput.get("images_per_sec")
    split, _, metric = name.partition("/")
    return getattr(result, split).get(metric)  # type: ignore[no-any-return]


def show_end(config: ResolvedConfig, folder: Path, result: Result) -> None:
    """The last lines: where the run is, how good, and how to look at it."""
    found = f"val/acc {result.val['acc']:.4f} (best {result.val['acc_best']:.4f})"
    found += f", test/acc {result.test['acc']:.4f}" if result.test else ""
    of_split = {"val": result.val, "test": result.test}
    averaged = [f"{split}/acc_ema {n['acc_ema']:.4f}" for split, n in of_split.items() if "acc_ema" in n]
    log.info("run folder   %s", folder)
    log.info("accuracy     %s", ", ".join([found, *averaged]))
    if config.train.target_loss is not None:
        log.info("target       %s", _against_target(result.train["loss"], config.train.target_loss))
    for line in summary_lines(result.profile[0], folder) if result.profile else ():
        log.info("%s", line)
    log.info("curves       tensorboard --logdir %s", shlex.quote(str(folder)))


def _against_target(loss: float | None, target: float) -> str:
    """Says if the last epoch's mean loss reached `train.target_loss`, and where to look if not."""
    if loss is not None and loss <= target:
        return f"reached: train/loss {loss:.4f}, train.target_loss={target:g}; the model can learn these images"
    found = "there is no train/loss" if loss is None else f"train/loss {loss:.4f}"
    return (
        f"not reached: {found}, train.target_loss={target:g}; look at the labels, the loss, optim.lr, or train longer"
    )


def _skipped(run: Run) -> dict[str, int]:
    """How many images of each split could not be read, by any rank; says so where there are any. Collective."""
    counts, first = {}, ""
    for name, loader in {"train": run.train, **run.evaluation}.items():
        indices = sorted({index for own in run.strategy.gather(sorted(loader.unreadable)) for index in own})
        if indices:
            counts[name] = len(indices)
            files = getattr(loader.reader.split, "files", None)
            first = first or (str(files[indices[0]][0]) if files else f"number {indices[0]}")
    if counts and run.strategy.is_first:
        each = ", ".join(f"{split} {count}" for split, count in counts.items())
        log.info("skipped      unreadable images: %s; the first: %s", each, first)
    return counts


def _count_indices(run: Run) -> dict[str, int | None]:
    """Counted by the loaders of all ranks: the indices read in the last whole epoch, else in the newest. Collective."""
    train, strategy = run.train, run.strategy
    whole = all(strategy.gather(train.reads_of_whole is not None))
    reads = train.reads_of_whole if whole else train.reads
    if reads is None or not all(strategy.gather(reads is not None)):  # resumed at its end: nothing was read
        return {"indices_seen": None, "indices_distinct": None, "indices_expected": None}
    counts = strategy.sum(torch.from_numpy(reads.counts()).to(strategy.device, torch.int32))
    return {
        "indices_seen": int(counts.sum()),
        "indices_distinct": int(counts.count_nonzero()),
        "indices_expected": train.batches_per_epoch * train.requests.batch_size if whole else None,
    }


def _count_optimizers() -> int:
    """Optimizers of this process that hold state. One that wraps another (timm's lookahead) shares its parameter groups."""
    kinds = torch.optim.Optimizer
    found = (thing for thing in gc.get_objects() if issubclass(type(thing), kinds))
    return len({id(optimizer.param_groups) for optimizer in found if optimizer.state})


def _open_files(folder: Path) -> int:
    """Files of the run folder that this rank writes: those it holds open (TensorBoard opens its own at times only)."""
    try:
        paths = {file.path for file in psutil.Process().open_files()}  # a log may be open more than once
        return sum(Path(path).is_relative_to(folder.resolve()) for path in paths)
    except psutil.Error:
        return 0


def _state_bytes(optimizer: Any) -> int:
    """Bytes of optimizer state on this rank; of sharded state, its own part."""
    tensors = [v for state in optimizer.state.values() for v in state.values() if hasattr(v, "element_size")]
    own = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]
    return sum(tensor.numel() * tensor.element_size() for tensor in own)


def _started() -> float:
    """When the command began, as time.time() counts."""
    started = float(os.environ.get("RUN_STARTED_AT", 0))
    return started or process_started_at(os.getppid())  # torchrun: its start is the parent's


def _seconds(first_step_at: float | None) -> dict[str, float | None]:
    """From the command to the first step's end, and to now."""
    started = _started()
    return {
        "start_to_first_step": None if first_step_at is None else first_step_at - started,
        "total": time.time() - started,
    }


def _commit(folder: Path) -> str | None:
    """The code's, as the run's environment.json has it; ranks of other nodes may not see that file."""
    try:
        return json.loads((folder / "environment.json").read_text(encoding="utf-8"))["commit"]  # type: ignore[no-any-return]
    except (OSError, ValueError, KeyError):
        return None

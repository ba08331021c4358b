"""What a run checks and shows, before its first step and after its last; and what it has counted as a proof."""

from __future__ import annotations

import gc
import logging
import shlex
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

from src.engine.record.result import Result
from src.models.build import count_parameters
from src.parallel.single import Single
from src.run.build import Run
from src.schema import ResolvedConfig
from src.training.profile import summary_lines

log = logging.getLogger(__name__)
# How far ranks may end apart, of the parameters' norm. Rounding alone adds up to some 1e-7 a step, as a random walk: 1e-4 after
# a million steps. Ranks that were each trained on their own are tenths apart.
FARTHEST = 1e-2


def prove_start(run: Run) -> tuple[int, str]:
    """(the world size as measured, the hash of the parameters that all ranks hold).

    Raises RuntimeError when they do not; training on would give each rank a model of its own.
    """
    digest, equal = run.strategy.parameters_hash(run.state.model)
    if not equal:
        raise RuntimeError("the ranks start with different parameters; does the model draw random numbers elsewhere?")
    measured, asked = run.strategy.measured_world_size(), run.config.parallel.devices
    if measured != asked:
        raise RuntimeError(f"world size: {asked} devices were asked for, but {measured} take part")
    return measured, digest


def prove_end(model: nn.Module, strategy: Single) -> tuple[str, list[str]]:
    """(rank 0's hash of all parameters, a flag where the others' is another one). Collective.

    All ranks apply the same averaged gradients. Devices of unlike kinds may round an update differently, and so drift apart
    by a little; on devices of one kind a difference is a fault, which has trained each rank on its own.

    Errors: RuntimeError when ranks on devices of one kind differ, or any by more than rounding explains.
    """
    digest, equal = strategy.parameters_hash(model)
    if equal:
        return digest, []
    kinds = sorted(set(strategy.gather(strategy.kind_of_device)))
    distance = farthest(model, strategy)
    if len(kinds) == 1 or not distance <= FARTHEST:  # not: nan is far too
        raise RuntimeError("the ranks end with different parameters: gradients were not synchronised")
    flag = (
        f"the ranks' devices are of unlike kinds ({', '.join(kinds)}) and have drifted apart, by {distance:.1e} of the "
        "parameters' norm; the checkpoints hold rank 0's"
    )
    if strategy.is_first:
        log.warning("%s", flag)
    return digest, [flag]


@torch.no_grad()
def farthest(model: nn.Module, strategy: Single) -> float:
    """The largest distance of any rank's parameters from the mean of all, over the mean's norm. Collective."""
    distance = norm = 0.0
    for parameter in model.parameters():
        own = strategy.whole(parameter).double()
        mean = strategy.sum(own) / strategy.world_size
        distance += float((own - mean).square().sum())
        norm += float(mean.square().sum())
    return float(max(strategy.gather(distance)) / norm) ** 0.5 if norm else 0.0


def counted(run: Run, folder: Path) -> dict[str, Any]:
    """What `proof` of the result has besides the hashes. Collective."""
    strategy = run.strategy
    return {
        "chunk_sizes": strategy.chunk_sizes(run.config.global_batch),
        "optimizers": sum(strategy.gather(_count_optimizers())),
        "optimizer_state_bytes": strategy.gather(_state_bytes(run.state.optimizer)),
        "files_per_rank": dict(enumerate(strategy.gather(_open_files(folder)))),
        **_count_indices(run),
    }


def _count_indices(run: Run) -> dict[str, int | None]:
    """Counted by the loaders of all ranks: the indices read in the last whole epoch, else in the newest. Collective."""
    train, strategy = run.train, run.strategy
    whole = all(strategy.gather(train.reads_of_whole is not None))
    reads = train.reads_of_whole if whole else train.reads
    if reads is None:  # resumed at its end, as all ranks are: nothing was read
        return {"indices_seen": None, "indices_distinct": None, "indices_expected": None}
    counts = strategy.sum(torch.from_numpy(reads.counts()).to(strategy.device, torch.int32))
    return {
        "indices_seen": int(counts.sum()),
        "indices_distinct": int(counts.count_nonzero()),
        "indices_expected": train.requests.batches_per_epoch * train.requests.batch_size if whole else None,
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
    tensors = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
    return sum((tensor.to_local() if hasattr(tensor, "to_local") else tensor).nbytes for tensor in tensors)


def show_banner(run: Run, folder: Path) -> None:
    """Before the first step: what runs, where, on what."""
    if not run.strategy.is_first:
        return
    config, strategy, parallel = run.config, run.strategy, run.config.parallel
    batch, devices, requests = config.global_batch, parallel.devices, run.train.requests
    on = f"{devices} {parallel.accelerator} device{'s' * (devices > 1)}"
    if parallel.accelerator == "cpu":
        on += f" of {parallel.threads_per_device} thread{'s' * (parallel.threads_per_device > 1)}"
        on += " (threads on CPU: its speed says nothing about GPUs)" if strategy.kind == "dp" else ""
    lr = f"{config.learning_rate:g}"
    if config.optim.lr_rule != "none":
        lr += f" = {config.optim.lr:g} x {config.optim.lr_rule} rule to batch {batch * config.train.accumulate}"
    chunks = strategy.chunk_sizes(batch)
    per_device = chunks[0] if len(set(chunks)) == 1 else chunks
    steps = f"{run.total_steps} = {config.train.epochs} epochs x {run.steps_per_epoch}"
    if config.train.max_steps is not None:
        steps = f"{run.total_steps} (max_steps)"
    workers = run.train.num_workers
    loading = f"{workers} loader process{'es' * (workers > 1)} per rank" if workers else "read without loader processes"
    facts = {
        "model": f"{config.model.name}, {count_parameters(run.state.model):,} parameters, {config.train.precision}",
        "data": f"{config.data.name}, {requests.num_images:,} training images, {requests.dropped} dropped per epoch, "
        f"{loading}",
        "strategy": f"{strategy.kind} on {on}" + (f", {strategy.backend}" if strategy.backend else ""),
        "batch": f"{batch} global, {per_device} per device"
        + (f", x {config.train.accumulate} accumulated" * (config.train.accumulate > 1)),
        "steps": steps + (f", from {run.state.progress.step}" if run.state.progress.step else ""),
        "lr": f"{lr}, {config.optim.sched}",
        "folder": str(folder),
    }
    for name, fact in facts.items():
        log.info("%8s  %s", name, fact)


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
    found = f"train/loss {'none' if loss is None else f'{loss:.4f}'}, train.target_loss={target:g}"
    if loss is not None and loss <= target:
        return f"reached: {found}; the model can learn these images"
    return f"not reached: {found}; look at the labels, the loss, optim.lr, or train longer"

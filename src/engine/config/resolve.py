"""Replaces every `auto` by what this machine has, and refuses what it cannot run. The result is frozen in config.yaml."""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Iterator

from src.engine.config.cluster import fill_in
from src.engine.config.rules import refuse
from src.engine.machine import hardware
from src.engine.machine.platform import WINDOWS, backend_for
from src.schema import Config, DataConfig, ResolvedConfig, as_resolved


def resolve(config: Config, world_size: int | None = None, local_world_size: int | None = None) -> ResolvedConfig:
    """A copy of `config` without `auto` in the keys that decide what a run computes.

    `world_size` and `local_world_size` are given where the ranks were started from outside (torchrun). What this machine,
    or those ranks, cannot run is refused.
    """
    config = copy.deepcopy(config)
    if config.data.batch_size is None and config.data.batch_size_per_device is None:
        config.data.batch_size = DataConfig.batch_size
    _check_who_starts(config, world_size)
    elsewhere = config.cluster.scheduler != "local"
    if elsewhere:
        fill_in(config)
    cuda = len(hardware.visible_cuda_devices())
    _resolve_parallel(config, cuda, world_size)
    parallel = config.parallel
    local = int(parallel.devices)
    if world_size is not None and parallel.has_ranks:
        # With one device: srun may show each task one of its own; launch/nodes.py counts them.
        local = 1 if cuda == 1 else local_world_size or local
    if not elsewhere:
        refuse(_missing_devices(config, cuda, local), _missing_compiler(config))
    if parallel.threads_per_device == "auto":
        parallel.threads_per_device = max(1, hardware.cores() // local)
    if parallel.backend == "auto":
        parallel.backend = backend_for(parallel.accelerator)
    resolved = as_resolved(config)
    refuse(_unfit_batch(resolved))
    return resolved


def remarks(asked: Config, resolved: ResolvedConfig, world_size: int | None = None) -> list[str]:
    """A line for each choice of `auto` that the user may not expect."""
    if resolved.cluster.scheduler != "local":
        return []  # nothing depends on this machine
    parallel, cuda, said = resolved.parallel, len(hardware.visible_cuda_devices()), []
    of_all = asked.parallel.devices == "auto" and asked.parallel.device_ids is None and world_size is None
    if of_all and asked.parallel.strategy != "single" and parallel.accelerator == "cuda" and parallel.devices < cuda:
        batch = resolved.global_batch
        below, above = batch // cuda * cuda, (batch // cuda + 1) * cuda
        said.append(
            f"parallel.devices=auto: {parallel.devices} of {cuda} CUDA devices, because data.batch_size={batch} does not "
            f"divide by more; nearest for all of them: {f'{below}, ' if below else ''}{above}"
        )
    problem = hardware.cuda().problem
    if problem is not None and asked.parallel.accelerator == "auto" and parallel.accelerator == "cpu":
        said.append(f"parallel.accelerator=auto: the CPU, though this machine shows NVIDIA devices: {problem}")
    return said


def count_that_divides(present: int, batch: int | None, pairs: bool = False) -> int:
    """The largest number of devices, at most `present`, that a global `batch` divides by.

    `pairs`: into shares that are even. Without a `batch` (it is given per device), and where no number will do: `present`.
    """
    if batch is None:
        return present
    counts = range(present, 0, -1)
    return next((count for count in counts if batch % count == 0 and not (pairs and batch // count % 2)), present)


def _auto_devices(config: Config, cuda: int) -> int:
    parallel, augment = config.parallel, config.data.augment
    if parallel.device_ids:
        return len(parallel.device_ids)
    pairs = bool(augment.mixup or augment.cutmix) and parallel.strategy != "dp"
    return count_that_divides(cuda or min(2, hardware.cores()), config.data.batch_size, pairs)


def _check_who_starts(config: Config, world_size: int | None) -> None:
    cluster = config.cluster
    if world_size is not None and cluster.scheduler != "local":
        raise ValueError(f"cluster={cluster.scheduler}: its job starts the ranks; run this with python alone")
    if world_size is None and cluster.scheduler == "local" and cluster.nodes > 1:
        raise ValueError(
            f"cluster.nodes={cluster.nodes}: cluster=local starts this machine's ranks alone; use cluster=slurm or "
            f"cluster=kubernetes, or torchrun --nnodes={cluster.nodes} on each node"
        )


def _resolve_parallel(config: Config, cuda: int, world_size: int | None) -> None:
    """Strategy, accelerator and number of devices."""
    parallel = config.parallel
    usable = cuda if parallel.accelerator in ("auto", "cuda") else 0
    if parallel.strategy == "auto":
        asked = _auto_devices(config, usable) if parallel.devices == "auto" else int(parallel.devices)
        several = asked > 1 and (usable > 0 or parallel.devices != "auto")
        parallel.strategy = "ddp" if several or world_size is not None else "single"
    if parallel.accelerator == "auto":
        mps = hardware.has_mps() and parallel.strategy == "single"
        parallel.accelerator = "cuda" if cuda else "mps" if mps else "cpu"
    started, strategy = f"torchrun started {world_size} ranks", parallel.strategy
    if world_size is not None and parallel.has_ranks:
        if parallel.devices not in ("auto", world_size):
            raise ValueError(f"parallel.devices={parallel.devices}: {started}; leave it at auto")
        parallel.devices = world_size
    elif world_size is not None and world_size > 1:
        raise ValueError(f"parallel={strategy}: {started}, but it is one process; use parallel=ddp, or python alone")
    elif parallel.devices == "auto":
        parallel.devices = 1 if strategy == "single" else _auto_devices(config, usable)


def _missing_devices(config: Config, cuda: int, local: int) -> Iterator[str]:
    parallel = config.parallel
    if parallel.backend == "mpi" and not hardware.has_mpi():
        yield "parallel.backend=mpi: this torch is built without MPI, as its wheels are; use nccl or gloo"
    if parallel.backend == "nccl" and WINDOWS:
        yield "parallel.backend=nccl: NCCL does not exist for Windows; use gloo, or run under WSL 2"
    if parallel.accelerator == "cuda":
        if cuda == 0:
            problem = hardware.cuda().problem or "no CUDA device is visible here"
            yield f"parallel.accelerator=cuda: {problem}; use cpu or auto"
        ids = parallel.device_ids
        if ids is not None and (len(ids) != local or len(set(ids)) != local or not all(0 <= i < cuda for i in ids)):
            yield f"parallel.device_ids={ids}: give {local} different numbers from 0 to {cuda - 1}"
        here = f"parallel.devices={local}: {cuda} CUDA device(s) here"
        if local > cuda and not parallel.has_ranks:
            yield f"{here}, and {parallel.strategy} takes one for each replica"
        if local > cuda and parallel.backend != "gloo":
            yield f"{here}; two NCCL ranks cannot share one (parallel.backend=gloo can, to try things out)"
        if parallel.output_device is not None and parallel.strategy == "dp" and parallel.output_device >= cuda:
            yield f"parallel.output_device={parallel.output_device}: devices here are 0 to {cuda - 1}"
        return
    for key in ("device_ids", "output_device"):
        if getattr(parallel, key) is not None:
            yield f"parallel.{key}={getattr(parallel, key)}: numbers CUDA devices; this run is on {parallel.accelerator}"
    if parallel.backend == "nccl":
        yield f"parallel.backend=nccl: needs CUDA, but this run is on {parallel.accelerator}; use gloo"
    if parallel.accelerator == "mps":
        if not hardware.has_mps():
            yield "parallel.accelerator=mps: no Apple GPU here; use cpu or auto"
        if parallel.strategy != "single":
            yield f"parallel={parallel.strategy}: an Apple GPU is one device; use parallel=single, or accelerator=cpu"
    if config.model.sync_bn:
        yield "model.sync_bn=true: torch's SyncBatchNorm works on CUDA only"
    if config.train.precision == "tf32":
        yield f"train.precision=tf32: a GPU's, but this run is on {parallel.accelerator}; use fp32 or bf16"


def _unfit_batch(config: ResolvedConfig) -> Iterator[str]:
    has_ranks, devices, batch = config.parallel.has_ranks, config.parallel.devices, config.global_batch
    if batch < devices:
        yield f"data.batch_size={batch}: fewer images than the {devices} devices; use at least {devices}"
    if batch % devices and has_ranks:  # dp may have unequal chunks; their sizes are recorded
        below, above = batch // devices * devices, (batch // devices + 1) * devices
        yield f"data.batch_size={batch}: does not divide by {devices} devices; nearest: {below}, {above}"
    if (config.data.augment.mixup or config.data.augment.cutmix) and (batch // devices if has_ranks else batch) % 2:
        yield f"data.batch_size={batch}: mixup and cutmix pair images, so each rank's batch must be even"


def _missing_compiler(config: Config) -> Iterator[str]:
    """torch.compile would say so only in the first step, over two screens."""
    if not config.model.compile:
        return
    language, variable, names = "C", "CC", ("gcc", "clang", "cc")
    if config.parallel.accelerator == "cpu":
        language, variable, names = "C++", "CXX", ("g++", "clang++", "c++")
    if not any(shutil.which(name) for name in (os.environ.get(variable, ""), *names)):
        yield f"model.compile=true: needs a {language} compiler; apt install {names[0]}, or name one in {variable}"

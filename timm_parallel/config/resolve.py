"""Replace each `auto` of a config by a value for this machine. Reject a config that cannot run here
before it is saved. Also has the OmegaConf resolvers of YAML files, whose values depend on the
devices of this machine.
"""

from __future__ import annotations

import copy
import importlib.util
import os
from collections.abc import Iterator
from typing import Any

from omegaconf import OmegaConf

from timm_parallel.app import as_resolved
from timm_parallel.config.validate import fill_in, refuse
from timm_parallel.keys import PATHS, TRACKERS, Config, ResolvedConfig
from timm_parallel.machine import hardware
from timm_parallel.machine.platform import WINDOWS
from timm_parallel.machine.ranks import starter


def resolve(
    config: Config, world_size: int | None = None, local_world_size: int | None = None
) -> ResolvedConfig:
    """Build a copy of a config in which each `auto` is replaced by a value for this machine. Raises
    ValueError if the machine, or the given number of ranks, cannot run the config.

    `world_size`, `local_world_size`: number of ranks in total and on this node, if torchrun or srun
    started them.
    """
    if WINDOWS:
        raise ValueError("Windows: not supported; run the same command under WSL 2")
    config = copy.deepcopy(config)
    if config.data.batch_size is None and config.data.batch_size_per_device is None:
        config.data.batch_size = type(config.data).batch_size
    _check_starter(config, world_size)
    if config.train.accumulate == "auto":
        # Start with train.accumulate=1. The launcher doubles the number after each attempt that
        # runs out of memory.
        config.train.accumulate = 1
    # A pod of Kubernetes has folders of its own.
    if config.cluster.scheduler != "kubernetes":
        for key in PATHS:
            section, _, name = key.partition(".")
            group = getattr(config, section)
            if (path := getattr(group, name)) is not None:
                setattr(group, name, os.path.abspath(path))
    elsewhere = config.cluster.scheduler != "local"
    if elsewhere:
        fill_in(config)
    cuda = len(hardware.visible_cuda_devices())
    _resolve_parallel(config, cuda, world_size)
    parallel = config.parallel
    local = int(parallel.devices)
    if world_size is not None and parallel.has_ranks:
        # Count one device per process if srun shows each process only its own GPU. When the ranks
        # meet, launch/rendezvous.py counts the GPUs of the whole node.
        local = 1 if cuda == 1 else local_world_size or local
    if not elsewhere:
        refuse(_missing_here(config, cuda, local))
    if parallel.threads_per_device == "auto":
        parallel.threads_per_device = max(1, hardware.cores() // local)
    if parallel.backend == "auto":
        parallel.backend = "nccl" if parallel.accelerator == "cuda" else "gloo"
    resolved = as_resolved(config)
    refuse(_unfit_sizes(resolved))
    return resolved


def halve_batches(config: ResolvedConfig) -> ResolvedConfig | None:
    """Build a copy of a resolved config with half the batch size and twice train.accumulate, so
    that an optimizer step has as many images as before. Return None if the devices cannot divide
    half the batch.
    """
    half = copy.deepcopy(config)
    half.train.accumulate *= 2
    for name in ("batch_size", "batch_size_per_device"):
        if (size := getattr(half.data, name)) is not None:
            if size % 2:
                return None
            setattr(half.data, name, size // 2)
    return None if any(_unfit_sizes(half)) else half


def notice(asked: Config, resolved: ResolvedConfig) -> str:
    """Build the message that `auto` chose the CPU although this machine shows NVIDIA devices, with
    the reason. The text is empty otherwise.

    `asked`: the config before `auto` was replaced. `resolved`: the config after that.
    """
    chose_cpu = asked.parallel.accelerator == "auto" and resolved.parallel.accelerator == "cpu"
    if not chose_cpu or resolved.cluster.scheduler != "local" or not hardware.cuda().problem:
        return ""
    return (
        "parallel.accelerator=auto: the CPU, although this machine shows NVIDIA devices: "
        f"{hardware.cuda().problem}"
    )


def _auto_devices(config: Config, cuda: int) -> int:
    parallel = config.parallel
    if parallel.device_ids:
        return len(parallel.device_ids)
    pairs = config.data.pairs_images and not parallel.has_one_process
    return count_that_divides(cuda or min(2, hardware.cores()), config.data.batch_size, pairs)


def _check_starter(config: Config, world_size: int | None) -> None:
    cluster = config.cluster
    if world_size is not None and cluster.scheduler != "local":
        raise ValueError(
            f"cluster={cluster.scheduler}: the job starts its ranks itself; run this command with "
            "python, not with torchrun or srun"
        )
    if world_size is None and cluster.scheduler == "local" and cluster.nodes > 1:
        raise ValueError(
            f"cluster.nodes={cluster.nodes}: cluster=local starts ranks on this machine only; "
            f"use cluster=slurm or cluster=kubernetes, or torchrun --nnodes={cluster.nodes} on "
            "each node"
        )
    # train.accumulate=auto needs a launcher that can start all ranks again with smaller batches. A
    # pod of a Kubernetes job cannot, because it receives a config.yaml in which auto is already a
    # number.
    if config.train.accumulate == "auto" and (
        world_size is not None or cluster.nodes > 1 or cluster.scheduler == "kubernetes"
    ):
        raise ValueError(
            "train.accumulate=auto: works only if python train.py starts all ranks on one machine, "
            "not under torchrun or srun, on several nodes, or in a Kubernetes pod; set a number, "
            "e.g. train.accumulate=1"
        )


def _resolve_parallel(config: Config, cuda: int, world_size: int | None) -> None:
    """Replace `auto` in parallel.strategy, parallel.accelerator and parallel.devices. Raises
    ValueError if the values do not fit the ranks that torchrun or srun started.

    `cuda`: number of visible CUDA devices. `world_size`: number of started ranks, or None.
    """
    parallel = config.parallel
    usable = cuda if parallel.accelerator in ("auto", "cuda") else 0
    if parallel.strategy == "auto":
        count = (
            _auto_devices(config, usable) if parallel.devices == "auto" else int(parallel.devices)
        )
        several = count > 1 and (usable > 0 or parallel.devices != "auto")
        parallel.choose_strategy(several or world_size is not None)
    if parallel.accelerator == "auto":
        mps = hardware.has_mps() and parallel.traits.has_one_device
        parallel.accelerator = "cuda" if cuda else "mps" if mps else "cpu"
    started, strategy = (
        f"{starter()} started {world_size} rank{'s' * (world_size != 1)}",
        parallel.strategy,
    )
    if world_size is not None and parallel.has_ranks:
        if parallel.devices not in ("auto", world_size):
            raise ValueError(
                f"parallel.devices={parallel.devices}: differs from the number of ranks, because "
                f"{started}; use parallel.devices=auto"
            )
        parallel.devices = world_size
    elif world_size is not None and world_size > 1:
        raise ValueError(
            f"parallel={strategy}: this strategy runs in one process, but {started}; use "
            "parallel=ddp, or start with python"
        )
    elif parallel.devices == "auto":
        parallel.devices = 1 if parallel.traits.has_one_device else _auto_devices(config, usable)


def _missing_here(config: Config, cuda: int, local: int) -> Iterator[str]:
    parallel = config.parallel
    for name in TRACKERS.keys() & config.tracker.classes():
        # Require the source file of the package, because find_spec also accepts a plain folder with
        # the name of the tracker.
        if getattr(importlib.util.find_spec(name), "origin", None) is None:
            yield (
                f"tracker={name}: the package {name} is not installed; pip install -r "
                "requirements-trackers.txt"
            )
    if parallel.accelerator == "cuda":
        if cuda == 0:
            problem = hardware.cuda().problem or "no CUDA device is visible here"
            yield f"parallel.accelerator=cuda: {problem}; use cpu or auto"
        ids = parallel.device_ids
        if ids is not None and (
            len(ids) != local or len(set(ids)) != local or not all(0 <= i < cuda for i in ids)
        ):
            yield (
                f"parallel.device_ids={ids}: expected {local} different "
                f"number{'s' * (local != 1)} from 0 to {cuda - 1}"
            )
        here = f"parallel.devices={local}: {cuda} CUDA device{'s' * (cuda != 1)} here"
        if local > cuda and not parallel.has_ranks:
            yield f"{here}, and {parallel.strategy} needs one per replica"
        if local > cuda and parallel.backend != "gloo":
            yield (
                f"{here}; NCCL ranks cannot share a device (with parallel.backend=gloo they can, "
                "for a trial)"
            )
        if parallel.traits.shards and parallel.backend == "gloo":
            yield (
                f"parallel.backend=gloo: {parallel.strategy} on CUDA needs nccl; "
                "leave it at auto, or use parallel=ddp"
            )
        if (
            parallel.output_device is not None
            and parallel.has_one_process
            and parallel.output_device >= cuda
        ):
            yield (
                f"parallel.output_device={parallel.output_device}: expected a number from 0 to "
                f"{cuda - 1}"
            )
        return
    # Values that require CUDA, and what to use instead.
    precision, output_device = config.train.precision, parallel.output_device
    for needs_cuda, setting, instead in (
        (parallel.device_ids is not None, f"parallel.device_ids={parallel.device_ids}", "null"),
        (output_device is not None, f"parallel.output_device={output_device}", "null"),
        (parallel.backend == "nccl", "parallel.backend=nccl", "gloo"),
        (precision == "tf32", "train.precision=tf32", "fp32 or bf16"),
    ):
        if needs_cuda:
            here = f"requires CUDA, but this run is on {parallel.accelerator}"
            yield f"{setting}: {here}; use {instead}"
    if parallel.accelerator == "mps":
        if not hardware.has_mps():
            yield "parallel.accelerator=mps: no Apple GPU here; use cpu or auto"
        if not parallel.traits.has_one_device:
            yield (
                f"parallel={parallel.strategy}: an Apple GPU is one device; use "
                "parallel=single, or parallel.accelerator=cpu"
            )
    yield from config.model.problems(config)


def _unfit_sizes(config: ResolvedConfig) -> Iterator[str]:
    """Yield an error message if the devices cannot divide the batch."""
    has_ranks, devices, batch = (
        config.parallel.has_ranks,
        config.parallel.devices,
        config.global_batch,
    )
    if batch < devices:
        yield (
            f"data.batch_size={batch}: fewer images than the {devices} devices; use at least "
            f"{devices}"
        )
    # Only strategies with ranks need equal batches. The chunks of dp may differ in size, and
    # result.json records their sizes.
    if batch % devices and has_ranks:
        below, above = batch // devices * devices, (batch // devices + 1) * devices
        yield (
            f"data.batch_size={batch}: not divisible by {devices} devices; nearest sizes: "
            f"{below}, {above}"
        )
    if config.data.pairs_images and (batch // devices if has_ranks else batch) % 2:
        yield (
            f"data.batch_size={batch}: mixup and cutmix pair images, so each rank's batch must "
            "be even; change data.batch_size"
        )


def device_counts(_root_: Any) -> str:
    """Resolve `${device_counts:}` to a list of device counts to compare, e.g. `1,2,4,6`. The last
    count is the largest number of devices of this machine that divides the batch, at most 8 on a
    CPU. Before it come all smaller powers of two.
    """
    batch = OmegaConf.select(_root_, "data.batch_size")
    largest = max(
        2,
        count_that_divides(len(hardware.visible_cuda_devices()) or min(8, hardware.cores()), batch),
    )
    powers = {2**power for power in range(largest.bit_length())}
    return ",".join(str(count) for count in sorted(powers | {largest}))


def by_device(on_cpu: Any, on_gpu: Any) -> Any:
    """Resolve `${by_device:a,b}` to b on a machine with a CUDA device, otherwise to a."""
    return on_gpu if hardware.visible_cuda_devices() else on_cpu


def count_that_divides(present: int, batch: int | None, pairs: bool = False) -> int:
    """Return the largest number of devices that divides the batch. `present`: number of devices of
    this machine, which is the upper limit. Return `present` if no batch is given, or if no number
    fits.

    `pairs`: True if the batch of each device must also be even.
    """
    if batch is None:
        return present
    fitting = [
        count
        for count in range(1, present + 1)
        if batch % count == 0 and not (pairs and batch // count % 2)
    ]
    return max(fitting, default=present)

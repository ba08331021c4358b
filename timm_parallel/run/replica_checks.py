"""Check that all ranks have the same data and equal parameters.

The parameters are compared before the first step and after the last step of a run.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from timm_parallel.data.dataset import ImageDataset, Split, in_memory, split_fingerprint
from timm_parallel.data.samplers import seed_draws
from timm_parallel.errors import ReplicasDifferError, UnreadableImageError
from timm_parallel.machine.ranks import first_difference, host_name
from timm_parallel.parallel.group import ProcessGroup
from timm_parallel.parallel.strategy import Strategy, device_model, whole
from timm_parallel.run.parts import TrainState

log = logging.getLogger(__name__)
# Largest allowed distance between the parameters of two ranks at the end, relative to their norm.
# Rounding errors add up like a random walk, from about 1e-7 per step to 1e-4 after a million steps.
# Ranks that were trained without synchronization differ by tenths.
MAX_DRIFT = 1e-2


def check_same_data(dataset: ImageDataset, group: ProcessGroup) -> None:
    """Raise ValueError if the classes or files of a rank differ from those of rank 0, or if a split
    does not return the same sample when it reads an index twice.

    The message names the host of the rank that differs. All ranks must call this function.
    """
    splits = {"train": dataset.train, "val": dataset.val, "test": dataset.test}
    for name, split in splits.items():
        if split is not None and len(split) and in_memory(split) is None:
            _check_indexing(name, split)
    # With different data, gradients would be averaged over other images than intended, or ranks
    # would wait for a rank with fewer images.
    if group.world_size == 1:
        return
    facts = {f"class {label}": name for label, name in enumerate(dataset.target_names)}
    for name, split in splits.items():
        if split is not None:
            facts |= {
                f"{name} images": str(len(split)),
                f"{name} names and labels": split_fingerprint(split),
            }
    if difference := first_difference(group.gather((f"rank {group.rank} ({host_name()})", facts))):
        raise ValueError(f"data: {difference}; give all nodes the same data")


def _check_indexing(name: str, split: Split) -> None:
    """Raise ValueError if two reads of the first index of a split differ, as in a class that wraps
    a generator. Its ranks would train on the same samples, and a resumed run would repeat them.
    """
    samples = []
    with torch.random.fork_rng(devices=[]), suppress(UnreadableImageError):
        for _ in range(2):
            seed_draws(0, 0, 0)
            first = next(iter(split.stream(0))) if hasattr(split, "stream") else split[0]
            samples.append(tree_leaves(first))
    if len(samples) == 2 and not (
        len(samples[0]) == len(samples[1]) and all(map(_is_equal, *samples))
    ):
        raise ValueError(
            f"data: two reads of the first sample of the {name} split differ; a split must return "
            "the same sample for the same index, and draw from the generators of torch, random or "
            "numpy"
        )


def _is_equal(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor | np.ndarray):
        # NaN differs from itself, but two NaN are the same sample.
        return bool(np.array_equal(first, second, equal_nan=np.asarray(first).dtype.kind in "fc"))
    return bool(first == second or first != first)


def check_replicas_at_start(state: TrainState, strategy: Strategy) -> tuple[int, str]:
    """Check that all ranks start with equal parameters, and that as many devices train as
    requested.

    Returns the number of devices and the hash of the parameters. Raises ReplicasDifferError if the
    parameters differ, and RuntimeError if the number of devices does. All ranks must call this
    function.
    """
    digest, equal = parameters_hash(state.parameters(), strategy)
    if not equal:
        raise ReplicasDifferError(
            "the ranks start with different parameters; seed all random numbers that the "
            "constructor of the model draws"
        )
    measured, requested = strategy.measured_world_size(), strategy.config.devices
    if measured != requested:
        raise RuntimeError(
            f"world size: {requested} devices were requested, but {measured} take part in "
            "training; start as many ranks as devices"
        )
    return measured, digest


def check_replicas_at_end(state: TrainState, strategy: Strategy) -> tuple[str, list[str]]:
    """Check that all ranks end with equal parameters.

    Returns the hash of the parameters and a list of warnings. Raises ReplicasDifferError if the
    parameters differ by more than rounding explains. All ranks must call this function.
    """
    # All ranks apply the same averaged gradients, but GPUs of different models may round an update
    # differently. Small differences are allowed only between such GPUs.
    digest, equal = parameters_hash(state.parameters(), strategy)
    if equal:
        return digest, []
    models = sorted(set(strategy.group.gather(device_model(strategy.device))))
    drift = relative_drift(state, strategy)
    # The negated comparison is also True if the drift is NaN.
    if len(models) == 1 or not drift <= MAX_DRIFT:
        raise ReplicasDifferError(
            "the ranks end with different parameters: gradients were not synchronized"
        )
    flag = (
        f"the ranks' devices are of different models ({', '.join(models)}) and have drifted apart, "
        f"by {drift:.1e} of the parameters' norm; the checkpoints hold rank 0's"
    )
    if strategy.group.is_first:
        log.warning("%s", flag)
    return digest, [flag]


@torch.no_grad()
def relative_drift(state: TrainState, strategy: Strategy) -> float:
    """Compute the largest distance of a rank's parameters from the mean over all ranks.

    The distance is divided by the norm of the mean. All ranks must call this function.
    """
    distance = norm = 0.0
    for parameter in state.parameters():
        values = whole(parameter).double()
        mean = strategy.group.sum(values) / strategy.group.world_size
        distance += float((values - mean).square().sum())
        norm += float(mean.square().sum())
    return float(max(strategy.group.gather(distance)) / norm) ** 0.5 if norm else 0.0


def parameters_hash(parameters: Iterable[nn.Parameter], strategy: Strategy) -> tuple[str, bool]:
    """Compute the hash of all parameters, and compare it between the ranks.

    Returns the hash of rank 0 on every rank, and True if the hashes of all ranks are equal. All
    ranks must call this function.
    """
    digest = hashlib.sha256()
    for parameter in parameters:
        values = whole(parameter.detach()).cpu().reshape(-1)
        # Hash the bytes of the tensor, because numpy has no type bfloat16.
        digest.update(values.view(torch.uint8).numpy().tobytes())
    hashes = strategy.group.gather(digest.hexdigest()[:16])
    return hashes[0], len(set(hashes)) == 1

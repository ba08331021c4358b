"""Checks that all ranks have the same data and equal parameters, before the first step and after
the last step.
"""

from __future__ import annotations

import hashlib
import logging

import torch

from timm_parallel.data.dataset import ImageDataset, split_fingerprint
from timm_parallel.errors import ReplicasDifferError
from timm_parallel.machine.ranks import first_difference, host_name
from timm_parallel.parallel.group import ProcessGroup
from timm_parallel.parallel.strategy import HasParameters, Strategy

log = logging.getLogger(__name__)
# Largest distance between ranks at the end, relative to the norm of the parameters. Rounding adds
# up to about 1e-7 a step, as a random walk: 1e-4 after a million steps. Ranks that were trained
# separately are tenths apart.
MAX_DRIFT = 1e-2


def check_same_data(dataset: ImageDataset, group: ProcessGroup) -> None:
    """Raise ValueError with the host's name if the classes or files of a rank differ from those of
    rank 0. Collective.
    """
    # Otherwise gradients would be averaged over different data, or ranks would wait for one with
    # fewer images.
    if group.world_size == 1:
        return
    facts = {f"class {label}": name for label, name in enumerate(dataset.target_names)}
    for name, split in (("train", dataset.train), ("val", dataset.val), ("test", dataset.test)):
        if split is not None:
            facts |= {
                f"{name} images": str(len(split)),
                f"{name} names and labels": split_fingerprint(split),
            }
    if difference := first_difference(group.gather((f"rank {group.rank} ({host_name()})", facts))):
        raise ValueError(f"data: {difference}; give all nodes the same data")


def check_replicas_at_start(model: HasParameters, strategy: Strategy) -> tuple[int, str]:
    """Raise ReplicasDifferError if ranks start with different parameters. Return (world size,
    parameter hash). Collective.
    """
    digest, equal = parameters_hash(model, strategy)
    if not equal:
        raise ReplicasDifferError(
            "the ranks start with different parameters; seed every random draw of the model's "
            "constructor"
        )
    measured, requested = strategy.measured_world_size(), strategy.config.devices
    if measured != requested:
        raise RuntimeError(
            f"world size: {requested} devices were requested, but {measured} take part in "
            "training; start as many ranks as devices"
        )
    return measured, digest


def check_replicas_at_end(model: HasParameters, strategy: Strategy) -> tuple[str, list[str]]:
    """Raise ReplicasDifferError if ranks end with different parameters. Return (hash, warnings).
    Collective.
    """
    # All ranks apply the same averaged gradients, but devices of different models may round an
    # update differently. Ranks on devices of one model must not differ, and none by more than
    # rounding explains.
    digest, equal = parameters_hash(model, strategy)
    if equal:
        return digest, []
    models = sorted(set(strategy.group.gather(strategy.telemetry.device_model)))
    drift = relative_drift(model, strategy)
    # `not <=` is True for nan as well.
    if len(models) == 1 or not drift <= MAX_DRIFT:
        raise ReplicasDifferError(
            "the ranks end with different parameters: gradients were not synchronized"
        )
    flag = (
        f"the ranks' devices are of different models ({', '.join(models)}) and have drifted apart, "
        f"by {drift:.1e} of the parameters' norm; the checkpoints hold rank 0's"
    )
    if strategy.is_first:
        log.warning("%s", flag)
    return digest, [flag]


@torch.no_grad()
def relative_drift(model: HasParameters, strategy: Strategy) -> float:
    """Return the largest distance of a rank's parameters from their mean over ranks, divided by
    that mean's norm.
    """
    distance = norm = 0.0
    for parameter in model.parameters():
        whole = strategy.whole(parameter).double()
        mean = strategy.group.sum(whole) / strategy.group.world_size
        distance += float((whole - mean).square().sum())
        norm += float(mean.square().sum())
    return float(max(strategy.group.gather(distance)) / norm) ** 0.5 if norm else 0.0


def parameters_hash(model: HasParameters, strategy: Strategy) -> tuple[str, bool]:
    """Return (hash of all parameters on rank 0, True if it is equal on all ranks). Collective."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        whole = strategy.whole(parameter.detach()).cpu().reshape(-1)
        # As bytes, because numpy has no bfloat16.
        digest.update(whole.view(torch.uint8).numpy().tobytes())
    hashes = strategy.group.gather(digest.hexdigest()[:16])
    return hashes[0], len(set(hashes)) == 1

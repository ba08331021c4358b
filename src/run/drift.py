"""Do the ranks hold the same parameters after the last step, and what does it mean where they do not?

All apply the same averaged gradients. Devices of unlike kinds may round an update differently, and so drift apart by a
little; on devices of one kind a difference is a fault, which has trained each rank on its own.
"""

from __future__ import annotations

import logging

import torch
from torch import nn

from src.parallel.single import Single

log = logging.getLogger(__name__)
# Of the parameters' norm. Rounding alone adds up to some 1e-7 a step, as a random walk: 1e-4 after a million steps. Ranks that
# were each trained on their own are tenths apart.
FARTHEST = 1e-2


def hash_at_end(model: nn.Module, strategy: Single) -> tuple[str, list[str]]:
    """(rank 0's hash of all parameters, a flag where the others' is another one). Collective.

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

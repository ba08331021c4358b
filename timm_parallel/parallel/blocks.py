"""Find the blocks of a model: the parts that fsdp gathers one after the other while a step goes
through the model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from timm.models import group_parameters
from torch import nn

# A step calls the items of these modules, and does not always call the modules themselves.
CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def blocks_of(model: Any) -> list[nn.Module]:
    """Return the blocks of `model`. A layer outside of all blocks, such as the head, is gathered
    for the whole step.

    A model of your own may name its blocks with a method `shard_blocks()`. Otherwise a block is a
    module whose parameters are in one group and whose class occurs twice, or without groups, any
    child with children, also inside of containers.
    """
    if hasattr(model, "shard_blocks"):
        return list(model.shard_blocks())
    group_of = groups_of(model)
    uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    candidates = _blocks_in(model, "", group_of)
    blocks = [block for block in candidates if not _shares_parameters(block, uses)]
    if not group_of:
        return blocks
    # Without stems: one returns a view, and a model may add a position to it in place, which FSDP2
    # does not allow.
    classes = Counter(type(block) for block in blocks)
    return [block for block in blocks if classes[type(block)] > 1]


def _blocks_in(module: nn.Module, prefix: str, group_of: dict[str, int]) -> Iterator[nn.Module]:
    for name, child in module.named_children():
        path = f"{prefix}{name}."
        groups = {group_of.get(path + inner, 0) for inner, _ in child.named_parameters()}
        # A single layer is too small to be gathered alone.
        if not groups or next(child.children(), None) is None:
            continue
        if groups_of(child):
            yield from blocks_of(child)
        elif len(groups) > 1 or isinstance(child, CONTAINERS):
            yield from _blocks_in(child, path, group_of)
        else:
            yield child


def _shares_parameters(block: nn.Module, uses: Counter[int]) -> bool:
    """Return True if another part of the model uses a parameter of `block` too: fsdp would separate
    tied weights.
    """
    inside = Counter(
        id(parameter) for _, parameter in block.named_parameters(remove_duplicate=False)
    )
    return any(uses[number] > count for number, count in inside.items())


def gathered_bytes(model: nn.Module, dtype: torch.dtype | None, reshard: bool | None) -> int:
    """Return the most bytes of whole parameters that fsdp holds at once: those outside blocks, and
    of two blocks, because the second one is fetched while the first computes.

    `dtype`: in which they are gathered; None: their own. `reshard`: parallel.reshard_after_forward.
    """
    sizes = {p: p.numel() * (dtype or p.dtype).itemsize for p in model.parameters()}
    blocks = sorted(
        sum(sizes[parameter] for parameter in block.parameters()) for block in blocks_of(model)
    )
    freed = 0 if reshard is False else sum(blocks[:-2])
    return sum(sizes.values()) - freed


def groups_of(model: Any, coarse: bool = False) -> dict[str, int]:
    """Return timm's number (0 is the stem) of the group of each parameter, by name; {} for a model
    that is not timm's.
    """
    if not hasattr(model, "group_matcher"):
        return {}
    numbers: dict[str, int] = group_parameters(
        model, model.group_matcher(coarse=coarse), reverse=True
    )
    return numbers


def vector_layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers that hold only vectors (norms, layer scales): under autocast they compute
    in float32.
    """
    own = ((module, list(module.parameters(recurse=False))) for module in model.modules())
    return [
        module for module, parameters in own if parameters and all(p.ndim == 1 for p in parameters)
    ]

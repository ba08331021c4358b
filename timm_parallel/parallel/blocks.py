"""Find the blocks of a model, such as transformer layers, for fsdp.

During a step, fsdp gathers the parameters of one block after the other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, cast

from timm.models import group_parameters
from torch import nn

# Modules that only contain other modules. A forward pass may call these inner modules directly, so
# fsdp must not treat the container as a block.
CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def blocks_of(model: Any) -> list[nn.Module]:
    """Return the blocks of a model, whose parameters fsdp gathers one block after the other.

    A method `shard_blocks()` of the model overrides the search. In a timm model, a block is a
    module in one of timm's layer groups whose class occurs at least twice. In other models it is a
    module with children that is no container such as nn.Sequential. Layers outside of all blocks,
    such as the head, are gathered for the whole step.
    """
    if hasattr(model, "shard_blocks"):
        return list(model.shard_blocks())
    group_of = groups_of(model)
    uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    blocks = [
        block for block in _blocks_in(model, "", group_of) if not _shares_parameters(block, uses)
    ]
    if not group_of:
        return blocks
    # Leave out stems, whose class occurs once. A stem may return a view to which the model adds a
    # position embedding in place, and FSDP2 does not allow this.
    classes = Counter(type(block) for block in blocks)
    return [block for block in blocks if classes[type(block)] > 1]


def _blocks_in(module: nn.Module, prefix: str, group_of: dict[str, int]) -> Iterator[nn.Module]:
    for name, child in module.named_children():
        path = f"{prefix}{name}."
        groups = {group_of.get(path + inner, 0) for inner, _ in child.named_parameters()}
        # Skip a single layer, because gathering such a small layer alone costs more than it saves.
        if not groups or next(child.children(), None) is None:
            continue
        if groups_of(child):
            yield from blocks_of(child)
        elif len(groups) > 1 or isinstance(child, CONTAINERS):
            yield from _blocks_in(child, path, group_of)
        else:
            yield child


def _shares_parameters(block: nn.Module, uses: Counter[int]) -> bool:
    """Return True if a module outside of `block` uses one of its parameters.

    fsdp cannot shard such a block by itself, because this would separate the tied weights.
    """
    inside = Counter(
        id(parameter) for _, parameter in block.named_parameters(remove_duplicate=False)
    )
    return any(uses[number] > count for number, count in inside.items())


def groups_of(model: Any, coarse: bool = False) -> dict[str, int]:
    """Return a dictionary from the name of each parameter to the number of its layer group in timm.

    Group 0 is the stem. The dictionary is empty if the model is not of timm.
    """
    if not hasattr(model, "group_matcher"):
        return {}
    matcher = model.group_matcher(coarse=coarse)
    return cast(dict[str, int], group_parameters(model, matcher, reverse=True))


def vector_layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers whose parameters are all vectors, such as norms and layer scales.

    Under autocast these layers compute in float32.
    """
    own = ((module, list(module.parameters(recurse=False))) for module in model.modules())
    return [
        module for module, parameters in own if parameters and all(p.ndim == 1 for p in parameters)
    ]

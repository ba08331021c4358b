"""Freeze parameters for `model.freeze`, and find the parameters of the head for
`optim.head_lr_scale`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from torch import nn

from timm_parallel.parallel.fully_sharded import groups_of


def freeze(model: Any, which: int | str | None) -> str:
    """Freeze the parameters that model.freeze selects, and return a line for the log with their
    number.

    `which`: backbone, a number of layer groups, or a regular expression for parameter names; None
    freezes nothing and returns an empty text. Names in the state dict do not change. The caller
    should keep the modules of `frozen_modules` in evaluation mode.
    """
    if which is None:
        return ""
    head = head_names(model)
    names = [name for name, _ in model.named_parameters()]
    if which == "backbone":
        frozen = [name for name in names if name not in head]
    elif isinstance(which, int):
        frozen = _first_groups(model, which)
    else:
        frozen = [name for name in names if re.match(which, name)]
    if not frozen:
        roots = dict.fromkeys(name.partition(".")[0] for name in names)
        raise ValueError(
            f"model.freeze={which}: matches the start of no parameter name; names start with "
            f"{', '.join(roots)}"
        )
    if len(frozen) == len(names):
        raise ValueError(
            f"model.freeze={which}: freezes every parameter; use a smaller number or a narrower "
            "pattern"
        )
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    return f"{len(frozen)} of {len(names)} tensors of parameters (model.freeze={which})"


def frozen_modules(model: nn.Module) -> list[nn.Module]:
    """Return the outermost modules whose parameters are all frozen.

    The caller keeps these modules in evaluation mode, so that their BatchNorm statistics and
    dropout stay fixed too.
    """
    has_trainable = [parameter.requires_grad for parameter in model.parameters()]
    if has_trainable and not any(has_trainable):
        return [model]
    return [frozen for child in model.children() for frozen in frozen_modules(child)]


def write_counts(modules: Iterable[nn.Module]) -> list[tuple[int, int]]:
    """Count how often torch has written the parameters and the BatchNorm statistics of each of the
    frozen modules that has both, as pairs of integers.
    """
    counts = []
    for frozen in modules:
        norms = [m for m in frozen.modules() if getattr(m, "running_mean", None) is not None]
        if norms:
            written = sum(parameter._version for parameter in frozen.parameters())
            counts.append((written, sum(norm.running_mean._version for norm in norms)))
    return counts


def check_statistics_move(before: list[tuple[int, int]], after: list[tuple[int, int]]) -> None:
    """Raise ValueError if a training step changed the parameters of a frozen module, but not its
    BatchNorm statistics. `before`, `after`: results of `write_counts`.
    """
    for (parameters, statistics), (new_parameters, new_statistics) in zip(
        before, after, strict=True
    ):
        if new_parameters > parameters and new_statistics == statistics:
            raise ValueError(
                "the training step changes the parameters of a frozen module, such as a teacher, "
                "but not its BatchNorm statistics, which would stay as they are; copy its buffers "
                "too, or use a model without BatchNorm"
            )


def head_names(model: Any) -> set[str]:
    """Return the names of the tensors in the head of a model.

    The head is what `get_classifier()` returns. A model without this method has its last Linear
    layer as its head.
    """
    if hasattr(model, "get_classifier"):
        classifier = model.get_classifier()
        heads = list(classifier) if isinstance(classifier, tuple | list) else [classifier]
    else:
        heads = [module for module in model.modules() if isinstance(module, nn.Linear)][-1:]
    prefixes = tuple(
        f"{name}."
        for name, module in model.named_modules()
        if any(module is head for head in heads)
    )
    return {name for name in model.state_dict() if name.startswith(prefixes)}


def _first_groups(model: Any, count: int) -> list[str]:
    """Return the names of the parameters in the first `count` layer groups that timm defines for a
    model.
    """
    groups = groups_of(model, coarse=True)
    if not groups:
        raise ValueError(
            f"model.freeze={count}: this model defines no layer groups (timm's group_matcher), so "
            "a number cannot be used; use model.freeze=backbone, or a regular expression"
        )
    last = max(groups.values())
    if count > last:
        raise ValueError(
            f"model.freeze={count}: the last of the {last + 1} layer groups must be trained; use "
            f"{last} or less"
        )
    return [name for name, number in groups.items() if number < count]

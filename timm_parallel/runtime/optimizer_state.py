"""Save and load optimizer state by parameter name: the parameter groups of a resumed run may differ
from the saved ones.
"""

from __future__ import annotations

import copy
import logging
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from timm_parallel.faults.liveness import liveness
from timm_parallel.parallel.strategy import HasParameters, Strategy

log = logging.getLogger(__name__)
# The step counter that some optimizers keep in a parameter group. All other entries are
# hyperparameters of the config.
COUNTER = "step"


def check_is_complete(optimizer: Optimizer, model: HasParameters) -> None:
    """Raise ValueError if the optimizer lacks a parameter that is to be trained: it would keep its
    initial value.
    """
    known = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    missing = [
        name for name, p in model.named_parameters() if p.requires_grad and id(p) not in known
    ]
    if missing:
        shown = ", ".join(missing[:8]) + (
            f" and {len(missing) - 8} more" if len(missing) > 8 else ""
        )
        raise ValueError(
            f"optim: no parameter group has {shown}; add them to one in build_optimizer, or freeze "
            "them with requires_grad_(False)"
        )


def named_state(optimizer: Optimizer, model: HasParameters) -> dict[str, Any]:
    """Return the optimizer's `state_dict()` with parameter names instead of numbers, and its class
    name as `kind`.
    """
    names, state = _names(optimizer, model), optimizer.state_dict()
    return {
        "kind": type(optimizer).__name__,
        "state": {names[index]: values for index, values in state["state"].items()},
        "param_groups": [
            {**group, "params": [names[index] for index in group["params"]]}
            for group in state["param_groups"]
        ],
    }


def restore_named_state(
    optimizer: Optimizer, model: HasParameters, saved: dict[str, Any], strategy: Strategy
) -> None:
    """Load the result of `named_state`. Hyperparameters keep the config's values."""
    names, kind = _names(optimizer, model), type(optimizer).__name__
    if saved["kind"] != kind:
        log.info(
            "resume: optimizer %s -> %s: the saved state does not fit, so it starts with new state",
            saved["kind"],
            kind,
        )
        return
    group_of = {name: group for group in saved["param_groups"] for name in group["params"]}
    groups = optimizer.state_dict()["param_groups"]
    for group in groups:
        before = group_of.get(names[group["params"][0]], {}) if group["params"] else {}
        if COUNTER in before:
            # A copy, because two groups made from one saved group would both increment a shared
            # tensor.
            group[COUNTER] = copy.deepcopy(before[COUNTER])
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    # Shard the values before loading, which copies them to the device.
    state = {
        index: {
            key: _part(value, parameter, strategy) for key, value in saved["state"][name].items()
        }
        for index, (name, parameter) in enumerate(zip(names, parameters, strict=True))
        if name in saved["state"]
    }
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    _check_state_is_complete(optimizer)


def _part(value: Any, parameter: Tensor, strategy: Strategy) -> Any:
    """Return this rank's shard of a state value if it is a tensor in the shape of `parameter`, else
    the value itself.
    """
    is_like = isinstance(value, Tensor) and value.shape == parameter.shape
    return strategy.part(value, parameter) if is_like else value


def _names(optimizer: Optimizer, model: HasParameters) -> list[str]:
    """Return the names of the optimizer's parameters, in the order of their numbers in
    `state_dict()`.
    """
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    return [
        name_of[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]
    ]


def _check_state_is_complete(optimizer: Optimizer) -> None:
    """Raise ValueError if a step needs state that the checkpoint lacks, for example with
    amsgrad=true. Steps on copies.
    """
    for group in optimizer.param_groups:
        smallest = min(
            (p for p in group["params"] if optimizer.state.get(p)),
            key=lambda p: p.numel(),
            default=None,
        )
        if smallest is None:
            continue
        probe = torch.zeros_like(smallest, requires_grad=True)
        probe.grad = torch.zeros_like(smallest)
        trial = copy.copy(optimizer)
        settings = {key: value for key, value in group.items() if key != "params"}
        trial.param_groups = [{**copy.deepcopy(settings), "params": [probe]}]
        trial.state = defaultdict(dict, {probe: copy.deepcopy(optimizer.state[smallest])})
        try:
            with liveness.on_trial():
                trial.step()
        # Some optimizers, such as kron, keep more than their groups and state, so a copy cannot
        # step.
        except AttributeError:
            continue
        except KeyError as error:
            raise ValueError(
                f"optim: {type(optimizer).__name__} with these settings needs state that the "
                f"checkpoint does not have ({error}); give optim.kwargs and optim.momentum as they "
                "were, or start a new run"
            ) from None

"""Contents of a checkpoint: the training state as unsharded tensors and plain values, and what a
resume compares.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from timm_parallel.errors import NotFiniteError
from timm_parallel.parallel.group import ProcessGroup
from timm_parallel.parallel.strategy import HasParameters, Strategy
from timm_parallel.state.parts import (
    OF_STEP,
    RunParts,
    TrainState,
    data_of_a_step,
    parameter_names,
    plain_config,
)


def checkpoint_of(parts: RunParts, segments: list[dict[str, Any]]) -> dict[str, Any]:
    """Build the contents of a checkpoint: training state, data fingerprint, config and segments.
    Raises NotFiniteError for non-finite weights. Collective.
    """
    contents = snapshot(parts.state, parts.strategy)
    check_finite(
        [contents["model"], contents["ema"], contents[OF_STEP]],
        parts.strategy.group,
        parts.progress.step,
    )
    return {
        **contents,
        "classes": list(parts.dataset.target_names),
        "preprocessing": dataclasses.asdict(parts.preprocessing),
        "made_by": {
            "strategy": parts.strategy.kind,
            "devices": parts.config.parallel.devices,
            # model.weights loads the set of weights (raw or averaged) that this metric evaluates.
            "metric": parts.config.checkpoint.metric,
        },
        "trained_on": data_of_a_step(parts),
        "config": plain_config(parts),
        "segments": segments,
    }


def snapshot(state: TrainState, strategy: Strategy) -> dict[str, Any]:
    """Return the training state as unsharded tensors and plain values, for a checkpoint.
    Collective.

    If the strategy shards parameters, only rank 0 gets the tensors, in CPU memory. Other ranks get
    empty tensors.
    """
    # Learning rates and random draws are functions of the step, so a checkpoint has no state of
    # them.
    parts = {
        "model": state.model.state_dict(),
        OF_STEP: {name: tensor.detach() for name, tensor in state.own_tensors().items()},
        "optimizer": optimizer_state(state.optimizer, state),
        "scaler": None if state.scaler is None else state.scaler.state_dict(),
        "ema": None if state.ema is None else state.ema.module.state_dict(),
        "strategy": {"kind": strategy.kind, "state": strategy.state_dict()},
    }
    return {
        **tree_map_only(Tensor, partial(_for_file, strategy=strategy), parts),
        "buffers_by_rank": {
            name: strategy.buffers.by_rank(module) for name, module in state.modules.items()
        },
        "progress": dataclasses.asdict(state.progress),
    }


def _for_file(tensor: Tensor, strategy: Strategy) -> Tensor:
    """Return a tensor unsharded, on the CPU of rank 0 (empty on other ranks) if the strategy shards
    it. Collective.
    """
    whole = strategy.whole(tensor)
    if not strategy.shards:
        return whole
    return whole.cpu() if strategy.is_first else torch.empty(0)


def optimizer_state(optimizer: Optimizer, model: HasParameters) -> dict[str, Any]:
    """Return the optimizer's `state_dict()` with parameter names instead of numbers, and its class
    name as `kind`.
    """
    names, state = parameter_names(optimizer, model), optimizer.state_dict()
    return {
        "kind": type(optimizer).__name__,
        "state": {names[index]: values for index, values in state["state"].items()},
        "param_groups": [
            {**group, "params": [names[index] for index in group["params"]]}
            for group in state["param_groups"]
        ],
    }


def check_finite(
    states: Iterable[dict[str, Tensor] | None], group: ProcessGroup, step: int
) -> None:
    """Raise NotFiniteError on all ranks if a tensor in the state dicts `states` has NaN or infinity
    on any. Collective.
    """
    tensors = [
        tensor
        for state in states
        for tensor in (state or {}).values()
        if tensor.is_floating_point()
    ]
    flags = [~tensor.isfinite().all() for tensor in tensors]
    # A loss may be on another device than the model (parallel.output_device).
    bad = torch.stack([flag.to(flags[0].device) for flag in flags]).any()
    # As a plain value: some tensors may be in CPU memory, from which NCCL does not send.
    if any(group.gather(bool(bad))):
        raise NotFiniteError(
            f"the weights are not finite after step {step}, though its loss was", step
        )

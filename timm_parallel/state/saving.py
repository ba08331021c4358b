"""Build the contents of a checkpoint.

The contents are the training state, as unsharded tensors and plain values, and the config and the
data fingerprint of the run. A resume compares the last two with those of the new run.
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
    RunParts,
    TrainState,
    data_of_a_step,
    parameter_names,
    plain_config,
)


def checkpoint_of(parts: RunParts, segments: list[dict[str, Any]]) -> dict[str, Any]:
    """Build the contents of a checkpoint: training state, data fingerprint, config and segments.

    Raises NotFiniteError if a weight is not finite. All ranks must call this function.
    """
    contents = snapshot(parts.state, parts.strategy)
    check_finite(
        [contents["model"], *contents["networks"].values(), *contents["averages"].values()],
        parts.strategy.group,
        parts.progress.step,
    )
    return {
        **contents,
        "classes": list(parts.dataset.target_names),
        "preprocessing": dataclasses.asdict(parts.preprocessing),
        "made_by": {
            "strategy": parts.config.parallel.strategy,
            "devices": parts.config.parallel.devices,
            # If a later run loads this checkpoint by model.weights, this metric decides whether the
            # raw or the averaged weights are loaded.
            "metric": parts.config.checkpoint.metric,
        },
        "trained_on": data_of_a_step(parts),
        "config": plain_config(parts),
        "segments": segments,
    }


def snapshot(state: TrainState, strategy: Strategy) -> dict[str, Any]:
    """Collect the training state as unsharded tensors and plain values, for a checkpoint.

    If the strategy shards parameters, rank 0 gets the tensors in CPU memory, and other ranks get
    empty tensors. All ranks must call this function.
    """
    # A checkpoint stores no random states, because they are functions of the step, and learning
    # rates only of a schedule that observes evaluations.
    parts = {
        "model": state.model.state_dict(),
        "networks": {
            name: {key: tensor.detach() for key, tensor in state.own_tensors(name).items()}
            for name in state.networks
            if name != "model"
        },
        "averages": {
            name: average.module.state_dict() for name, (average, _) in state.averages.items()
        },
        "phases": {
            phase.name: {
                "optimizer": optimizer_state(phase.optimizer, state),
                "scaler": None if phase.scaler is None else phase.scaler.state_dict(),
                "schedule": state_of(phase.learning.schedule),
            }
            for phase in state.phases
        },
        "strategy": {"kind": strategy.config.strategy, "state": strategy.state_dict()},
    }
    return {
        **tree_map_only(Tensor, partial(_for_file, strategy=strategy), parts),
        "buffers_by_rank": {
            name: strategy.buffers.by_rank(module) for name, module in state.modules.items()
        },
        "progress": dataclasses.asdict(state.progress),
    }


def state_of(schedule: Any) -> Any:
    """Return the state of a schedule that observes evaluations. Other schedules are functions of
    the step, and have none.
    """
    return schedule.state_dict() if hasattr(schedule, "observe") else None


def _for_file(tensor: Tensor, strategy: Strategy) -> Tensor:
    """Return an unsharded tensor for a checkpoint. All ranks must call this function.

    If the strategy shards parameters, the tensor is in the CPU memory of rank 0, and empty on other
    ranks.
    """
    whole = strategy.whole(tensor)
    if not strategy.shards:
        return whole
    return whole.cpu() if strategy.is_first else torch.empty(0)


def optimizer_state(optimizer: Optimizer, model: HasParameters) -> dict[str, Any]:
    """Build the state dict of an optimizer, with the names of parameters instead of their numbers.

    The key `kind` holds the class name of the optimizer.
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
    """Raise NotFiniteError on all ranks if a tensor on any rank contains NaN or infinity.

    `states`: state dicts with the tensors to check. All ranks must call this function.
    """
    tensors = [
        tensor
        for state in states
        for tensor in (state or {}).values()
        if tensor.is_floating_point()
    ]
    flags = [~tensor.isfinite().all() for tensor in tensors]
    # Move the results to one device, because parallel.output_device may put the loss on another
    # device than the model.
    bad = torch.stack([flag.to(flags[0].device) for flag in flags]).any()
    # Gather a plain value, because the tensor may be in CPU memory, from which NCCL cannot send.
    if any(group.gather(bool(bad))):
        raise NotFiniteError(
            f"the weights are not finite after step {step}, although the loss of this step was "
            "finite",
            step,
        )

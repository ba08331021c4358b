"""Build the contents of a checkpoint, and restore a run from them.

The contents are the training state, as unsharded tensors and plain values, and the config and the
data fingerprint of the run. A resume compares the last two with those of the run, and logs settings
that have changed.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from timm_parallel.data.dataset import check_classes
from timm_parallel.errors import NotFiniteError
from timm_parallel.machine.text import change_text
from timm_parallel.parallel.group import ProcessGroup, buffers_by_rank, restore_buffers
from timm_parallel.parallel.networks import LOSS, Networks
from timm_parallel.parallel.strategy import Strategy, part, whole
from timm_parallel.run.parts import (
    RunParts,
    TrainState,
    data_of_a_step,
    parameter_names,
    plain_config,
)
from timm_parallel.run.progress import Progress


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
        "classes": parts.dataset.target_names,
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
            name: buffers_by_rank(module, strategy.group)
            if strategy.config.dist_bn == "reduce"
            else None
            for name, module in state.modules.items()
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
    unsharded = whole(tensor)
    if not strategy.traits.shards:
        return unsharded
    return unsharded.cpu() if strategy.group.is_first else torch.empty(0)


def optimizer_state(optimizer: Optimizer, train_state: TrainState) -> dict[str, Any]:
    """Build the state dict of an optimizer, with the names of parameters instead of their numbers.

    The key `kind` holds the class name of the optimizer.
    """
    names, state = parameter_names(optimizer, train_state), optimizer.state_dict()
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


log = logging.getLogger(__name__)
NOT_ANNOUNCED = ("resume", "print_config")
# Name of the step counter that some optimizers keep in a parameter group. All other entries of a
# group are hyperparameters, which come from the config.
COUNTER = "step"


def restore_run(parts: RunParts, contents: dict[str, Any]) -> dict[str, list[Any]]:
    """Load the contents of a checkpoint into a new run, and log which settings have changed.

    Returns a dictionary from each changed setting to its values before and now. Raises ValueError
    if the contents do not fit the run.
    """
    announcements = _check_data(parts, contents)
    restore(parts.state, parts.strategy, contents)
    progress, train = parts.progress, parts.config.train
    for phase in parts.state.phases:
        phase.learning.schedule.step_update(progress.schedule_step(parts.steps_per_epoch))
    if parts.total_steps < progress.step:
        limit = f"train.max_steps={train.max_steps}"
        if progress.step_in_epoch > (train.epochs - progress.epoch) * parts.steps_per_epoch:
            limit = f"train.epochs={train.epochs}"
        raise ValueError(
            f"resume: {limit} is reached: the checkpoint is at step {progress.step}, after "
            f"{progress.step_in_epoch} steps of epoch {progress.epoch + 1}; set a larger value to "
            "continue"
        )
    # Mixup and cutmix draw from the number of the batch.
    if parts.mixing is not None:
        parts.mixing.batch = progress.step * train.accumulate
    parts.hooks.meter.expect(parts.total_steps - progress.step)
    now = plain_config(parts)
    changed = {
        key: [before, now[key]]
        for key, before in contents["config"].items()
        if key in now and now[key] != before and not key.startswith(NOT_ANNOUNCED)
    }
    announcements += [change_text(key, *values) for key, values in changed.items()]
    metric = parts.config.checkpoint.metric
    if progress.start_new_best(metric.removeprefix("val/")):
        announcements.append(
            f"best.pt and train.early_stop start again, by checkpoint.metric={metric}"
        )
    for line in announcements:
        log.info("resume: %s", line)
    return changed


def _check_data(parts: RunParts, contents: dict[str, Any]) -> list[str]:
    """Describe how the training data have changed since the checkpoint was saved.

    The list is empty if they have not. Raises ValueError if the classes have changed, or if other
    data have changed and the checkpoint is in the middle of an epoch.
    """
    check_classes(parts.dataset, contents["classes"], "the checkpoint")
    step = contents["progress"]["step_in_epoch"]
    remedy = "start a new run with model.weights=<folder>/checkpoints/last.pt"
    before = contents["trained_on"]
    differences = [
        f"{name}: {before[name]} -> {value}"
        for name, value in data_of_a_step(parts).items()
        if before.get(name, value) != value
    ]
    if differences and step:
        raise ValueError(
            f"resume: the training data changed in mid-epoch (step {step} of "
            f"{before['steps_per_epoch']}): {', '.join(differences)}; the rest of the epoch would "
            f"read other images; restore the data and keys, or {remedy}"
        )
    return [f"training data: {', '.join(differences)}"] if differences else []


def restore(state: TrainState, strategy: Strategy, contents: dict[str, Any]) -> None:
    """Load the weights, optimizer state and progress of a checkpoint into the training state.

    Hyperparameters of the optimizer keep the values of the config.
    """
    missing = {"networks", "averages", "phases", "progress"} - contents.keys()
    if missing:
        raise ValueError(
            f"resume: the checkpoint has only weights, no {', '.join(sorted(missing))}; start a "
            "new run with model.weights=<the checkpoint>"
        )
    restore_weights(state, contents)
    for name, module in state.modules.items():
        restore_buffers(module, contents["buffers_by_rank"].get(name), strategy.group)
    # A checkpoint of an earlier version may have more fields.
    fields = {field.name for field in dataclasses.fields(Progress)}
    state.progress = Progress(
        **{name: value for name, value in contents["progress"].items() if name in fields}
    )
    for phase in state.phases:
        if phase.name not in contents["phases"]:
            raise ValueError(
                f"resume: the checkpoint has the phases {', '.join(contents['phases'])}, not "
                f"{phase.name}; set train.task as in the saved run, or start a new run"
            )
        of_phase = contents["phases"][phase.name]
        restore_optimizer(phase.optimizer, state, of_phase["optimizer"])
        if phase.scaler is not None and of_phase["scaler"] is not None:
            phase.scaler.load_state_dict(of_phase["scaler"])
        if hasattr(phase.learning.schedule, "observe") and of_phase["schedule"] is not None:
            phase.learning.schedule.load_state_dict(of_phase["schedule"])
    saved = contents["strategy"]
    if saved["kind"] == strategy.config.strategy:
        strategy.load_state_dict(saved["state"])


def restore_weights(state: TrainState, contents: dict[str, Any]) -> None:
    """Load the networks of a checkpoint, and the averages that the run has.

    An average that the checkpoint lacks starts from its network.
    """
    _load(state.model, contents["model"])
    for name in state.networks:
        if name != "model":
            _restore_network(state, name, contents["networks"].get(name, {}))
    for name, (average, source) in state.averages.items():
        saved = contents["averages"].get(name)
        if saved is None:
            saved = {
                key: whole(tensor) for key, tensor in state.networks[source].state_dict().items()
            }
        _load(average.module, saved)


def _load(module: nn.Module, saved: dict[str, Tensor]) -> None:
    current = module.state_dict()
    parts = {
        key: part(value, current[key]) if key in current else value for key, value in saved.items()
    }
    _load_state(module, parts)


@torch.no_grad()
def _restore_network(state: TrainState, network: str, saved: dict[str, Tensor]) -> None:
    """Load the tensors that a network has in addition to those of the model.

    `saved`: the tensors of the checkpoint by name. Raises ValueError if a parameter is missing or
    has another shape.
    """
    own = state.own_tensors(network)
    # A missing buffer keeps its initial value, because the saved run may have had another loss.
    lacking = [
        name
        for name, tensor in own.items()
        if name not in saved and isinstance(tensor, nn.Parameter)
    ]
    changed = [
        name for name, tensor in own.items() if name in saved and saved[name].shape != tensor.shape
    ]
    if lacking or changed:
        key = "train.loss" if network == LOSS else "train.task"
        raise ValueError(
            f"{key}: the network {network} has {', '.join(lacking + changed)}, which the "
            "checkpoint lacks or has in another shape; set train.task, train.loss and "
            "train.loss_kwargs as in the saved run, or start a new run with "
            "model.weights=<folder>/checkpoints/last.pt"
        )
    for name, tensor in own.items():
        if name in saved:
            tensor.copy_(part(saved[name], tensor))


def load_networks(networks: Networks, contents: dict[str, Any], which: str) -> None:
    """Load the weights of a checkpoint into the networks of a task and their averages, for an
    evaluation.

    `which`: weights of the model: `model` for the trained ones, `ema` for the averaged ones. Raises
    ValueError if they do not fit.
    """
    weights = contents["model"] if which == "model" else contents["averages"].get(which)
    if weights is None:
        raise ValueError(
            f"weights={which}: the checkpoint has no averaged weights, because its run did not set "
            "model.ema.decay"
        )
    _load_state(networks["model"], weights)
    for name, network in networks.items():
        if name in contents["averages"]:
            network.load_state_dict(contents["averages"][name])
        elif name in contents["networks"] and name != LOSS:
            # Tensors that the network shares with the model are not stored again.
            network.load_state_dict(contents["networks"][name], strict=False)


def _load_state(model: nn.Module, weights: dict[str, Tensor]) -> None:
    """Load a state dict of a checkpoint into a model. Raises ValueError if it does not fit."""
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise ValueError(
            "model.name: the checkpoint was written by a different model "
            f"({' '.join(str(error).split())[:300]}); set model.name and model.kwargs as in its run"
        ) from None


def restore_optimizer(optimizer: Optimizer, train_state: TrainState, saved: dict[str, Any]) -> None:
    """Load the state of the optimizer from a checkpoint.

    Hyperparameters keep the values of the config. If the checkpoint has the state of another
    optimizer, the optimizer starts with new state.
    """
    names, kind = parameter_names(optimizer, train_state), type(optimizer).__name__
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
            # Copy the counter, because two groups may come from one saved group, and would both
            # increment a shared tensor.
            group[COUNTER] = copy.deepcopy(before[COUNTER])
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    # Shard the saved optimizer state before loading it, because loading copies it to the device.
    state = {
        index: {key: _part(value, parameter) for key, value in saved["state"][name].items()}
        for index, (name, parameter) in enumerate(zip(names, parameters, strict=True))
        if name in saved["state"]
    }
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _part(value: Any, parameter: Tensor) -> Any:
    """Return this rank's part of a tensor in the optimizer state. Tensors with the shape of the
    parameter, such as momentum, are sharded in the same way as the parameter.

    Any other value, such as a step counter, is returned unchanged.
    """
    is_like = isinstance(value, Tensor) and value.shape == parameter.shape
    return part(value, parameter) if is_like else value

"""Build the optimizer and the learning-rate schedule with timm. The schedule counts optimizer
steps, so it does not depend on the number of devices.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from timm.models import model_parameters
from timm.optim import create_optimizer_v2, get_optimizer_class
from timm.optim._optim_factory import OptimInfo, default_registry
from timm.scheduler import create_scheduler_v2
from timm.utils import dispatch_clip_grad
from timm.utils.agc import unitwise_norm
from torch import Tensor, nn

from src.schema import OptimConfig, ResolvedConfig, TrainConfig
from timm_parallel import (
    Learning,
    Strategy,
    head_names,
    import_class,
    import_name,
    is_own_class,
    refuse_wrong_arguments,
)

log = logging.getLogger(__name__)
# Optimizers whose fused kernel works under fsdp, where each rank has only a part of a parameter.
FUSED_IN_PARTS = ("adam", "adamw")


def build_learning(
    config: ResolvedConfig,
    strategy: Strategy,
    phase: str,
    networks: dict[str, nn.Module],
    steps_per_epoch: int,
) -> Learning:
    """Build the optimizer and the schedule of a phase, and the function that clips its gradients.

    `networks`: those that the phase trains, by name.
    """
    optim = config.optim.of_phase(phase)
    optimizer = build_optimizer(optim, config.rate_of(optim), networks, strategy.traits.shards)
    schedule = build_schedule(optim, config.train, optimizer, steps_per_epoch)
    # Without a fused kernel that skips overflowed gradients, the GradScaler must read on the CPU if
    # a gradient overflowed, so the CPU waits for the GPU in every step.
    if (
        config.train.precision == "fp16"
        and strategy.device.type == "cuda"
        and not getattr(optimizer, "_step_supports_amp_scaling", False)
    ):
        log.info(
            "fp16         optim.opt=%s waits for the GPU in every step; adamw or sgd do not",
            optim.opt,
        )
    clip = None if optim.clip_grad is None else partial(clip_gradients, optim, networks)
    return Learning(optimizer, schedule, clip)


def build_optimizer(
    config: OptimConfig, lr: float, networks: Mapping[str, nn.Module], shards: bool = False
) -> torch.optim.Optimizer:
    """Build the optimizer of networks and its parameter groups. As in timm, norms and biases have
    no weight decay. `lr`: learning rate after optim.lr_rule has scaled it.

    The keys that need the layers of a model, such as layer_decay, apply to the network `model`.
    Without it, all networks are treated as one model.
    """
    model = networks.get("model") or nn.ModuleDict(networks)
    of_model = {id(parameter) for parameter in model.parameters()}
    own = {
        f"{name}.{parameter_name}": parameter
        for name, network in networks.items()
        for parameter_name, parameter in network.named_parameters()
        if id(parameter) not in of_model
    }
    kwargs = dict(config.kwargs)
    name = _register(config.opt) if is_own_class(config.opt) else config.opt
    try:
        optimizer_class = get_optimizer_class(name, bind_defaults=False)
    # timm raises these errors if an optimizer needs Apex or bitsandbytes, and it is not installed.
    except (AssertionError, ImportError) as error:
        raise ValueError(
            f"optim.opt={config.opt}: {error}; install that package, or use optim.opt=adamw, "
            "which needs none"
        ) from None
    accepted = (
        inspect.signature(optimizer_class).parameters if inspect.isclass(optimizer_class) else {}
    )
    # Use the fused kernel, which updates all tensors at once: the AdamW step of resnet18 on a CPU
    # takes 15 ms instead of 45.
    if (
        "fused" in accepted
        and "foreach" not in kwargs
        and (not shards or config.opt in FUSED_IN_PARTS)
    ):
        kwargs.setdefault("fused", True)
    if "betas" in kwargs:
        kwargs["betas"] = tuple(kwargs["betas"])
    with refuse_wrong_arguments(
        "optim.kwargs", config.kwargs, config.opt, ValueError, AssertionError
    ):
        optimizer = create_optimizer_v2(
            model,
            opt=name,
            lr=lr,
            weight_decay=config.weight_decay,
            momentum=config.momentum,
            layer_decay=config.layer_decay,
            **kwargs,
        )
    _add_groups(optimizer, own, config.weight_decay)
    if config.head_lr_scale != 1:
        names = head_names(model)
        head = [parameter for name, parameter in model.named_parameters() if name in names]
        _scale(optimizer, [*head, *own.values()], config.head_lr_scale)
    return optimizer


def _register(dotted: str) -> str:
    """Register an optimizer class of your own with timm, so that timm builds its parameter groups.
    Return the name under which timm knows the class.
    """
    optimizer_class = import_class("optim.opt", dotted, torch.optim.Optimizer)
    has_momentum = "momentum" in inspect.signature(optimizer_class).parameters
    info = OptimInfo("own", optimizer_class, has_betas=True, has_momentum=has_momentum)
    default_registry.register(info)
    return info.name


def _add_groups(
    optimizer: torch.optim.Optimizer, own: dict[str, nn.Parameter], weight_decay: float
) -> None:
    """Add to the optimizer the parameters that are not in the model, such as those of a loss. They
    follow timm's rule for weight decay, and layer_decay does not apply to them.
    """
    groups: dict[float, list[nn.Parameter]] = {0.0: [], weight_decay: []}
    for name, parameter in own.items():
        if parameter.requires_grad:
            is_excluded = parameter.ndim <= 1 or name.endswith(".bias")
            groups[0.0 if is_excluded else weight_decay].append(parameter)
    for decay, parameters in groups.items():
        if parameters:
            optimizer.add_param_group({"params": parameters, "weight_decay": decay})


def _scale(optimizer: torch.optim.Optimizer, chosen: list[nn.Parameter], scale: float) -> None:
    """Multiply the learning rate of the given parameters by a factor. These parameters are moved to
    parameter groups of their own. timm's schedule multiplies the learning rate of a group by its
    entry `lr_scale`.
    """
    head = {id(parameter) for parameter in chosen}
    groups = []
    for group in optimizer.param_groups:
        for in_head, factor in ((False, 1.0), (True, scale)):
            parameters = [
                parameter for parameter in group["params"] if (id(parameter) in head) is in_head
            ]
            if parameters:
                groups.append(
                    {**group, "params": parameters, "lr_scale": group.get("lr_scale", 1.0) * factor}
                )
    optimizer.param_groups = groups


def clip_gradients(config: OptimConfig, networks: Mapping[str, nn.Module]) -> None:
    """Clip the gradients of networks as optim.clip_grad and optim.clip_mode ask for."""
    limit = config.clip_grad
    assert limit is not None
    parameters = list(nn.ModuleDict(networks).parameters())
    if config.clip_mode != "agc":
        dispatch_clip_grad(parameters, limit, config.clip_mode)
    elif "model" in networks:
        # As in timm, adaptive clipping does not change the head; nor does it change the parameters
        # of a loss.
        clip_adaptively(model_parameters(networks["model"], exclude_head=True), limit)
    else:
        clip_adaptively(parameters, limit)


def clip_adaptively(parameters: Iterable[Tensor], factor: float, eps: float = 1e-3) -> None:
    """Clip gradients adaptively, with the same result as timm's adaptive_clip_grad. This function
    launches a third as many kernels. Only the norms of rows of weights are computed tensor by
    tensor, and all other operations run for all tensors at once.
    """
    trained = [parameter for parameter in parameters if parameter.grad is not None]
    gradients = [parameter.grad for parameter in trained if parameter.grad is not None]
    factors, norms = (
        [unitwise_norm(tensor.detach()) for tensor in tensors] for tensors in (trained, gradients)
    )
    torch._foreach_clamp_min_(factors, eps)
    torch._foreach_mul_(factors, factor)
    torch._foreach_clamp_min_(norms, 1e-6)
    torch._foreach_div_(factors, norms)
    # Clamp the factors to 1, so that a gradient below its limit is not enlarged.
    torch._foreach_clamp_max_(factors, 1)
    torch._foreach_mul_(gradients, factors)


def build_schedule(
    config: OptimConfig, train: TrainConfig, optimizer: torch.optim.Optimizer, steps_per_epoch: int
) -> Any:
    """Build the learning-rate schedule. Its warm-up, decay (all cycles) and cool-down take
    train.epochs epochs in total.

    A class of your own gets the optimizer, the group `optim` of the config, the number of steps of
    all epochs, and optim.sched_kwargs as keywords. It has a method step_update(step).
    """
    if is_own_class(config.sched):
        schedule_class = import_name(config.sched)
        with refuse_wrong_arguments("optim.sched_kwargs", config.sched_kwargs, config.sched):
            return schedule_class(
                optimizer, config, train.epochs * steps_per_epoch, **config.sched_kwargs
            )
    arguments: dict[str, Any] = dict(config.sched_kwargs)
    # Each cycle is cycle_mul times as long as the previous one. `cycles` is the length of all
    # cycles, in lengths of the first one.
    cycle_mul = float(arguments.get("cycle_mul", 1))
    cycles = sum(cycle_mul**cycle for cycle in range(int(arguments.get("cycle_limit", 1))))
    decay_starts = config.warmup_epochs if config.warmup_prefix else 0
    if config.decay_milestones is not None:
        arguments["decay_milestones"] = [
            milestone - decay_starts for milestone in config.decay_milestones
        ]
    decay_length = train.epochs - decay_starts - config.cooldown_epochs
    if config.decay_epochs is not None:
        # In wsd and rsqrt, timm takes a number below 1 as a share of the schedule, so convert
        # epochs to a share.
        is_share = config.decay_epochs < 1 and config.sched in ("wsd", "rsqrt")
        arguments["decay_epochs"] = (
            config.decay_epochs / decay_length if is_share else config.decay_epochs
        )
    with refuse_wrong_arguments(
        "optim.sched_kwargs", config.sched_kwargs, config.sched, ValueError, AssertionError
    ):
        schedule, _ = create_scheduler_v2(
            optimizer,
            sched=config.sched,
            num_epochs=decay_length / cycles,  # type: ignore[arg-type]
            cooldown_epochs=config.cooldown_epochs,  # type: ignore[arg-type]
            warmup_epochs=config.warmup_epochs,  # type: ignore[arg-type]
            warmup_lr=config.warmup_lr,
            warmup_prefix=config.warmup_prefix,
            min_lr=config.min_lr,
            decay_rate=config.decay_rate,
            step_on_epochs=False,
            updates_per_epoch=steps_per_epoch,
            **arguments,
        )
    assert schedule is not None
    return schedule

"""Build optimizer and schedule with timm. The schedule counts optimizer steps, so it is independent
of device count.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from timm.optim import create_optimizer_v2, get_optimizer_class
from timm.optim._optim_factory import OptimInfo, default_registry
from timm.scheduler import create_scheduler_v2
from timm.scheduler.scheduler import Scheduler
from timm.utils.agc import unitwise_norm
from torch import Tensor, nn

from src.schema import OptimConfig, TrainConfig
from timm_parallel import head_names, import_class, own_parameters, refuse_wrong_arguments

# Optimizers whose fused kernel can update a parameter of which each rank has a part.
FUSED_IN_PARTS = ("adam", "adamw")


def build_optimizer(
    config: OptimConfig,
    lr: float,
    model: nn.Module,
    shards: bool = False,
    step: nn.Module | None = None,
) -> torch.optim.Optimizer:
    """Build the optimizer. As in timm, norms and biases have no weight decay. `lr`: already scaled
    by optim.lr_rule.

    `step`: the training step, if it may have parameters besides the model's, such as those of a
    loss.
    """
    kwargs = dict(config.kwargs)
    name = _register(config.opt) if config.is_own else config.opt
    try:
        optimizer_class = get_optimizer_class(name, bind_defaults=False)
    # Some optimizers need Apex or bitsandbytes.
    except (AssertionError, ImportError) as error:
        raise ValueError(
            f"optim.opt={config.opt}: {error}; install that package, or use optim.opt=adamw, "
            "which needs none"
        ) from None
    accepted = (
        inspect.signature(optimizer_class).parameters if inspect.isclass(optimizer_class) else {}
    )
    # One kernel for all tensors: resnet18's AdamW step on CPU falls from 45 to 15 ms.
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
    own = {} if step is None else own_parameters(step, model)
    _add_groups(optimizer, own, config.weight_decay)
    if config.head_lr_scale != 1:
        names = head_names(model)
        head = [parameter for name, parameter in model.named_parameters() if name in names]
        _scale(optimizer, [*head, *own.values()], config.head_lr_scale)
    return optimizer


def _register(dotted: str) -> str:
    """Register your optimizer class with timm, which then builds its parameter groups. Return its
    name there.
    """
    optimizer_class = import_class("optim.opt", dotted, torch.optim.Optimizer)
    has_momentum = "momentum" in inspect.signature(optimizer_class).parameters
    info = OptimInfo("own", optimizer_class, has_betas=True, has_momentum=has_momentum)
    default_registry.register(info)
    return info.name


def _add_groups(
    optimizer: torch.optim.Optimizer, own: dict[str, nn.Parameter], weight_decay: float
) -> None:
    """Add the parameters of the step, with timm's rule for weight decay, and like the head without
    layer_decay.
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
    """Scale the learning rate of the parameters `chosen`, by moving them to groups with timm's
    `lr_scale`.
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


def clip_adaptively(parameters: Iterable[Tensor], factor: float, eps: float = 1e-3) -> None:
    """Clip gradients as timm's adaptive_clip_grad, with a third of its kernels: only norms of units
    need one per tensor.
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
    # A gradient below its limit stays as it is.
    torch._foreach_clamp_max_(factors, 1)
    torch._foreach_mul_(gradients, factors)


def waits_for_scaler(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if a GradScaler must read on the host, in every step, whether a gradient
    overflowed.
    """
    return not getattr(optimizer, "_step_supports_amp_scaling", False)


def build_schedule(
    config: OptimConfig, train: TrainConfig, optimizer: torch.optim.Optimizer, steps_per_epoch: int
) -> Scheduler:
    """Build a schedule whose warm-up, decay (all cycles) and cool-down take `train.epochs` in
    total.
    """
    arguments: dict[str, Any] = dict(config.sched_kwargs)
    # Each cycle is cycle_mul times as long as the one before; the sum is in lengths of the first
    # cycle.
    cycle_mul = float(arguments.get("cycle_mul", 1))
    cycles = sum(cycle_mul**cycle for cycle in range(int(arguments.get("cycle_limit", 1))))
    decay_starts = config.warmup_epochs if config.warmup_prefix else 0
    if config.decay_milestones is not None:
        arguments["decay_milestones"] = [
            milestone - decay_starts for milestone in config.decay_milestones
        ]
    decay_length = train.epochs - decay_starts - config.cooldown_epochs
    if config.decay_epochs is not None:
        # In wsd and rsqrt, timm reads a number below 1 as a share of the schedule.
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

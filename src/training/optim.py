"""timm builds optimizer and schedule. The schedule moves per optimizer step, so it is equal for any device count."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from timm.optim import create_optimizer_v2, get_optimizer_class
from timm.scheduler import create_scheduler_v2
from timm.scheduler.scheduler import Scheduler
from torch import nn

from src.schema import OptimConfig, TrainConfig


def build_optimizer(config: OptimConfig, lr: float, model: nn.Module) -> torch.optim.Optimizer:
    """`lr` is the one after optim.lr_rule. No decay on norms and biases, as timm does."""
    kwargs = dict(config.kwargs)
    try:
        kind = get_optimizer_class(config.opt, bind_defaults=False)
    except (AssertionError, ImportError) as error:  # those of Apex and bitsandbytes
        raise ValueError(f"optim.opt={config.opt}: {error}; adamw needs neither") from None
    accepted = inspect.signature(kind).parameters if inspect.isclass(kind) else {}
    if "fused" in accepted and "foreach" not in kwargs and "fused" not in kwargs:
        kwargs["fused"] = True  # one kernel for all tensors: resnet18's AdamW step on CPU falls from 45 to 15 ms
    if "betas" in kwargs:
        kwargs["betas"] = tuple(kwargs["betas"])
    try:
        return create_optimizer_v2(
            model,
            opt=config.opt,
            lr=lr,
            weight_decay=config.weight_decay,
            momentum=config.momentum,
            layer_decay=config.layer_decay,
            **kwargs,
        )
    except (TypeError, ValueError, AssertionError) as error:
        raise ValueError(f"optim.kwargs={config.kwargs}: {config.opt} does not take them ({error})") from None


def build_schedule(
    config: OptimConfig, train: TrainConfig, optimizer: torch.optim.Optimizer, steps_per_epoch: int
) -> Scheduler | None:
    """A schedule whose warm-up, decay (all cycles of it) and cool-down together are `train.epochs` long."""
    if config.sched == "none":
        return None
    arguments: dict[str, Any] = dict(config.sched_kwargs)
    longer, cycles = float(arguments.get("cycle_mul", 1)), int(arguments.get("cycle_limit", 1))
    first_cycles = sum(longer**cycle for cycle in range(cycles))  # all of them together, in lengths of the first
    if config.decay_epochs is not None:
        arguments["decay_epochs"] = config.decay_epochs
    if config.decay_milestones is not None:
        arguments["decay_milestones"] = [milestone - config.warmup_epochs for milestone in config.decay_milestones]
    decay_length = train.epochs - config.warmup_epochs - config.cooldown_epochs
    try:
        schedule, _ = create_scheduler_v2(
            optimizer,
            sched=config.sched,
            num_epochs=decay_length / first_cycles,  # type: ignore[arg-type]
            cooldown_epochs=config.cooldown_epochs,  # type: ignore[arg-type]
            warmup_epochs=config.warmup_epochs,  # type: ignore[arg-type]
            warmup_lr=config.warmup_lr,
            warmup_prefix=True,  # without it cosine never reaches its peak
            min_lr=config.min_lr,
            decay_rate=config.decay_rate,
            step_on_epochs=False,
            updates_per_epoch=steps_per_epoch,
            **arguments,
        )
    except (TypeError, ValueError, AssertionError) as error:
        raise ValueError(
            f"optim.sched_kwargs={config.sched_kwargs}: {config.sched} does not take them ({error})"
        ) from None
    return schedule

"""Check parameters before fsdp shards them, and tell the watchdog when a rank waits for parameters
of other ranks.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from timm_parallel.faults.liveness import FORWARD, GATHERING, liveness


def refuse_scalars(network: nn.Module, name: str) -> None:
    """Raise ValueError if a trained parameter of a network is a scalar, which fsdp cannot shard."""
    for parameter_name, parameter in network.named_parameters():
        if parameter.ndim == 0 and parameter.requires_grad:
            key = {"model": "model.name: ", "loss": "train.loss: "}.get(name, f"{name}.")
            raise ValueError(
                f"{key}{parameter_name} is a parameter without dimensions, which parallel=fsdp "
                "cannot shard; create it with torch.ones(1), which has one, or use parallel=ddp"
            )


def announce_waiting(module: nn.Module) -> None:
    """Tell the watchdog when a forward pass waits for the weights of a module.

    Without this, the watchdog may report the waiting rank as the one that failed.
    """

    def wait(*_: Any) -> None:
        if liveness.phase == FORWARD:
            liveness.at(GATHERING)

    def compute(*_: Any) -> None:
        if liveness.phase == GATHERING:
            liveness.at(FORWARD)

    # Register two hooks: `wait` runs before FSDP2 gathers the weights, and `compute` runs
    # afterwards.
    module.register_forward_pre_hook(wait, prepend=True)
    module.register_forward_pre_hook(compute)

"""Sharded parameters (DTensors) under fsdp: place them on devices, gather them and split them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

from timm_parallel.faults.liveness import FORWARD, GATHERING, liveness


def device_mesh(device: torch.device, world_size: int, shard_size: int | None) -> DeviceMesh:
    """Build the device mesh of the ranks for fsdp: [replicas, shards], or [shards] for one replica.

    All ranks must call this function. `shard_size`: number of ranks that hold one replica together;
    None: all ranks.
    """
    if shard_size in (None, world_size):
        return init_device_mesh(device.type, (world_size,))
    return init_device_mesh(
        device.type, (world_size // shard_size, shard_size), mesh_dim_names=("replicate", "shard")
    )


def whole(tensor: Tensor) -> Tensor:
    """Return the whole tensor of a sharded tensor, of which each rank has a part.

    All ranks must call this function.
    """
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def part(tensor: Tensor, like: Tensor) -> Tensor:
    """Return this rank's part of a whole tensor, sharded like the tensor `like`.

    Every rank already has the whole tensor, so no rank needs to send it.
    """
    if not isinstance(like, DTensor) or isinstance(tensor, DTensor):
        return tensor
    return distribute_tensor(
        tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None
    )


def refuse_scalars(step: nn.Module, model: nn.Module) -> None:
    """Raise ValueError if a parameter of the training step is a scalar, which fsdp cannot shard."""
    of_model = {
        id(parameter): f"model.name: {name}" for name, parameter in model.named_parameters()
    }
    for name, parameter in step.named_parameters():
        # Frozen parameters of a loss are allowed, because they are not sharded.
        if parameter.ndim == 0 and (parameter.requires_grad or id(parameter) in of_model):
            raise ValueError(
                f"{of_model.get(id(parameter), f'train.loss: {name}')} is a parameter without "
                "dimensions, which parallel=fsdp cannot shard; create it with torch.ones(1), which "
                "has one, or use parallel=ddp"
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

    # Register one hook that runs before FSDP2 gathers the weights, and one that runs afterwards.
    module.register_forward_pre_hook(wait, prepend=True)
    module.register_forward_pre_hook(compute)


@contextmanager
def unreduced(model: Any) -> Iterator[None]:
    """Skip the reduction of gradients in the `with` block, for a model of FSDP2.

    Each rank adds up whole gradients locally instead.
    """
    model.set_requires_gradient_sync(False)
    model.set_is_last_backward(False)
    yield
    model.set_requires_gradient_sync(True)
    model.set_is_last_backward(True)

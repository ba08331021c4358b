"""Parameters in parts (DTensors) under fsdp: their devices, and their conversion to whole tensors
and back.
"""

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
    """Return the mesh of ranks: [replicas, shards], or [shards] if all ranks together hold one
    replica. Collective.
    """
    if shard_size in (None, world_size):
        return init_device_mesh(device.type, (world_size,))
    return init_device_mesh(
        device.type, (world_size // shard_size, shard_size), mesh_dim_names=("replicate", "shard")
    )


def whole(tensor: Tensor) -> Tensor:
    """Gather a tensor of which each rank has a part. Collective."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def part(tensor: Tensor, like: Tensor) -> Tensor:
    """Return this rank's part of a whole `tensor`, which every rank has, so that none needs to send
    it.
    """
    if not isinstance(like, DTensor) or isinstance(tensor, DTensor):
        return tensor
    return distribute_tensor(
        tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None
    )


def refuse_scalars(step: nn.Module, model: nn.Module) -> None:
    """Raise ValueError if a parameter of the training step has no dimension along which it could be
    sharded.
    """
    of_model = {
        id(parameter): f"model.name: {name}" for name, parameter in model.named_parameters()
    }
    for name, parameter in step.named_parameters():
        # Frozen parameters of a loss stay whole.
        if parameter.ndim == 0 and (parameter.requires_grad or id(parameter) in of_model):
            raise ValueError(
                f"{of_model.get(id(parameter), f'train.loss: {name}')} is a parameter without "
                "dimensions, which parallel=fsdp cannot shard; give it one with torch.ones(1), or "
                "use parallel=ddp"
            )


def announce_waiting(module: nn.Module) -> None:
    """Report to the watchdog when a forward pass waits for the weights of `module`, or it may blame
    the waiting rank.
    """

    def wait(*_: Any) -> None:
        if liveness.phase == FORWARD:
            liveness.at(GATHERING)

    def compute(*_: Any) -> None:
        if liveness.phase == GATHERING:
            liveness.at(FORWARD)

    # Before and after the hook of FSDP2 that gathers.
    module.register_forward_pre_hook(wait, prepend=True)
    module.register_forward_pre_hook(compute)


@contextmanager
def unreduced(model: Any) -> Iterator[None]:
    """Skip the gradient reduction of an FSDP2 `model` in the `with` block: each rank adds up
    unsharded gradients.
    """
    model.set_requires_gradient_sync(False)
    model.set_is_last_backward(False)
    yield
    model.set_requires_gradient_sync(True)
    model.set_is_last_backward(True)

"""Strategy fsdp: FSDP2, in which every rank holds a part of every parameter.

During a step, the parameters are gathered for one block of the model after the other. Gradients,
optimizer state and averaged weights are sharded too. Checkpoints hold whole tensors, as under every
strategy.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from timm_parallel.faults.liveness import FORWARD, GATHERING, liveness
from timm_parallel.parallel.blocks import blocks_of, vector_layers
from timm_parallel.parallel.distributed import Distributed
from timm_parallel.parallel.lockstep import LockstepNetworks
from timm_parallel.parallel.networks import LOSS, Networks, PhaseStep


class FullySharded(Distributed):
    """Strategy fsdp, in which each rank drives one device, and all ranks together hold one copy of
    the model.
    """

    shards = True
    compiles = False

    @cached_property
    def mesh(self) -> DeviceMesh:
        """Build the device mesh of the ranks. All ranks must call this function."""
        return init_device_mesh(self.device.type, (self.group.world_size,))

    def shard(self, networks: Networks, dtype: torch.dtype | None) -> None:
        # Broadcast the initial weights of rank 0, as DDP does. Otherwise the networks would consist
        # of parts with different initial weights.
        for tensor in (*networks.parameters(), *networks.buffers()):
            self.group.broadcast(tensor.detach())
        # A network that another one contains is sharded first, so that both can be called.
        by_size = sorted(networks.items(), key=lambda pair: len(list(pair[1].parameters())))
        sharded = []
        for name, network in by_size:
            _refuse_scalars(network, name)
            if any(p.ndim and not isinstance(p, DTensor) for p in network.parameters()):
                # The loss is computed in float32.
                self._lay_out(network, None if name == LOSS else dtype)
                sharded.append(network)
        # The outermost sharded module. It gathers parameters and reduces gradients for all modules
        # inside.
        self.root: Any = sharded[0]
        if len(sharded) > 1:
            self.root = fully_shard(networks, mesh=self.mesh)
            # Run an empty forward pass now. FSDP2 takes the first module that runs as its root.
            with torch.no_grad():
                self.root()

    def wrap(self, step: PhaseStep) -> nn.Module:
        return step

    def start_update(self) -> None:
        # A forward pass without a backward pass, as of a teacher, leaves whole parameters behind,
        # which the update would make old.
        if isinstance(self.root, Networks):
            for module in self.root.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()

    def _lay_out(self, network: nn.Module, dtype: torch.dtype | None) -> None:
        """Shard a network in units: its blocks, and the rest."""
        # A frozen scalar cannot be sharded, and stays whole.
        own = {p for p in network.parameters() if not isinstance(p, DTensor) and p.ndim}
        # FSDP2 shards rows of contiguous tensors, so parameters cannot have the layout
        # channels_last. With model.channels_last, only the images have this layout.
        for parameter in own:
            parameter.data = parameter.data.contiguous()
        blocks = [
            block
            for block in dict.fromkeys(blocks_of(network))
            if own.issuperset(block.parameters())
        ]
        of_root = set(own)
        for block in blocks:
            of_root -= set(block.parameters())
        # Under autocast, layers of vectors such as norms compute in float32. FSDP2 gathers a unit
        # in one type, so they join the unit of the root, which is gathered once per step. A unit
        # for each norm would cost more time than the blocks.
        if dtype is not None:
            for layer in vector_layers(network):
                of_root |= own.intersection(layer.parameters(recurse=False))
        # Shard the root first: a block would otherwise take all parameters inside of it. Its
        # parameters stay gathered from the forward to the backward pass, as FSDP2 does by default
        # with its outermost module.
        whole_step = self.config.reshard_after_forward
        self._shard(network, of_root, None, False if whole_step is None else whole_step)
        for block in blocks:
            left = {p for p in block.parameters() if not isinstance(p, DTensor)}
            self._shard(block, left, dtype, self.config.reshard_after_forward)

    def _shard(
        self,
        module: nn.Module,
        parameters: set[nn.Parameter],
        dtype: torch.dtype | None,
        reshard_after_forward: bool | int | None,
    ) -> None:
        """Make a unit of `parameters` of a module, which are gathered together. `dtype`: type in
        which they are gathered; None: their own type.
        """
        fully_shard(
            module,
            mesh=self.mesh,
            reshard_after_forward=reshard_after_forward,
            # Do not convert inputs, because autocast chooses the type for each operation.
            mp_policy=MixedPrecisionPolicy(
                dtype, None if dtype is None else torch.float32, cast_forward_inputs=False
            ),
            ignored_params=set(module.parameters()) - parameters,
        )
        _announce_waiting(module)

    def for_evaluation(self, networks: Networks) -> Networks:
        # The networks are not sharded if evaluate.py evaluates them.
        is_sharded = any(isinstance(module, FSDPModule) for module in networks.modules())
        return LockstepNetworks(networks, self.group, self.device) if is_sharded else networks

    @contextmanager
    def skip_sync(self, wrapped: nn.Module) -> Iterator[None]:
        # Each rank adds up the gradients of whole parameters until they are reduced.
        self.root.set_requires_gradient_sync(False)
        self.root.set_is_last_backward(False)
        yield
        self.root.set_requires_gradient_sync(True)
        self.root.set_is_last_backward(True)

    def whole(self, tensor: Tensor) -> Tensor:
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def part(self, tensor: Tensor, like: Tensor) -> Tensor:
        if not isinstance(like, DTensor) or isinstance(tensor, DTensor):
            return tensor
        # Every rank already has the whole tensor, so no rank needs to send it.
        return distribute_tensor(
            tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None
        )


def _refuse_scalars(network: nn.Module, name: str) -> None:
    """Raise ValueError if a trained parameter of a network is a scalar, which fsdp cannot shard."""
    for parameter_name, parameter in network.named_parameters():
        if parameter.ndim == 0 and parameter.requires_grad:
            key = {"model": "model.name: ", "loss": "train.loss: "}.get(name, f"{name}.")
            raise ValueError(
                f"{key}{parameter_name} is a parameter without dimensions, which parallel=fsdp "
                "cannot shard; create it with torch.ones(1), which has one, or use parallel=ddp"
            )


def _announce_waiting(module: nn.Module) -> None:
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

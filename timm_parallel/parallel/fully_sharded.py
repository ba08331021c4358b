"""Strategy fsdp: FSDP2, in which every rank holds a part of every parameter.

During a step, the parameters are gathered for one block of the model after the other. Gradients,
optimizer state and averaged weights are sharded too. Checkpoints hold whole tensors, as under every
strategy.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from timm_parallel.parallel import shards
from timm_parallel.parallel.blocks import blocks_of, vector_layers
from timm_parallel.parallel.distributed import Distributed
from timm_parallel.parallel.lockstep import Lockstep
from timm_parallel.parallel.strategy import own_parameters


class FullySharded(Distributed):
    """Strategy fsdp, in which each rank drives one device.

    A group of `shard_size` ranks holds one copy of the model together. By default the group has all
    ranks.
    """

    shards = True
    compiles = False
    # Type in which parameters are gathered for a forward pass; None: their own type.
    dtype: torch.dtype | None = None

    @cached_property
    def mesh(self) -> DeviceMesh:
        """Build the device mesh of the ranks, with the dimensions [replicas, shards]. A mesh with
        one replica has only the dimension [shards].

        All ranks must call this function.
        """
        ranks, shard_size = self.group.world_size, self.config.shard_size
        if shard_size in (None, ranks):
            return init_device_mesh(self.device.type, (ranks,))
        shape = (ranks // shard_size, shard_size)
        return init_device_mesh(self.device.type, shape, mesh_dim_names=("replicate", "shard"))

    def wrap(self, step: Any) -> nn.Module:
        # A step whose model has no wrapper for autocast needs neither attribute.
        self.model = getattr(step, "bare_model", step.model)
        self.dtype = getattr(step, "dtype", None)
        # Broadcast the initial weights of rank 0, as DDP does. Otherwise the model would consist of
        # parts with different initial weights.
        for tensor in (*step.parameters(), *step.buffers()):
            self.group.broadcast(tensor.detach())
        shards.refuse_scalars(step, self.model)
        self.lay_out(self.model)
        # The outermost sharded module. It gathers parameters and reduces gradients for all modules
        # inside.
        self.root: Any = self.model
        own = own_parameters(step, self.model).values()
        if any(parameter.requires_grad for parameter in own):
            self.root = self._shard_step(step, list(own))
            return cast(nn.Module, self.root)
        return cast(nn.Module, step)

    def _shard_step(self, step: nn.Module, own: list[nn.Parameter]) -> nn.Module:
        """Shard the parameters that the training step has in addition to those of its model.

        Each step gathers these parameters before it starts.
        """
        root = StepOfShards(step)
        for parameter in own:
            parameter.data = parameter.data.contiguous()
        frozen = {parameter for parameter in own if not parameter.requires_grad}
        # Set no low precision here, because the loss is computed in float32.
        policy = MixedPrecisionPolicy(cast_forward_inputs=False)
        sharded = fully_shard(root, mesh=self.mesh, mp_policy=policy, ignored_params=frozen)
        shards.announce_waiting(root)
        # Run an empty forward pass now. FSDP2 takes the first module that runs as its root, and
        # this would be the model if an evaluation came before the first step.
        with torch.no_grad():
            root()
        sharded.reshard()
        return root

    def lay_out(self, module: nn.Module) -> None:
        # FSDP2 shards rows of contiguous tensors, so parameters cannot have the layout
        # channels_last. With model.channels_last, only the images have this layout.
        for parameter in module.parameters():
            parameter.data = parameter.data.contiguous()
        blocks = dict.fromkeys(blocks_of(module))
        of_root = set(module.parameters())
        for block in blocks:
            of_root -= set(block.parameters())
        # Under autocast, layers of vectors such as norms compute in float32. FSDP2 gathers a unit
        # in one type, so they join the unit of the root, which is gathered once per step. A unit
        # for each norm would cost more time than the blocks.
        if self.dtype is not None:
            for layer in vector_layers(module):
                of_root |= set(layer.parameters(recurse=False))
        # Shard the root first: a block would otherwise take all parameters inside of it.
        self._shard(module, of_root, None)
        for block in blocks:
            left = {p for p in block.parameters() if not isinstance(p, DTensor)}
            self._shard(block, left, self.dtype)

    def _shard(
        self, module: nn.Module, parameters: set[nn.Parameter], dtype: torch.dtype | None
    ) -> None:
        """Make a unit of `parameters` of a module, which are gathered together. `dtype`: type in
        which they are gathered; None: their own type.
        """
        fully_shard(
            module,
            mesh=self.mesh,
            reshard_after_forward=self.config.reshard_after_forward,
            # Do not convert inputs, because autocast chooses the type for each operation.
            mp_policy=MixedPrecisionPolicy(
                dtype, None if dtype is None else torch.float32, cast_forward_inputs=False
            ),
            ignored_params=set(module.parameters()) - parameters,
        )
        shards.announce_waiting(module)

    def for_evaluation(self, model: nn.Module) -> nn.Module:
        # The model is not sharded if evaluate.py evaluates it.
        is_sharded = any(isinstance(module, FSDPModule) for module in model.modules())
        return Lockstep(model, self.group, self.device) if is_sharded else model

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


class StepOfShards(nn.Module):
    """Training step whose loss has sharded parameters. A call without a batch gathers these
    parameters without training.
    """

    def __init__(self, step: nn.Module) -> None:
        super().__init__()
        self.step = step

    def forward(self, *batch: Tensor) -> Any:
        return self.step(*batch) if batch else None

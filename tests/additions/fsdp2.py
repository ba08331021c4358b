"""FSDP2: every rank holds a part of every parameter, gathered block by block while a step goes through the model."""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from src.parallel.distributed import Distributed
from src.parallel.forward import Autocast, ModelAndLoss


class FullyShard(Distributed):
    """`options.reshard_after_forward`: give up gathered parameters before the backward pass, for memory."""

    shards = True

    def wrap(self, model: nn.Module, criterion: Any, autocast: torch.dtype | None) -> nn.Module:
        self.plain = copy.deepcopy(model)  # whole, for evaluation: ranks with fewer batches must not wait in a block
        self.place(model)
        self.model = model
        return ModelAndLoss(model, criterion, self.device.type, autocast)

    def place(self, module: nn.Module) -> None:
        mesh = init_device_mesh(self.device.type, (self.world_size,))
        reshard = bool(self.config.options.get("reshard_after_forward", True))
        for block in [child for child in module.children() if any(True for _ in child.parameters())]:
            if not isinstance(block, nn.ModuleList):
                fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
        fully_shard(module, mesh=mesh, reshard_after_forward=reshard)

    def for_evaluation(self, model: nn.Module, autocast: torch.dtype | None) -> nn.Module:
        self.plain.load_state_dict({name: self.whole(tensor) for name, tensor in model.state_dict().items()})
        return Autocast(self.plain, self.device.type, autocast)

    def skip_sync(self, wrapped: nn.Module) -> AbstractContextManager[Any]:
        @contextmanager
        def unreduced() -> Any:
            self.model.set_requires_gradient_sync(False)
            yield
            self.model.set_requires_gradient_sync(True)

        return unreduced()

    def whole(self, tensor: Tensor) -> Tensor:
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def part(self, tensor: Tensor, like: Tensor) -> Tensor:
        if not isinstance(like, DTensor) or isinstance(tensor, DTensor):
            return tensor
        return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements)

    def communication_bytes(self, model: nn.Module, wrapped: nn.Module, accumulate: int) -> tuple[int, int]:
        """Parameters gathered in the forward and the backward pass, gradients scattered: three times their bytes."""
        size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
        return 3 * size * accumulate, 3 * size * accumulate * (self.world_size - 1) // self.world_size

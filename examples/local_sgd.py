"""Local SGD (Stich 2019, arXiv:1805.09767): ranks train by themselves, and average their weights
every few steps. This pays where the network is slow.

    cp examples/local_sgd.py src/train/ && cp examples/local_sgd.yaml conf/experiment/
    python train.py experiment=local_sgd parallel.devices=2

It reaches a val/acc of 0.75 in 18 seconds of CPU time.

With `momentum`, the averages keep moving in their former direction, as in DiLoCo (Douillard et al.
2023, arXiv:2311.08105). A checkpoint has the weights and the optimizer of rank 0. So leave
checkpoint.every_steps at null, or set it to a multiple of the period: evaluations average too.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from timm_parallel import Distributed, Networks


class LocalSgd(Distributed):
    """`parallel.options.period`: optimizer steps between two averages. `parallel.options.momentum`:
    from average to average.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.period = int(self.config.options.get("period", 8))
        self.momentum = float(self.config.options.get("momentum", 0))
        # Trained parameters of all phases, their last averages, and how far these moved.
        self.parameters: list[nn.Parameter] = []
        self.averages: list[Tensor] = []
        self.moves: list[Tensor] = []

    def wrap(self, step: nn.Module) -> nn.Module:
        # All ranks start from the weights of rank 0.
        for tensor in (*step.parameters(), *step.buffers()):
            self.group.broadcast(tensor.detach())
        trained = [parameter for parameter in step.parameters() if parameter.requires_grad]
        self.parameters += trained
        self.averages += [parameter.detach().clone() for parameter in trained]
        self.moves += [torch.zeros_like(parameter) for parameter in trained]
        return step

    def skip_sync(self, wrapped: nn.Module) -> AbstractContextManager[Any]:
        # No gradient is ever sent.
        return nullcontext()

    @torch.no_grad()
    def after_step(self, step: int) -> None:
        if step % self.period:
            return
        for parameter, average, move in zip(
            self.parameters, self.averages, self.moves, strict=True
        ):
            move.mul_(self.momentum).add_(self.mean(parameter) - average)
            parameter.copy_(average.add_(move))

    def mean(self, tensor: Tensor) -> Tensor:
        return self.group.sum(tensor.detach()) / self.group.world_size

    @torch.no_grad()
    def for_evaluation(self, networks: Networks) -> Networks:
        for parameter in networks.parameters():
            parameter.copy_(self.mean(parameter))
        return networks

    def state_dict(self) -> dict[str, Any]:
        return {"averages": self.averages, "moves": self.moves}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        now = (*self.averages, *self.moves)
        saved = (*state["averages"], *state["moves"])
        for tensor, value in zip(now, saved, strict=True):
            tensor.copy_(value)

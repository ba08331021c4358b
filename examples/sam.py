"""SAM (Foret et al. 2020, arXiv:2010.01412), an optimizer that computes the gradients twice: first
to find the worst weights nearby, then there, for the step.

    cp examples/sam.py src/train/ && cp examples/sam.yaml conf/experiment/
    python train.py experiment=sam

It reaches a val/acc of 0.71 in 25 seconds of CPU time. With `needs_closure`, the step calls a
function that computes the gradients of all batches of a step (train.accumulate), over all ranks.
Each call has the same augmentation, dropout and draws.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW


class Sam(AdamW):
    """AdamW with the gradients of the worst weights nearby. `optim.kwargs.rho`: distance of these
    weights.

    It needs the norm of whole gradients, so fsdp rejects it.
    """

    needs_closure = True

    def __init__(
        self, params: Any, lr: float, weight_decay: float = 0.01, rho: float = 0.05
    ) -> None:
        super().__init__(params, lr=lr, weight_decay=weight_decay)
        self.rho = rho

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor]) -> Tensor:  # type: ignore[override]
        loss = closure()
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        trained = [parameter for parameter in parameters if parameter.grad is not None]
        gradients = [parameter.grad for parameter in trained]
        weights = [parameter.clone() for parameter in trained]
        scale = self.rho / (nn.utils.get_total_norm(gradients) + 1e-12)
        for parameter, gradient in zip(trained, gradients, strict=True):
            parameter.add_(gradient * scale)
        closure()
        for parameter, weight in zip(trained, weights, strict=True):
            parameter.copy_(weight)
        super().step()
        return loss

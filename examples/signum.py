"""Signum, SGD that steps by the sign of its momentum (Bernstein et al. 2018, arXiv:1802.04434).

    cp examples/signum.py src/train/
    python train.py optim.opt=src.train.signum.Signum optim.lr=1e-4

State in `self.state` is saved and resumed.
"""

from typing import Any

import torch
from torch.optim import Optimizer


class Signum(Optimizer):
    # It updates each number alone, so fsdp can give it parts of tensors.
    works_on_parts = True

    def __init__(
        self, params: Any, lr: float, weight_decay: float = 0.0, momentum: float = 0.9
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["mean"] = torch.zeros_like(parameter)
                state["mean"].lerp_(parameter.grad, 1 - group["momentum"])
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(state["mean"].sign(), alpha=-group["lr"])

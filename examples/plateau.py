"""A schedule that depends on results: it divides the learning rates by ten when val/loss has not
improved for a while.

    cp examples/plateau.py src/train/
    python train.py optim.sched=src.train.plateau.Plateau +optim.sched_kwargs.patience=2

`state_dict` has what a resumed run needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer

from src.schema import OptimConfig


class Plateau:
    """`patience`: number of evaluations without a better val/loss before the rates fall."""

    def __init__(
        self, optimizer: Optimizer, config: OptimConfig, steps: int, patience: int = 3
    ) -> None:
        self.optimizer, self.patience = optimizer, patience
        self.peaks = [group["lr"] for group in optimizer.param_groups]
        self.best, self.waited, self.factor = float("inf"), 0, 1.0

    def step_update(self, step: int) -> None:
        for group, peak in zip(self.optimizer.param_groups, self.peaks, strict=True):
            group["lr"] = peak * self.factor * group.get("lr_scale", 1.0)

    def observe(self, numbers: Mapping[str, Any]) -> None:
        self.waited += 1
        if numbers["loss"] < self.best:
            self.best, self.waited = numbers["loss"], 0
        if self.waited > self.patience:
            self.factor, self.waited = self.factor / 10, 0

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "waited": self.waited, "factor": self.factor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best, self.waited, self.factor = state["best"], state["waited"], state["factor"]

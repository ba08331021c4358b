"""The training step: (images, targets) to (loss, metrics). Loss and metrics are those of the task
(src/tasks/). Edit it for an auxiliary loss of every task.

It is single-device code, which a strategy spreads over devices from outside
(timm_parallel/parallel/).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from src.tasks.images import Criterion
from timm_parallel import Task, frozen_modules

AUTOCAST = {"fp32": None, "tf32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class TrainStep(nn.Module):
    """Computes the loss of a batch, and its metrics, which are logged as `train/<name>`.

    Under DataParallel `self.model` may be the spread model, whose outputs are on another device
    than the targets.
    """

    def __init__(self, model: nn.Module, criterion: Criterion, task: Task[Any]) -> None:
        super().__init__()
        self.model, self.criterion, self.task = model, criterion, task
        self.frozen = frozen_modules(model)
        # A teacher of the loss, for example.
        if isinstance(criterion, nn.Module):
            self.frozen += frozen_modules(criterion)

    @property
    def bare_model(self) -> nn.Module:
        """The model without autocast, before a strategy replaces `model` by its wrapper."""
        return self.model.model if isinstance(self.model, Autocast) else self.model

    @property
    def dtype(self) -> torch.dtype | None:
        """The autocast dtype of the model; None: full precision."""
        return self.model.dtype if isinstance(self.model, Autocast) else None

    def train(self, mode: bool = True) -> TrainStep:
        """Switch to training mode, except for frozen modules (model.freeze), to keep BatchNorm and
        dropout fixed.
        """
        super().train(mode)
        for module in self.frozen:
            module.eval()
        return self

    def forward(self, images: Tensor, targets: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Map images [B, C, H, W] and targets [B, …] to a mean loss and metrics.

        A metric is a detached float scalar, the mean over the images of this call. The loop
        averages metrics over ranks, replicas and accumulated batches, weighted by images. Anything
        but a mean over images belongs into the metrics of the task.
        """
        return self.task.step(self.model, self.criterion, images, targets)


class Autocast(nn.Module):
    """Runs `model` under autocast. It is a module, because the autocast dtype is per thread in
    DataParallel's replicas.
    """

    def __init__(self, model: nn.Module, device_type: str, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.model = model
        self.device_type, self.dtype = device_type, dtype

    def forward(self, images: Tensor) -> Any:
        if self.dtype is None:
            return self.model(images)
        with torch.autocast(self.device_type, self.dtype):
            return self.model(images).float()


def set_matmul_precision(precision: str) -> None:
    """With tf32, let a GPU round float32 inputs of matrix products to 10 bits of mantissa, as
    convolutions do by default.
    """
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")

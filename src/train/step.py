"""The training step: (images, targets) to (loss, metrics). Edit it for an auxiliary loss, a teacher
or a training metric.

It is single-device code, which a strategy spreads over devices from outside (src/parallel/).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from src.models.freeze import frozen_modules

Criterion = Callable[[Tensor, Tensor], Tensor]
AUTOCAST = {"fp32": None, "tf32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class TrainStep(nn.Module):
    """Computes the loss of a batch, and its metrics, which are logged as `train/<name>`.

    Under DataParallel `self.model` may be the spread model, whose outputs are on another device
    than the targets.
    """

    def __init__(
        self,
        model: nn.Module,
        criterion: Criterion,
        task: str = "classification",
        num_classes: int | None = None,
    ) -> None:
        """`num_classes`: of the data, if the model may have more outputs."""
        super().__init__()
        self.model, self.criterion, self.task, self.num_classes = (
            model,
            criterion,
            task,
            num_classes,
        )
        self.frozen = frozen_modules(model)

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
        """Map images [B, C, H, W] and targets ([B], or [B, classes] under mixup) to a mean loss and
        metrics.

        A metric is a detached float scalar, the mean over the images of this call. The loop
        averages metrics over ranks, replicas and accumulated batches, weighted by images. Anything
        but a mean over images belongs in metrics.py.
        """
        outputs = self.model(images)
        targets = targets.to(outputs.device, non_blocking=True)
        loss = self.criterion(outputs, targets)
        # As in evaluation, further outputs are no scores.
        outputs = outputs[:, : self.num_classes]
        if self.task == "multilabel":
            return loss, {}
        return loss, {"acc": accuracy(outputs.detach(), targets)}


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Compute the share of images whose label has the highest score. The label of a mixed image is
    the larger one.
    """
    labels = targets if targets.ndim == 1 else targets.argmax(1)
    return (outputs.argmax(1) == labels).float().mean()


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

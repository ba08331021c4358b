"""Model and loss as one module, so that every strategy is called the same way: (images, targets) -> mean loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Criterion = Callable[[Tensor, Tensor], Tensor]


class Autocast(nn.Module):
    """`model` under autocast. A module, because inside DataParallel replicas the autocast dtype is per thread."""

    def __init__(self, model: nn.Module, device_type: str, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.model = model
        self.device_type, self.dtype = device_type, dtype

    def forward(self, images: Tensor) -> Any:
        if self.dtype is None:
            return self.model(images)
        with torch.autocast(self.device_type, self.dtype):
            return self.model(images).float()


class ModelAndLoss(nn.Module):
    """Maps images [B, C, H, W] and targets [B] or [B, classes] to a scalar loss."""

    def __init__(self, model: nn.Module, criterion: Criterion, device_type: str, autocast: torch.dtype | None) -> None:
        super().__init__()
        self.model = Autocast(model, device_type, autocast)
        self.criterion = criterion

    def forward(self, images: Tensor, targets: Tensor) -> Tensor:
        return self.criterion(self.model(images), targets)


AUTOCAST = {"fp32": None, "tf32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def set_matmul_precision(precision: str) -> None:
    """tf32: a GPU's matrix products round their float32 inputs to 10 bits of mantissa, as torch's convolutions do anyway."""
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")

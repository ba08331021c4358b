"""The training step: computes loss and metrics from images and targets. The task (src/tasks/)
defines them. Edit this file to add an auxiliary loss to every task.

This is single-device code. A strategy distributes it over devices from outside
(timm_parallel/parallel/).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from src.tasks.images import Criterion
from timm_parallel import Task, frozen_modules

AUTOCAST = {"fp32": None, "tf32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class TrainStep(nn.Module):
    """Computes the loss of a batch and its metrics, which are logged as `train/<name>`.

    With DataParallel, the attribute `model` may be a wrapper that spreads the model over devices.
    The outputs of such a wrapper may be on another device than the targets.
    """

    def __init__(self, model: nn.Module, criterion: Criterion, task: Task[Any]) -> None:
        super().__init__()
        self.model, self.criterion, self.task = model, criterion, task
        self.frozen = frozen_modules(model)
        # A loss may have frozen modules too, for example a teacher.
        if isinstance(criterion, nn.Module):
            self.frozen += frozen_modules(criterion)

    @property
    def bare_model(self) -> nn.Module:
        """The model without the Autocast wrapper, for a training step that no strategy has wrapped
        yet.
        """
        return self.model.model if isinstance(self.model, Autocast) else self.model

    @property
    def dtype(self) -> torch.dtype | None:
        """The autocast dtype of the model, or None for full precision."""
        return self.model.dtype if isinstance(self.model, Autocast) else None

    def train(self, mode: bool = True) -> TrainStep:
        """Switch to training mode, but keep frozen modules (model.freeze) in evaluation mode. Their
        BatchNorm statistics and dropout then stay fixed.
        """
        super().train(mode)
        for module in self.frozen:
            module.eval()
        return self

    def forward(self, images: Tensor, targets: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute the mean loss and the metrics of a batch from images [B, C, H, W] and targets [B,
        …].

        A metric is a detached float scalar: the mean over the images of this call. The loop
        averages metrics over ranks, replicas and accumulated batches, weighted by their numbers of
        images. A number that is not a mean over images belongs in the `metrics` of the task.
        """
        return self.task.step(self.model, self.criterion, images, targets)


class Autocast(nn.Module):
    """Runs a model under autocast. This is a module, because DataParallel runs replicas in threads,
    and each thread has its own autocast dtype.
    """

    def __init__(self, model: nn.Module, device_type: str, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.model = model
        self.device_type, self.dtype = device_type, dtype

    def forward(self, images: Tensor) -> Any:
        if self.dtype is None:
            return self.model(images)
        with torch.autocast(self.device_type, self.dtype):
            # A model may return several tensors in training, for example of an auxiliary head.
            return tree_map_only(Tensor, Tensor.float, self.model(images))


def set_matmul_precision(precision: str) -> None:
    """Set the precision of float32 matrix products on GPUs. With train.precision=tf32, GPUs round
    the inputs to 10 bits of mantissa, as they do by default in convolutions.
    """
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")

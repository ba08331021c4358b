"""Evaluation of a sharded model, whose forward passes need all ranks, by ranks with unequal numbers
of batches.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from timm_parallel.faults.liveness import COUNTING, EVALUATING, liveness
from timm_parallel.parallel.group import ProcessGroup


class Lockstep(nn.Module):
    """Runs the forward passes of a sharded model in all ranks at once. Call `finish` after a rank's
    last batch.
    """

    def __init__(self, model: nn.Module, group: ProcessGroup, device: torch.device) -> None:
        super().__init__()
        self.model, self._group, self.device = model, group, device

    def forward(self, images: Tensor) -> Any:
        """Map images [B, C, H, W] to the model's outputs, while every other rank runs its batch or
        `finish`.
        """
        self._announce(tuple(images.shape[1:]))
        # Parameters that are gathered in inference mode could not be used in a later training step.
        with torch.inference_mode(False), torch.no_grad():
            return self.model(images)

    def finish(self) -> None:
        """Run black images while other ranks have batches left,
        then free the gathered parameters.
        """
        while shape := [int(side) for side in self._announce((0, 0, 0)).amax(0) if side]:
            with torch.inference_mode(False), torch.no_grad():
                self.model(torch.zeros(1, *shape, device=self.device))
        for module in self.model.modules():
            getattr(module, "reshard", lambda: None)()

    def _announce(self, shape: tuple[int, ...]) -> Tensor:
        """Gather the image shape of each rank's next batch: [ranks, 3], zeros for a rank without a
        next batch. Collective.
        """
        liveness.at(COUNTING)
        shapes = self._group.rows(torch.tensor(shape, device=self.device))
        liveness.at(EVALUATING)
        return shapes

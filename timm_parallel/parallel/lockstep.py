"""Evaluate a sharded model on ranks that have different numbers of batches.

Each forward pass of a sharded model needs all ranks, so a rank without a batch must still take
part.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from timm_parallel.faults.liveness import COUNTING, EVALUATING, liveness
from timm_parallel.parallel.group import ProcessGroup


class Lockstep(nn.Module):
    """Wrapper of a sharded model that starts each forward pass on all ranks at the same time.

    After its last batch, a rank must call `finish`.
    """

    def __init__(self, model: nn.Module, group: ProcessGroup, device: torch.device) -> None:
        super().__init__()
        self.model, self._group, self.device = model, group, device

    def forward(self, images: Tensor) -> Any:
        """Run the model on images [B, C, H, W] and return its outputs.

        Meanwhile, every other rank must run a batch of its own or `finish`.
        """
        self._announce(tuple(images.shape[1:]))
        # Do not use inference mode, because parameters that were gathered in it cannot be trained
        # later.
        with torch.inference_mode(False), torch.no_grad():
            return self.model(images)

    def finish(self) -> None:
        """Run the model on black images until all ranks have evaluated their last batch.

        Then free the gathered parameters. All ranks must call this function.
        """
        while shape := [int(side) for side in self._announce((0, 0, 0)).amax(0) if side]:
            with torch.inference_mode(False), torch.no_grad():
                self.model(torch.zeros(1, *shape, device=self.device))
        for module in self.model.modules():
            getattr(module, "reshard", lambda: None)()

    def _announce(self, shape: tuple[int, ...]) -> Tensor:
        """Gather the image shape of the next batch of each rank, as a tensor [ranks, 3].

        A rank without a further batch has zeros. All ranks must call this function.
        """
        liveness.at(COUNTING)
        shapes = self._group.rows(torch.tensor(shape, device=self.device))
        liveness.at(EVALUATING)
        return shapes

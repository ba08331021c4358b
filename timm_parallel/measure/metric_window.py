"""Collect the loss and metrics of training steps on the device until they are logged.

When they are fetched, a loss that is not finite raises an error.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from timm_parallel.errors import NotFiniteError
from timm_parallel.parallel.group import ProcessGroup


class MetricWindow:
    """Loss and metrics of each training step since the last logged step, summed over images.

    The sums stay on the device, and only `fetch` waits for them.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._names: tuple[str, ...] = ()
        self._steps: dict[int, Tensor] = {}
        self._images: dict[int, int] = {}

    def add(self, step: int, loss: Tensor, metrics: dict[str, Tensor], images: int) -> None:
        """Add the loss and metrics of one batch to the sums of its step.

        The values are means over the `images` images of the batch.
        """
        names = ("loss", *metrics)
        if self._names not in ((), names):
            now, before = (", ".join(each[1:]) or "none" for each in (names, self._names))
            raise ValueError(
                "the training step must return the same metrics in every call; it returned "
                f"{now}, but {before} in earlier calls"
            )
        self._names = names
        values = [loss.detach(), *metrics.values()]
        row = (
            torch.stack(
                [value.to(self._device, torch.float32, non_blocking=True) for value in values]
            )
            * images
        )
        self._steps[step] = self._steps[step] + row if step in self._steps else row
        self._images[step] = self._images.get(step, 0) + images

    def fetch(self, group: ProcessGroup) -> list[tuple[dict[str, float], int]]:
        """Sum the loss and metrics over all ranks, for each step since the last call.

        Returns one pair per step: a dictionary from metric to sum, and the number of images. Raises
        NotFiniteError for a loss that is not finite. All ranks must call this function.
        """
        if not self._steps:
            return []
        local = torch.stack(list(self._steps.values()))
        images = torch.tensor(list(self._images.values()), dtype=torch.float32, device=self._device)
        table = group.sum(torch.cat([local, images[:, None]], 1)).tolist()
        for index, (step, row) in enumerate(zip(self._steps, table, strict=True)):
            if not math.isfinite(row[0]):
                finite = group.gather(bool(local[index, 0].isfinite()))
                ranks = ", ".join(
                    str(rank) for rank, is_finite in enumerate(finite) if not is_finite
                )
                raise NotFiniteError(f"the loss is {row[0]} at step {step} (rank {ranks})", step)
        self._steps, self._images = {}, {}
        return [(dict(zip(self._names, row, strict=False)), int(row[-1])) for row in table]

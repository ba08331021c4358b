"""Collect the losses and numbers of training steps on the device until they are logged, and compute
their means.

When they are fetched, a loss that is not finite raises an error.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from timm_parallel.errors import NotFiniteError
from timm_parallel.parallel.group import ProcessGroup
from timm_parallel.state.progress import Progress

# Name of the loss, and start of the names of the losses of several phases.
LOSS = "loss"


class MetricWindow:
    """Losses and numbers of each training step since the last logged step, summed over images.

    The sums stay on the device until `fetch` adds them to those in the progress of the run, which a
    checkpoint stores.
    """

    def __init__(self, device: torch.device, progress: Progress) -> None:
        self._device, self._progress = device, progress
        self._names: tuple[str, ...] = ()
        # Rows of each step. The key is the phase with the names of its values.
        self._steps: dict[int, dict[tuple[str, tuple[str, ...]], Tensor]] = {}
        self._images: dict[int, int] = {}

    def add(self, step: int, part: str, values: dict[str, Tensor], images: int) -> None:
        """Add the values of one batch to the sums of its step.

        `part`: name of the phase; each phase adds its own values for each batch. `values`: means
        over the `images` images of the batch.
        """
        row = torch.stack(
            [value.to(self._device, torch.float32, non_blocking=True) for value in values.values()]
        )
        row = row * images
        rows = self._steps.setdefault(step, {})
        key = part, tuple(values)
        rows[key] = rows[key] + row if key in rows else row

    def add_images(self, step: int, images: int) -> None:
        """Count the images of one batch of a step."""
        self._images[step] = self._images.get(step, 0) + images

    def fetch(self, group: ProcessGroup, is_logged: bool) -> dict[str, float]:
        """Sum the values of the steps since the last call over all ranks. At a logged step, return
        the means since the last logged one, and start the sums again. Otherwise return nothing.

        Raises ValueError if a phase returned other numbers than in an earlier step, and
        NotFiniteError for a loss that is not finite. All ranks must call this function.
        """
        names = self._check_names()
        local = torch.stack([torch.cat([*rows.values()]) for rows in self._steps.values()])
        images = torch.tensor(list(self._images.values()), dtype=torch.float32, device=self._device)
        table = group.sum(torch.cat([local, images[:, None]], 1)).tolist()
        for index, (step, row) in enumerate(zip(self._steps, table, strict=True)):
            for column, name in enumerate(names):
                if name.startswith(LOSS) and not math.isfinite(row[column]):
                    finite = group.gather(bool(local[index, column].isfinite()))
                    ranks = ", ".join(
                        str(rank) for rank, is_finite in enumerate(finite) if not is_finite
                    )
                    raise NotFiniteError(
                        f"the {name} is {row[column]} at step {step} (rank {ranks})", step
                    )
        self._steps, self._images = {}, {}
        progress = self._progress
        # Add one step at a time, so that stopping and resuming between two steps does not change
        # the rounding.
        for row in table:
            _add(progress.window_sums, _with_loss(dict(zip(names, row, strict=False))))
            progress.window_images += int(row[-1])
        if not is_logged:
            return {}
        sums, count = progress.window_sums, progress.window_images
        _add(progress.epoch_sums, sums)
        progress.epoch_images += count
        progress.window_sums, progress.window_images = {}, 0
        return {name: value / count for name, value in sums.items()}

    def _check_names(self) -> tuple[str, ...]:
        for rows in self._steps.values():
            names = tuple(name for _, of_part in rows for name in of_part)
            if len(set(names)) < len(names) or self._names not in ((), names):
                now, before = (", ".join(each) or "none" for each in (names, self._names))
                raise ValueError(
                    "losses() must return the same numbers for each batch, with different names in "
                    f"each phase; the names are {now}" + (f"; before: {before}" if before else "")
                )
            self._names = names
        return self._names


def _add(sums: dict[str, float], values: dict[str, float]) -> None:
    for name, value in values.items():
        sums[name] = sums.get(name, 0.0) + value


def _with_loss(sums: dict[str, float]) -> dict[str, float]:
    """Add the loss of a step, which is the sum of the losses of its phases."""
    of_phases = [value for name, value in sums.items() if name.startswith(f"{LOSS}_")]
    return sums if LOSS in sums else {LOSS: sum(of_phases), **sums}

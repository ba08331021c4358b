"""Class of an evaluation metric. Does not import torch, because train.py reads the registered names
before torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Metric:
    """An evaluation metric, exact on any number of ranks. Define `sums` and `from_sums`, or
    `from_rows`.

    - `sums(scores, targets, losses)`: a tensor of fixed shape, which is added over batches and
      ranks. scores and targets: [B, …], losses: [B]. Metrics with the same function share its sums.
    - `from_sums(sums, samples)`: the value.
    - `from_rows(scores, targets)`: the value from all rows of the split, in the order of the
      dataset, on the host.

    A value may be None, for example the score of a class without images.
    """

    sums: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
    from_sums: Callable[[Tensor, int], float | None] | None = None
    from_rows: Callable[[Tensor, Tensor], float | None] | None = None
    lower_is_better: bool = False
    is_proportion: bool = False  # from 0 to 1; the report shows it in percent
    min_outputs: int = 0  # of the task; with fewer, it has no value

    @property
    def shown_as(self) -> tuple[bool, bool]:
        """Direction and unit, which reports and searches know by the name of a metric alone."""
        return self.lower_is_better, self.is_proportion

"""Class of an evaluation metric."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from timm_parallel.batch import Batch


@dataclass(frozen=True)
class Metric:
    """An evaluation metric whose value is exact on any number of ranks. A metric defines the
    functions `sums` and `from_sums`, or the function `from_rows`.

    - `sums(task, outputs, batch)` returns a tensor of fixed shape for a batch. The tensors are
      added over all batches and ranks. `outputs` is what `task.predict` returns. Metrics with the
      same `sums` function share its result.
    - `from_sums(sums, samples)` computes the value of the metric from the total and the number of
      samples.
    - `from_rows(*rows)` computes the value of the metric from what `task.rows` returns, for all
      samples of the split. The tensors are on the CPU, in the order of the dataset.

    The value may be None, for example for a class without images.
    """

    sums: Callable[[Any, Any, Batch], Tensor] | None = None
    from_sums: Callable[[Tensor, int], float | None] | None = None
    from_rows: Callable[..., float | None] | None = None
    lower_is_better: bool = False
    # True for values from 0 to 1, which the report shows in percent.
    is_proportion: bool = False
    # Smallest number of model outputs for which the metric is defined. For a task with fewer
    # outputs its value is None.
    min_outputs: int = 0


# The training loss, which a task may also have as a metric.
LOSS = Metric(lower_is_better=True)


def to_double(values: Tensor) -> Tensor:
    """Convert a tensor to float64, in which sums over a split are exact enough; to float32 on mps,
    which has no float64.
    """
    return values.float() if values.device.type == "mps" else values.double()


def metric_name(measure: str) -> str:
    """Return the name of the metric in a measure such as `val/acc_ema` or `test/loss_best`."""
    return measure.rpartition("/")[2].removesuffix("_best").removesuffix("_ema")

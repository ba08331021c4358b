"""Task of the small project: find the position of the spot."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from small.config import ResolvedConfig
from small.data import SIDE
from timm_parallel import Batch, Metric, Task, to_double

# Distance from the center of the spot to that of the next pixel.
PIXEL = 1 / (SIDE - 1)


def squared_errors(scores: Tensor, targets: Tensor) -> Tensor:
    """Compute the mean squared error of row and column for each image. Return a tensor [B]."""
    return (scores - targets).square().mean(1)


def distances(scores: Tensor, targets: Tensor) -> Tensor:
    """Compute the distance of each predicted position from the true one. Return a tensor [B]."""
    return (scores - targets).norm(dim=1)


def error_sum(task: Any, scores: Tensor, batch: Batch) -> Tensor:
    return to_double(squared_errors(scores, batch.target)).sum()


def count_near(task: Any, scores: Tensor, batch: Batch) -> Tensor:
    """Count the images whose predicted position is less than a pixel off."""
    return (distances(scores, batch.target) < PIXEL).sum()


def mean_of(total: Tensor, samples: int) -> float:
    return float(total) / samples


class Position(Task[ResolvedConfig]):
    """Predict row and column of the spot, from 0 to 1."""

    target = "numbers"
    metrics = {
        "loss": Metric(error_sum, mean_of, lower_is_better=True),
        "near": Metric(count_near, mean_of, is_proportion=True),
        "median_distance": Metric(
            from_rows=lambda scores, targets: float(distances(scores, targets).median()),
            lower_is_better=True,
        ),
    }

    def losses(self, networks: Any, batch: Batch, phase: str) -> tuple[Tensor, dict[str, Tensor]]:
        scores = networks.model(batch.image)
        far = distances(scores.detach(), batch.target)
        return squared_errors(scores, batch.target), {"distance": far}

"""Task of the small project: find the position of the spot."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from small.config import ResolvedConfig
from small.data import SIDE
from timm_parallel import Loss, Metric, Task

if TYPE_CHECKING:
    from torch import Tensor

# Distance from the center of the spot to that of the next pixel.
PIXEL = 1 / (SIDE - 1)


def squared_errors(scores: Tensor, targets: Tensor) -> Tensor:
    """Compute the mean squared error of row and column for each image. Return a tensor [B]."""
    return (scores - targets).square().mean(1)


def distances(scores: Tensor, targets: Tensor) -> Tensor:
    """Compute the distance of each predicted position from the true one. Return a tensor [B]."""
    return (scores - targets).norm(dim=1)


def build_mse(config: ResolvedConfig) -> Any:
    return lambda scores, targets: squared_errors(scores, targets).mean()


def mean_of(total: Tensor, samples: int) -> float:
    return float(total) / samples


class Position(Task[ResolvedConfig]):
    """Predict row and column of the spot, from 0 to 1."""

    target = "numbers"
    names_are = "numbers"
    losses = {"mse": Loss(build_mse, squared_errors)}
    metrics = {
        "loss": Metric(lambda scores, targets, losses: losses.sum(), mean_of, lower_is_better=True),
        # Share of images whose predicted position is less than a pixel off.
        "near": Metric(
            lambda scores, targets, losses: (distances(scores, targets) < PIXEL).sum(),
            mean_of,
            is_proportion=True,
        ),
        "median_distance": Metric(
            from_rows=lambda scores, targets: float(distances(scores, targets).median()),
            lower_is_better=True,
        ),
    }

    def train_metrics(self, scores: Tensor, targets: Tensor) -> dict[str, Tensor]:
        return {"distance": distances(scores, targets).mean()}

    def blank(self, count: int, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
        import torch

        return torch.zeros(count, self.num_outputs), torch.zeros(count, self.num_outputs)

"""Task of the small project with targets of unequal length: come close to all spots of an image."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from small.config import ResolvedConfig
from small.task import distances, mean_of, squared_errors
from timm_parallel import Batch, Metric, Task, to_double


def errors_of(scores: Tensor, batch: Batch) -> Tensor:
    """Compute the sum of the squared errors over the points of each image. Return a tensor [B]."""
    pairs = zip(scores, batch.points, strict=True)
    return torch.stack([squared_errors(position, points).sum() for position, points in pairs])


def error_sum(task: Any, scores: Tensor, batch: Batch) -> Tensor:
    return to_double(errors_of(scores, batch)).sum()


def distance_sum(task: Any, scores: Tensor, batch: Batch) -> Tensor:
    """Sum the distances of all points, and count the points. Return a tensor [2]."""
    pairs = zip(scores, batch.points, strict=True)
    of_points = torch.cat([distances(position, points) for position, points in pairs])
    return to_double(torch.stack([of_points.sum(), of_points.new_tensor(len(of_points))]))


class Points(Task[ResolvedConfig]):
    """Predict one row and column for all points of an image. The loss is a mean over points."""

    target = "points"
    metrics = {
        "loss": Metric(error_sum, mean_of, lower_is_better=True),
        "distance": Metric(
            distance_sum, lambda sums, samples: float(sums[0] / sums[1]), lower_is_better=True
        ),
    }

    def collate(self, targets: Any) -> dict[str, Any]:
        return {"points": [target["points"] for target in targets]}

    def weight(self, batch: Batch) -> int:
        return sum(map(len, batch.points))

    def losses(self, networks: Any, batch: Batch, phase: str) -> tuple[Tensor, dict[str, Tensor]]:
        return errors_of(networks.model(batch.image), batch), {}

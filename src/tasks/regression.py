"""Regression: the model predicts one or several numbers for each image."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from src.schema import ResolvedConfig
from src.tasks.images import LOSS, Criterion, Loss, LossTask
from timm_parallel import Batch, Evaluation, Metric, to_double


def squared_errors(outputs: Tensor, targets: Tensor) -> Tensor:
    """Compute the squared error of each image, averaged over its numbers. Return a tensor [B]."""
    return (outputs - targets).square().mean(1)


def absolute_errors(outputs: Tensor, targets: Tensor) -> Tensor:
    """Compute the absolute error of each image, averaged over its numbers. Return a tensor [B]."""
    return (outputs - targets).abs().mean(1)


def huber_errors(outputs: Tensor, targets: Tensor, delta: float = 1.0) -> Tensor:
    """Compute the Huber loss (Huber 1964) of each image, averaged over its numbers. Return a tensor
    [B].
    """
    return functional.huber_loss(outputs, targets, reduction="none", delta=delta).mean(1)


def build_loss(errors: Callable[..., Tensor]) -> Callable[..., Criterion]:
    """Return a function that builds the loss of a config from a function that computes an error for
    each image.
    """

    def build(config: ResolvedConfig, **options: float) -> Criterion:
        # Call the function once, so that an unknown option raises an error before the first step.
        errors(torch.zeros(1, 1), torch.zeros(1, 1), **options)
        # Use the first outputs only, because the model may have more outputs than there are
        # targets.
        return lambda outputs, targets: errors(outputs[:, : targets.shape[1]], targets, **options)

    return build


def error_sums(task: Any, outputs: Tensor, batch: Batch) -> Tensor:
    """Sum over images the absolute errors, squared errors, targets and squared targets of each
    number. Return a tensor [4, numbers].
    """
    # Use double precision if the device has it, because R² subtracts large, nearly equal sums of
    # squares.
    errors, values = to_double(outputs - batch.target), to_double(batch.target)
    return torch.stack(
        [errors.abs().sum(0), errors.square().sum(0), values.sum(0), values.square().sum(0)]
    )


def mean_absolute_error(sums: Tensor, samples: int) -> float:
    """Compute the mean absolute error over all images and all numbers of an image."""
    return float(sums[0].mean()) / samples


def root_mean_squared_error(sums: Tensor, samples: int) -> float:
    """Compute the root mean squared error over all images and all numbers of an image."""
    return float(sums[1].mean() / samples) ** 0.5


def explained_share(sums: Tensor, samples: int) -> float | None:
    """Compute R², averaged over the numbers, as scikit-learn's r2_score. Return None if all targets
    of a number are equal, because R² is then undefined.
    """
    _, squared_error, total, squares = sums
    spread = squares - total.square() / samples
    return float((1 - squared_error / spread).mean()) if bool((spread > 0).all()) else None


class Regression(LossTask):
    """Task in which the model predicts numbers of an image. Targets are float32 [B, numbers]."""

    target = "numbers"
    headline = "mae"
    applies = ("erasing", "auto_augment")
    known_losses: ClassVar[Mapping[str, Loss]] = {
        "mse": Loss(build_loss(squared_errors), squared_errors),
        "l1": Loss(build_loss(absolute_errors), absolute_errors),
        "huber": Loss(build_loss(huber_errors), huber_errors),
    }
    metrics: Mapping[str, Metric] = {
        "loss": LOSS,
        "mae": Metric(error_sums, mean_absolute_error, lower_is_better=True),
        "rmse": Metric(error_sums, root_mean_squared_error, lower_is_better=True),
        "r2": Metric(error_sums, explained_share),
    }
    problem_type = "regression"

    def check_targets(self, targets: Tensor) -> None:
        if len(targets) and targets.shape[1:] != (len(self.names),):
            raise ValueError(
                f"the data has targets of shape {list(targets.shape[1:])}, expected "
                f"{len(self.names)} numbers for each image ({', '.join(self.names)})"
            )

    def train_numbers(self, scores: Tensor, targets: Tensor) -> dict[str, Tensor]:
        return {"mae": absolute_errors(scores, targets)}

    def details(self, evaluation: Evaluation) -> dict[str, Any]:
        """Return the number of images, and the mean absolute error of each number."""
        errors = evaluation.sums[error_sums][0] / evaluation.samples
        return {
            "samples": evaluation.samples,
            "mae_per_number": dict(zip(self.names, errors.tolist(), strict=True)),
        }

    def table(self, evaluation: Evaluation) -> dict[str, list[Any]]:
        """Return columns for a table with a row per image: `<name>` for the true value of a number,
        and `<name>_predicted` for its prediction.
        """
        assert evaluation.rows is not None
        _, scores, targets = evaluation.rows
        columns: dict[str, list[Any]] = {}
        for number, name in enumerate(self.names):
            columns[name] = targets[:, number].tolist()
            columns[f"{name}_predicted"] = scores[:, number].tolist()
        return columns

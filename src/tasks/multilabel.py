"""Multi-label classification: each image has any number of labels."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

import torch
from timm.loss import create_classification_loss
from timm.task import MultiLabelClassificationEvaluator
from torch import Tensor

from src.schema import ResolvedConfig
from src.tasks.classification import (
    ClassLoss,
    ClassTask,
    binary_cross_entropy,
    sigmoid_losses,
    without_state,
)
from src.tasks.images import LOSS, Criterion
from timm_parallel import Batch, Evaluation, Metric

# Character between two labels of an image in a table, as in the CSV files of data=csv.
SEPARATOR = ";"


def asymmetric(
    config: ResolvedConfig,
    class_weight: Tensor | None = None,
    pos_weight: Tensor | None = None,
    gamma_pos: float = 1.0,
    gamma_neg: float = 4.0,
    clip: float = 0.05,
) -> Criterion:
    """Build the asymmetric loss (Ridnik et al. 2021, arXiv:2009.14119). It gives less weight to
    classes that the model is sure an image does not have.
    """
    criterion = create_classification_loss(
        "asl",
        multi_label=True,
        smoothing=config.train.smoothing,
        class_weight=class_weight,
        pos_weight=pos_weight,
        asl_gamma_pos=gamma_pos,
        asl_gamma_neg=gamma_neg,
        asl_clip=clip,
    )
    return without_state(criterion)


def count_labels(task: Any, scores: Tensor, batch: Batch) -> Tensor:
    """Count true positives, predicted labels and true labels of each class. Return a tensor [3,
    classes].
    """
    # A score of 0 or more is a probability of 0.5 or more.
    predicted, has_label = scores >= 0, batch.target > 0.5
    return torch.stack([(predicted & has_label).sum(0), predicted.sum(0), has_label.sum(0)])


def macro_f1(counts: Tensor, samples: int) -> float:
    """Compute macro F1: the mean over classes of 2 TP / (predicted + labeled). A class that has
    neither predictions nor labels counts as 0.
    """
    hits, predicted, labeled = counts.double()
    return float((2 * hits / (predicted + labeled).clamp(min=1)).mean())


def mean_average_precision(scores: Tensor, labels: Tensor) -> float:
    """Compute mean average precision: the mean over classes of the sum of precision x gain in
    recall. A class without images counts as 0.
    """
    evaluator = MultiLabelClassificationEvaluator()
    evaluator.update(scores, labels)
    return float(evaluator.compute()["map"]) / 100


class Multilabel(ClassTask):
    """Task in which each image has any number of labels. Targets are float [B, classes]: 1 for a
    label, else 0.
    """

    target = "labels"
    headline = "map"
    # mixup and balance are not in the list, because they need images with exactly one label.
    applies = ("erasing", "auto_augment", "smoothing", "class_weights")
    known_losses: ClassVar[Mapping[str, ClassLoss]] = {
        "bce": ClassLoss(
            partial(binary_cross_entropy, True),
            sigmoid_losses,
            ("smoothing", "class_weights"),
            torch.sigmoid,
            has_class_terms=True,
        ),
        "asl": ClassLoss(
            asymmetric,
            sigmoid_losses,
            ("smoothing", "class_weights"),
            torch.sigmoid,
            has_class_terms=True,
        ),
    }
    metrics: Mapping[str, Metric] = {
        "loss": LOSS,
        "map": Metric(from_rows=mean_average_precision, is_proportion=True),
        "f1_macro": Metric(count_labels, macro_f1, is_proportion=True),
    }
    problem_type = "multi_label_classification"

    def check_targets(self, targets: Tensor) -> None:
        if len(targets) and targets.shape[1:] != (len(self.names),):
            raise ValueError(
                f"the data has labels of shape {list(targets.shape[1:])}, expected a number for "
                f"each of the {len(self.names)} classes"
            )

    def class_weights(self, labels: Tensor | None) -> dict[str, Tensor]:
        """Build the keyword arguments that pass train.class_weights to the loss.

        With auto, the positives of a class have half of its weight, and the negatives the other
        half. For n positives among N images, the weight of a positive is N / (2 n), and that of a
        negative N / (2 (N - n)). The loss multiplies `class_weight`, the weight of negatives, by
        `pos_weight`, which is timm's negatives / positives. A class without positives, or without
        negatives, keeps weight 1. A list of weights is scaled to mean 1 over the classes.
        """
        if self.config.train.class_weights != "auto" or labels is None:
            return super().class_weights(labels)
        images, positives = len(labels), self.count_classes(labels)
        negatives = images - positives
        has_both = (positives > 0) & (negatives > 0)
        of_positives, of_negatives = (
            torch.where(has_both, images / (2 * count), 1.0) for count in (positives, negatives)
        )
        return {"class_weight": of_negatives, "pos_weight": of_positives / of_negatives}

    def count_classes(self, targets: Tensor) -> Tensor:
        return (targets > 0.5).sum(0)

    def table(self, evaluation: Evaluation) -> dict[str, list[Any]]:
        """Return columns for a table with a row per image: its labels, and all classes with their
        probabilities. Other programs can compute metrics from this table.
        """
        assert evaluation.rows is not None
        _, scores, labels = evaluation.rows
        joined = [
            SEPARATOR.join(name for name, value in zip(self.names, row, strict=True) if value > 0.5)
            for row in labels.tolist()
        ]
        # Use double precision, because in single precision all scores above 17 have the probability
        # 1.
        return {"label": joined} | self.predictions(scores.double(), len(self.names))

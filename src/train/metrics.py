"""Evaluation metrics. To add one, put it into METRICS, or for several labels per image into
MULTILABEL_METRICS.

It then appears in TensorBoard, metrics.jsonl and result.json as `<split>/<name>`, and
`checkpoint.metric`, `optimized_metric` and searches can name it. Import torch inside functions
only: train.py reads the names first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from timm_parallel.metric import Metric

if TYPE_CHECKING:
    from torch import Tensor

    from timm_parallel.runtime.evaluation import Evaluation


def total_loss(scores: Tensor, labels: Tensor, losses: Tensor) -> Tensor:
    """Sum the losses of the images."""
    return losses.sum()


def confusion(scores: Tensor, labels: Tensor, losses: Tensor) -> Tensor:
    """Count images by true class (row) and predicted class (column): int64 [classes, classes]."""
    import torch

    classes = scores.shape[1]
    # bincount would wait for the device, because the size of its result depends on the values.
    counts = torch.zeros(classes * classes, dtype=torch.int64, device=scores.device)
    counts.index_add_(0, labels * classes + scores.argmax(1), torch.ones_like(labels))
    return counts.view(classes, classes)


def hits_in_top5(scores: Tensor, labels: Tensor, losses: Tensor) -> Tensor:
    """Count images whose label has one of the five highest scores."""
    return (scores.topk(5, 1).indices == labels[:, None]).any(1).sum()


def count_labels(scores: Tensor, labels: Tensor, losses: Tensor) -> Tensor:
    """Count, by class, images that have the label and are predicted, that are predicted, and that
    have it: [3, classes].
    """
    import torch

    # The sigmoid of 0 is 0.5.
    predicted, has_label = scores >= 0, labels > 0.5
    return torch.stack([(predicted & has_label).sum(0), predicted.sum(0), has_label.sum(0)])


def macro_f1(counts: Tensor, samples: int) -> float:
    """Return macro F1: the mean of 2 TP / (predicted + labeled) over the classes; a class with
    neither counts as 0.
    """
    hits, predicted, labeled = counts.double()
    return float((2 * hits / (predicted + labeled).clamp(min=1)).mean())


def mean_average_precision(scores: Tensor, labels: Tensor) -> float:
    """Return the mean over classes of average precision (sum of precision x recall gain); 0 for a
    class without images.
    """
    from timm.task import MultiLabelClassificationEvaluator

    evaluator = MultiLabelClassificationEvaluator()
    evaluator.update(scores, labels)
    return float(evaluator.compute()["map"]) / 100


def per_image(total: Tensor, samples: int) -> float:
    """Return the mean over images."""
    return float(total.item()) / samples


def on_diagonal(counts: Tensor, samples: int) -> float:
    """Return the share of images whose class is predicted."""
    return float(counts.diag().sum().item()) / samples


LOSS = Metric(total_loss, per_image, lower_is_better=True)
METRICS: dict[str, Metric] = {
    "loss": LOSS,
    "acc": Metric(confusion, on_diagonal, is_proportion=True),
    "acc5": Metric(hits_in_top5, per_image, is_proportion=True, min_classes=6),
}
# Metrics for train.task=multilabel.
MULTILABEL_METRICS: dict[str, Metric] = {
    "loss": LOSS,
    "map": Metric(from_rows=mean_average_precision, is_proportion=True),
    "f1_macro": Metric(count_labels, macro_f1, is_proportion=True),
}


def metrics_of(task: str) -> dict[str, Metric]:
    """Return metric name -> Metric for a train.task."""
    return MULTILABEL_METRICS if task == "multilabel" else METRICS


def details(evaluation: Evaluation) -> dict[str, Any]:
    """Return additional entries of result.json: sample counts, and accuracy per class (None without
    images).

    Without the confusion matrix, the number of samples is the only entry.
    """
    if confusion not in evaluation.sums:
        return {"samples": evaluation.samples}
    counts = evaluation.sums[confusion]
    totals, correct = counts.sum(1).tolist(), counts.diag().tolist()
    return {
        "correct": sum(correct),
        "samples": evaluation.samples,
        "acc_per_class": [
            hits / total if total else None for hits, total in zip(correct, totals, strict=True)
        ],
    }


def check_metric(metric: str, num_classes: int) -> None:
    """Raise ValueError for a `checkpoint.metric` that needs more than `num_classes` classes, as
    acc5 with five.
    """
    name = metric.removeprefix("val/").removesuffix("_ema")
    if num_classes < (METRICS | MULTILABEL_METRICS)[name].min_classes:
        raise ValueError(
            f"checkpoint.metric={metric}: not defined for {num_classes} classes; use val/acc or "
            "val/loss"
        )

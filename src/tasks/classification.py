"""Classification: each image belongs to one class."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from timm.loss import compute_class_weights, create_classification_loss
from torch import Tensor, nn
from torch.nn import functional

from src.schema import ResolvedConfig
from src.tasks.images import LOSS, Criterion, Loss, LossTask, per_image
from timm_parallel import Batch, Evaluation, Metric, draw_confusion

# Largest number of classes with a confusion matrix. Its memory grows with the square.
MOST_IN_MATRIX = 500


# Losses. train.class_weights and train.smoothing change the training loss only, so that `val/loss`
# of different runs can be compared.


def cross_entropy(config: ResolvedConfig, class_weight: Tensor | None = None) -> Criterion:
    """Build softmax cross entropy with label smoothing (`train.smoothing`) and class weights.

    With class weights, the weighted sum is divided by the number of images. torch divides by the
    sum of the weights instead. Then the mean over ranks would differ from the loss of the whole
    batch.
    """
    is_soft, smoothing = config.data.augment.mixes, config.train.smoothing
    if class_weight is None:
        return create_classification_loss("ce", smoothing=smoothing, soft_targets=is_soft)

    # Mixup and cutmix smooth the targets themselves, so the loss must not smooth them again.
    return without_state(
        nn.CrossEntropyLoss(
            class_weight, reduction="none", label_smoothing=0 if is_soft else smoothing
        )
    )


def binary_cross_entropy(
    multi_label: bool,
    config: ResolvedConfig,
    class_weight: Tensor | None = None,
    pos_weight: Tensor | float | None = None,
    sum_classes: bool = False,
) -> Criterion:
    """Build binary cross entropy with a sigmoid for each class (Wightman et al. 2021,
    arXiv:2110.00476, section 3).

    With `sum_classes`, the loss of an image is the sum over its classes, as in timm; without it,
    the mean.
    """
    criterion = create_classification_loss(
        "bce",
        multi_label=multi_label,
        smoothing=config.train.smoothing,
        class_weight=class_weight,
        pos_weight=pos_weight,
        bce_target_thresh=config.train.bce_target_thresh,
        bce_sum=sum_classes,
    )
    return without_state(criterion)


def without_state(criterion: nn.Module) -> nn.Module:
    """Exclude the buffers of a loss from checkpoints. They store values of the config, such as
    train.class_weights, which a resumed run may change.
    """
    for name, buffer in list(criterion.named_buffers()):
        owner = criterion.get_submodule(name.rpartition(".")[0])
        owner.register_buffer(name.rpartition(".")[2], buffer, persistent=False)
    return criterion


def softmax_losses(scores: Tensor, labels: Tensor) -> Tensor:
    """Compute the softmax cross entropy of each image, without label smoothing. Return a tensor
    [B].
    """
    return functional.cross_entropy(scores, labels, reduction="none")


def sigmoid_losses(scores: Tensor, labels: Tensor) -> Tensor:
    """Compute the binary cross entropy of each image, averaged over the classes, without label
    smoothing. Return a tensor [B].
    """
    # Use scatter_, because one_hot checks the labels on the host, and so waits for the device.
    targets = (
        labels if labels.ndim == 2 else torch.zeros_like(scores).scatter_(1, labels[:, None], 1)
    )
    return functional.binary_cross_entropy_with_logits(scores, targets, reduction="none").mean(1)


@dataclass(frozen=True)
class ClassLoss(Loss):
    """A loss on class scores [B, classes]. Targets are class numbers [B], or class probabilities
    [B, classes] with mixup or cutmix.
    """

    of_samples: Callable[[Tensor, Tensor], Tensor] = softmax_losses
    # Function that computes the probabilities of the classes from scores.
    probabilities: Callable[[Tensor], Tensor] = partial(torch.softmax, dim=1)
    # True if each image adds a term for every class to the loss (sigmoid), not only for its own
    # class (softmax). train.class_weights then weight these terms.
    has_class_terms: bool = False


# Metrics. Each has a function that computes sums for a batch. The library adds these sums over
# batches and ranks.


def confusion(task: Any, scores: Tensor, batch: Batch) -> Tensor:
    """Count images by true class (row) and predicted class (column). Return int64 [classes,
    classes].
    """
    classes, labels = scores.shape[1], batch.target
    # Use index_add_, because the output size of bincount depends on the values, so bincount waits
    # for the device.
    counts = torch.zeros(classes * classes, dtype=torch.int64, device=scores.device)
    counts.index_add_(0, labels * classes + scores.argmax(1), torch.ones_like(labels))
    return counts.view(classes, classes)


def hits_by_class(task: Any, scores: Tensor, batch: Batch) -> Tensor:
    """Count the images of each class (first row) and those of them that were predicted correctly
    (second row). Return int64 [2, classes].
    """
    labels = batch.target
    counts = torch.zeros(2, scores.shape[1], dtype=torch.int64, device=scores.device)
    return counts.index_add_(
        1, labels, torch.stack([torch.ones_like(labels), (scores.argmax(1) == labels).long()])
    )


def share_of_hits(counts: Tensor, samples: int) -> float:
    """Return the accuracy from the counts of `hits_by_class`."""
    return float(counts[1].sum().item()) / samples


def hits_in_top5(task: Any, scores: Tensor, batch: Batch) -> Tensor:
    """Count the images whose true class has one of the five highest scores."""
    return (scores.topk(5, 1).indices == batch.target[:, None]).any(1).sum()


def on_diagonal(counts: Tensor, samples: int) -> float:
    """Return the accuracy: the diagonal of the confusion matrix, divided by the number of
    images.
    """
    return float(counts.diag().sum().item()) / samples


def hits(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return 1 for each image whose label has the highest score, else 0. The label of an image that
    mixup or cutmix changed is the class with the larger share.
    """
    labels = targets if targets.ndim == 1 else targets.argmax(1)
    return (outputs.argmax(1) == labels).float()


class ClassTask(LossTask):
    """Base class of tasks whose model has an output for each class."""

    known_losses: ClassVar[Mapping[str, ClassLoss]]
    loss: ClassLoss

    @property
    def model_outputs(self) -> int:
        """Number of outputs of the model: model.num_classes, which may exceed the number of
        classes, else the number of classes.
        """
        return self.config.model.num_classes or self.num_outputs

    def class_weights(self, labels: Tensor | None) -> dict[str, Tensor]:
        """Build the keyword arguments that pass train.class_weights to the loss.

        The weights are scaled to mean 1 over all terms of the loss on the training images. So the
        loss keeps its magnitude, and optim.lr and optim.clip_grad need no change. With equally
        frequent classes, the weighted loss equals the unweighted loss. For N images, K classes, and
        n images of a class:

        - Cross entropy has a term for each image. The weight of a class with auto is N / (K n), as
          scikit-learn's "balanced". The mean over all training images equals torch's weighted mean.
          For a batch, torch divides by the sum of its weights, so ranks would use different
          divisors.
        - A loss with a term for each image and each class has weights with mean 1 over the classes.
          With auto, they are timm's inverse frequency.
        """
        given, outputs = self.config.train.class_weights, self.model_outputs
        if given is None:
            return {}
        counts = None if labels is None else self.count_classes(labels)
        if given != "auto":
            if len(given) != outputs:
                raise ValueError(
                    f"train.class_weights={given}: expected a number for each of the model's "
                    f"{outputs} classes"
                )
            weights = torch.tensor(given, dtype=torch.float64)
        elif labels is None or counts is None:
            raise ValueError(
                "train.class_weights=auto: this dataset does not list its labels; give a number "
                "for each class"
            )
        else:
            weights = self.balanced(counts, len(labels))
        terms = torch.ones(outputs) if self.loss.has_class_terms else counts
        if terms is not None:
            mean = (weights * terms).sum() / terms.sum()
            if mean == 0:
                raise ValueError(
                    f"train.class_weights={given}: no training image has a weight above 0"
                )
            weights = weights / mean
        return {"class_weight": weights.float()}

    def count_classes(self, targets: Tensor) -> Tensor:
        """Count the training images of each class that the model has an output for."""
        return targets.bincount(minlength=self.model_outputs)

    def balanced(self, counts: Tensor, images: int) -> Tensor:
        """Compute a weight for each class from its number of images, before the weights are scaled.
        A class without images (because of model.num_classes or data.limit_train) gets the mean
        weight of the other classes.
        """
        weights, present = torch.ones(len(counts), dtype=torch.float64), counts > 0
        weights[present] = compute_class_weights(counts[present], images, method="inv_freq")[
            1
        ].double()
        return weights

    def predictions(self, outputs: Tensor, topk: int) -> dict[str, list[Any]]:
        """Return the columns `class_<k>` and `probability_<k>` of the `topk` most likely classes of
        each image, the most likely class first.
        """
        count = min(topk, len(self.names))
        best, columns = self.loss.probabilities(outputs).topk(count), {}
        for place in range(count):
            columns[f"class_{place + 1}"] = [
                self.names[index] for index in best.indices[:, place].tolist()
            ]
            columns[f"probability_{place + 1}"] = best.values[:, place].tolist()
        return columns


class Classification(ClassTask):
    """Task in which each image has one class. Targets are class numbers: int64 [B]."""

    target = "label"
    headline = "acc"
    applies: ClassVar[tuple[str, ...]] = (
        "mixup",
        "erasing",
        "auto_augment",
        "smoothing",
        "class_weights",
        "balance",
    )
    known_losses: ClassVar[Mapping[str, ClassLoss]] = {
        "ce": ClassLoss(cross_entropy, reads=("smoothing", "mixup", "class_weights")),
        "bce": ClassLoss(
            partial(binary_cross_entropy, False),
            sigmoid_losses,
            ("smoothing", "mixup", "class_weights"),
            torch.sigmoid,
            has_class_terms=True,
        ),
    }
    metrics: Mapping[str, Metric] = {
        "loss": LOSS,
        "acc": Metric(confusion, on_diagonal, is_proportion=True),
        "acc5": Metric(hits_in_top5, per_image, is_proportion=True, min_outputs=6),
    }

    def __init__(self, config: ResolvedConfig, names: Sequence[str]) -> None:
        super().__init__(config, names)
        if len(names) > MOST_IN_MATRIX and "acc" in self.metrics:
            by_class = Metric(hits_by_class, share_of_hits, is_proportion=True)
            self.metrics = {**self.metrics, "acc": by_class}

    def check_targets(self, targets: Tensor) -> None:
        if not len(targets):
            return
        smallest, largest = targets.min().item(), targets.max().item()
        if targets.is_floating_point() or smallest < 0 or largest >= len(self.names):
            raise ValueError(
                f"the data has labels from {smallest} to {largest}, expected integers from 0 to "
                f"{len(self.names) - 1} for {len(self.names)} classes; fix the labels or the "
                "dataset's target_names"
            )

    def train_numbers(self, scores: Tensor, targets: Tensor) -> dict[str, Tensor]:
        return {"acc": hits(scores, targets)}

    def details(self, evaluation: Evaluation) -> dict[str, Any]:
        """Return the numbers of images and of correct predictions, and the accuracy of each class,
        which is None for a class without images.
        """
        matrix = evaluation.sums.get(confusion)
        if matrix is None:
            totals, correct = evaluation.sums[hits_by_class].tolist()
        else:
            totals, correct = matrix.sum(1).tolist(), matrix.diag().tolist()
        return {
            "correct": sum(correct),
            "samples": evaluation.samples,
            "acc_per_class": [
                right / total if total else None
                for right, total in zip(correct, totals, strict=True)
            ],
        }

    def draw(self, evaluation: Evaluation) -> dict[str, Any]:
        matrix = evaluation.sums.get(confusion)
        if matrix is None or len(self.names) > MOST_IN_MATRIX:
            return {}
        return {"confusion": draw_confusion(matrix.cpu().numpy(), self.names)}

    def table(self, evaluation: Evaluation) -> dict[str, list[Any]]:
        """Return columns for a table with a row per image: its label, and the five most likely
        classes with their probabilities.
        """
        assert evaluation.rows is not None
        _, scores, labels = evaluation.rows
        columns = {"label": [self.names[label] for label in labels.tolist()]}
        return columns | self.predictions(scores, 5)

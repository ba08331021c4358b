"""Classification: each image has one of the classes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from src.schema import ResolvedConfig
from src.tasks.images import LOSS, Criterion, ImageTask, per_image
from timm_parallel import Loss, Metric

if TYPE_CHECKING:
    from torch import Tensor, nn

    from timm_parallel import Evaluation

BINS = 15  # of confidence, for the calibration error


# Losses. Weights and smoothing apply to training only, so that `val/loss` of runs can be compared.


def cross_entropy(config: ResolvedConfig, class_weight: Tensor | None = None) -> Criterion:
    """Build softmax cross entropy with label smoothing (`train.smoothing`).

    With class weights, the weighted sum is divided by the number of images. torch divides it by the
    sum of the weights, so a mean over ranks would not be the loss of the whole batch.
    """
    from timm.loss import create_classification_loss
    from torch import nn

    is_soft, smoothing = config.data.augment.mixes, config.train.smoothing
    if class_weight is None:
        return create_classification_loss("ce", smoothing=smoothing, soft_targets=is_soft)

    # A module, which strategies can move and DataParallel can copy with its weights.
    class WeightedCrossEntropy(nn.CrossEntropyLoss):
        def forward(self, input: Tensor, target: Tensor) -> Tensor:
            return super().forward(input, target).mean()

    return without_state(
        # Mixed targets are already smoothed.
        WeightedCrossEntropy(
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
    """Build binary cross entropy with a sigmoid per class (Wightman et al. 2021, arXiv:2110.00476,
    section 3).

    `sum_classes`, as in timm: sum over the classes of an image instead of averaging.
    """
    from timm.loss import create_classification_loss

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
    """Exclude the buffers of a loss from checkpoints: they hold values of the config, which a
    resume may change.
    """
    for name, buffer in list(criterion.named_buffers()):
        owner = criterion.get_submodule(name.rpartition(".")[0])
        owner.register_buffer(name.rpartition(".")[2], buffer, persistent=False)
    return criterion


def softmax_losses(scores: Tensor, labels: Tensor) -> Tensor:
    """Compute the cross entropy of each image, without smoothing: [B]."""
    from torch.nn import functional

    return functional.cross_entropy(scores, labels, reduction="none")


def sigmoid_losses(scores: Tensor, labels: Tensor) -> Tensor:
    """Compute the binary cross entropy of each image, the mean over the classes, without smoothing:
    [B].
    """
    import torch
    from torch.nn import functional

    # one_hot would wait for the device to check the labels.
    targets = (
        labels if labels.ndim == 2 else torch.zeros_like(scores).scatter_(1, labels[:, None], 1)
    )
    return functional.binary_cross_entropy_with_logits(scores, targets, reduction="none").mean(1)


def softmax(scores: Tensor) -> Tensor:
    return scores.softmax(1)


def sigmoid(scores: Tensor) -> Tensor:
    return scores.sigmoid()


@dataclass(frozen=True)
class ClassLoss(Loss):
    """A loss on class scores [B, classes]. Targets are labels [B], or [B, classes] under mixup."""

    of_samples: Callable[[Tensor, Tensor], Tensor] = softmax_losses
    probabilities: Callable[[Tensor], Tensor] = softmax  # of the classes, from scores
    # True if an image has a term for each class, not only for its own. train.class_weights then
    # weight these terms.
    has_class_terms: bool = False


# Metrics. Each names a function whose sums are added over batches and ranks.


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


def on_diagonal(counts: Tensor, samples: int) -> float:
    """Return the share of images whose class is predicted."""
    return float(counts.diag().sum().item()) / samples


def count_by_confidence(
    probabilities: Callable[[Tensor], Tensor], scores: Tensor, labels: Tensor, losses: Tensor
) -> Tensor:
    """Return [3, 15]: number of images, correct predictions and sum of confidences in each of 15
    bins of confidence.
    """
    import torch

    confidence, predicted = probabilities(scores).max(1)
    bins = (confidence * BINS).ceil().long().clamp(1, BINS) - 1
    # As exact as the losses: in double precision, where the device has it.
    values = torch.stack([torch.ones_like(confidence), predicted == labels, confidence]).to(
        losses.dtype
    )
    return torch.zeros(3, BINS, dtype=losses.dtype, device=scores.device).index_add_(
        1, bins, values
    )


def calibration_error(sums: Tensor, samples: int) -> float:
    """Return the expected calibration error from `count_by_confidence` (Guo et al. 2017,
    arXiv:1706.04599).
    """
    return float((sums[1] - sums[2]).abs().sum() / samples)


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Compute the share of images whose label has the highest score. The label of a mixed image is
    the larger one.
    """
    labels = targets if targets.ndim == 1 else targets.argmax(1)
    return (outputs.argmax(1) == labels).float().mean()


class Classification(ImageTask):
    """One class per image. Targets are class numbers: int64 [B]."""

    target = "label"
    applies: ClassVar[tuple[str, ...]] = (
        "mixup",
        "erasing",
        "auto_augment",
        "smoothing",
        "class_weights",
        "balance",
    )
    losses: ClassVar[Mapping[str, ClassLoss]] = {
        "ce": ClassLoss(cross_entropy, reads=("smoothing", "mixup", "class_weights")),
        "bce": ClassLoss(
            partial(binary_cross_entropy, False),
            sigmoid_losses,
            ("smoothing", "mixup", "class_weights"),
            sigmoid,
            has_class_terms=True,
        ),
    }
    metrics: ClassVar[Mapping[str, Metric]] = {
        "loss": LOSS,
        "acc": Metric(confusion, on_diagonal, is_proportion=True),
        "acc5": Metric(hits_in_top5, per_image, is_proportion=True, min_outputs=6),
    }
    loss: ClassLoss

    @classmethod
    def own_loss(cls, loss_class: Any) -> ClassLoss:
        first = next(iter(cls.losses.values()))
        reads = getattr(loss_class, "reads", ())

        def build(config: ResolvedConfig, **given: Any) -> Criterion:
            if "smoothing" in reads:
                # Mixed targets are already smoothed.
                mixes = config.data.augment.mixes
                given.setdefault("smoothing", 0.0 if mixes else config.train.smoothing)
            criterion: Criterion = loss_class(**given)
            return criterion

        return ClassLoss(build, first.of_samples, reads, first.probabilities, first.has_class_terms)

    @property
    def model_outputs(self) -> int:
        """Outputs that the model has: those of the classes, or more."""
        return self.config.model.num_classes or self.num_outputs

    def check_targets(self, targets: Tensor) -> None:
        if not len(targets):
            return
        smallest, largest = int(targets.min()), int(targets.max())
        if targets.is_floating_point() or smallest < 0 or largest >= len(self.names):
            raise ValueError(
                f"the data has labels from {smallest} to {largest}, but {len(self.names)} classes "
                "(0 is the first): fix the labels or the dataset's target_names"
            )

    def class_weights(self, targets: Tensor | None) -> dict[str, Tensor]:
        """Return the keyword arguments that pass train.class_weights to the loss.

        The weights have mean 1 over all terms of the loss on the training images. So the loss keeps
        its size, and optim.lr and optim.clip_grad their meaning; with equal classes it is the
        unweighted loss. With N images, n of a class, K classes:

        - Cross entropy has a term per image. auto is N / (K n), scikit-learn's "balanced". The mean
          over all training images is torch's weighted mean. torch divides by the weights of a
          batch, with which ranks would differ.
        - A loss with a term per image and class has weights with mean 1 over the classes; auto is
          timm's inverse frequency.
        """
        import torch

        given, outputs = self.config.train.class_weights, self.model_outputs
        if given is None:
            return {}
        counts = None if targets is None else self.count_classes(targets)
        if given != "auto":
            if len(given) != outputs:
                raise ValueError(
                    f"train.class_weights={given}: expected a number for each of the model's "
                    f"{outputs} classes"
                )
            weights = torch.tensor(given, dtype=torch.float64)
        elif targets is None or counts is None:
            raise ValueError(
                "train.class_weights=auto: this dataset does not list its labels; give a number "
                "for each class"
            )
        else:
            weights = self.balanced(counts, len(targets))
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
        """Count the images of each of the model's classes."""
        return targets.bincount(minlength=self.model_outputs)

    def balanced(self, counts: Tensor, images: int) -> Tensor:
        """Return a weight for each class from its count, before scaling. A class without an image
        (model.num_classes, data.limit_train) gets the mean weight of the others.
        """
        import torch
        from timm.loss import compute_class_weights

        weights, present = torch.ones(len(counts), dtype=torch.float64), counts > 0
        weights[present] = compute_class_weights(counts[present], images, method="inv_freq")[
            1
        ].double()
        return weights

    def train_metrics(self, scores: Tensor, targets: Tensor) -> dict[str, Tensor]:
        return {"acc": accuracy(scores, targets)}

    def blank(self, count: int, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
        import torch

        scores = torch.zeros(count, self.num_outputs)
        return scores, scores[:, 0].long()

    @property
    def checked_metrics(self) -> dict[str, Metric]:
        sums = partial(count_by_confidence, self.loss.probabilities)
        return {**self.metrics, "ece": Metric(sums, calibration_error)}

    def details(self, evaluation: Evaluation) -> dict[str, Any]:
        """Return sample counts, and accuracy per class (None without images)."""
        counts = evaluation.sums[confusion]
        totals, correct = counts.sum(1).tolist(), counts.diag().tolist()
        return {
            "correct": sum(correct),
            "samples": evaluation.samples,
            "acc_per_class": [
                hits / total if total else None for hits, total in zip(correct, totals, strict=True)
            ],
        }

    def draw(self, evaluation: Evaluation) -> dict[str, Any]:
        from timm_parallel import draw_confusion

        counts = evaluation.sums[confusion].cpu().numpy()
        return {"confusion": draw_confusion(counts, self.names)}

    def table(self, evaluation: Evaluation) -> dict[str, list[Any]]:
        """Return the label, and the five most likely classes with their probabilities."""
        assert evaluation.rows is not None
        _, scores, labels = evaluation.rows
        columns = {"label": [self.names[label] for label in labels.tolist()]}
        return columns | self.best_columns(scores, min(5, len(self.names)), "{:.6f}")

    def best_columns(self, scores: Tensor, count: int, form: str) -> dict[str, list[Any]]:
        """Return columns of the `count` most likely classes of each image, best first."""
        best, columns = self.loss.probabilities(scores).topk(count), {}
        for place in range(count):
            columns[f"class_{place + 1}"] = [
                self.names[index] for index in best.indices[:, place].tolist()
            ]
            columns[f"probability_{place + 1}"] = [
                form.format(value) for value in best.values[:, place].tolist()
            ]
        return columns

    def predictions(self, scores: Tensor, topk: int) -> list[dict[str, Any]]:
        """Return the names and probabilities of the most likely classes, best first."""
        best = self.loss.probabilities(scores).topk(min(topk, len(self.names)))
        return [
            {"classes": [self.names[index] for index in indices], "probabilities": values}
            for indices, values in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ]

    @property
    def unreadable(self) -> dict[str, Any]:
        return {"classes": [], "probabilities": []}

    def columns(self, prediction: Mapping[str, Any]) -> dict[str, str]:
        columns: dict[str, str] = {}
        pairs = zip(prediction["classes"], prediction["probabilities"], strict=True)
        for place, (name, share) in enumerate(pairs, start=1):
            columns |= {f"class_{place}": name, f"probability_{place}": f"{share:.6f}"}
        return columns

    def text(self, prediction: Mapping[str, Any]) -> str:
        pairs = zip(prediction["classes"], prediction["probabilities"], strict=True)
        return ", ".join(f"{name} {share:.4f}" for name, share in pairs)

"""Loss functions. To add one, put it into LOSSES; nothing else names the losses.

Import torch and timm inside functions only: train.py reads the names before it imports them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from src.engine.errors import refuse_wrong_arguments
from src.engine.machine.process import import_class

if TYPE_CHECKING:
    from torch import Tensor

    from src.schema import AugmentConfig, TrainConfig

Criterion = Callable[["Tensor", "Tensor"], "Tensor"]


def cross_entropy(config: TrainConfig, augment: AugmentConfig, class_weight: Tensor | None = None) -> Criterion:
    """Build softmax cross entropy, with `train.smoothing`.

    With weights, the loss is a mean over images, not over weights as in torch, so that the mean over ranks equals
    the loss of the whole batch.
    """
    from timm.loss import create_classification_loss
    from torch import nn

    if class_weight is None:
        return create_classification_loss("ce", smoothing=config.smoothing, soft_targets=augment.mixes)
    # Mixed targets are already smoothed.
    smoothing = 0 if augment.mixes else config.smoothing
    weighted = nn.CrossEntropyLoss(class_weight, reduction="none", label_smoothing=smoothing)
    return lambda outputs, targets: weighted.to(outputs.device)(outputs, targets).mean()


def binary_cross_entropy(
    config: TrainConfig,
    augment: AugmentConfig,
    class_weight: Tensor | None = None,
    pos_weight: Tensor | float | None = None,
    sum_classes: bool = False,
) -> Criterion:
    """Build binary cross entropy with a sigmoid per class (Wightman et al. 2021, arXiv:2110.00476, section 3).

    `sum_classes`, as in timm: sum over the classes of an image instead of averaging. Weights apply to training only.
    """
    from timm.loss import create_classification_loss

    return create_classification_loss(
        "bce",
        multi_label=config.task == "multilabel",
        smoothing=config.smoothing,
        class_weight=class_weight,
        pos_weight=pos_weight,
        bce_target_thresh=config.bce_target_thresh,
        bce_sum=sum_classes,
    )


def asymmetric(
    config: TrainConfig,
    augment: AugmentConfig,
    class_weight: Tensor | None = None,
    pos_weight: Tensor | None = None,
    gamma_pos: float = 1.0,
    gamma_neg: float = 4.0,
    clip: float = 0.05,
) -> Criterion:
    """Build the asymmetric loss (Ridnik et al. 2021, arXiv:2009.14119): negatives that the model is sure of count less."""
    from timm.loss import create_classification_loss

    return create_classification_loss(
        "asl",
        multi_label=True,
        smoothing=config.smoothing,
        class_weight=class_weight,
        pos_weight=pos_weight,
        asl_gamma_pos=gamma_pos,
        asl_gamma_neg=gamma_neg,
        asl_clip=clip,
    )


def softmax_losses(scores: Tensor, labels: Tensor) -> Tensor:
    """Compute the cross entropy of each image, without smoothing: [B]."""
    from torch.nn import functional

    return functional.cross_entropy(scores, labels, reduction="none")


def sigmoid_losses(scores: Tensor, labels: Tensor) -> Tensor:
    """Compute the binary cross entropy of each image, the mean over the classes, without smoothing: [B]."""
    import torch
    from torch.nn import functional

    # one_hot would wait for the device to check the labels.
    targets = labels if labels.ndim == 2 else torch.zeros_like(scores).scatter_(1, labels[:, None], 1)
    return functional.binary_cross_entropy_with_logits(scores, targets, reduction="none").mean(1)


@dataclass(frozen=True)
class Loss:
    """An option of `train.loss`: training loss, evaluation loss, and the conversion of scores to probabilities."""

    # (config, augment, **train.loss_kwargs) -> criterion, which maps outputs [B, classes] and targets ([B], or
    # [B, classes] under mixup) to a mean loss.
    build: Callable[..., Criterion]
    # (scores [B, classes], labels [B]) -> the loss of each image in evaluation.
    of_images: Callable[[Tensor, Tensor], Tensor] = softmax_losses
    # Scores [B, classes] -> probabilities of the classes.
    probabilities: Callable[[Tensor], Tensor] = lambda scores: scores.softmax(1)
    tasks: tuple[str, ...] = ("classification",)


LOSSES = {
    "ce": Loss(cross_entropy),
    "bce": Loss(
        binary_cross_entropy, sigmoid_losses, lambda scores: scores.sigmoid(), ("classification", "multilabel")
    ),
    "asl": Loss(asymmetric, sigmoid_losses, lambda scores: scores.sigmoid(), ("multilabel",)),
}


def find_loss(name: str) -> Loss:
    """Return the entry of LOSSES for a value of `train.loss`, or build one for your class `src.<module>.<Class>`."""
    if name in LOSSES:
        return LOSSES[name]
    loss_class = import_class(name)
    return Loss(lambda config, augment, **kwargs: loss_class(**kwargs))


def build_criterion(config: TrainConfig, augment: AugmentConfig, weights: dict[str, Tensor] | None = None) -> Criterion:
    """Build the training loss: maps outputs [B, classes] and targets ([B], with mixup [B, classes]) to a mean loss.

    `weights`: keyword arguments of the loss, from `class_weights`.
    """
    weights = weights or {}
    given = {**dict.fromkeys(weights, "of train.class_weights"), **config.loss_kwargs}
    with refuse_wrong_arguments("train.loss_kwargs", given, config.loss):
        return find_loss(config.loss).build(config, augment, **weights, **config.loss_kwargs)


def class_weights(config: TrainConfig, labels: Tensor | None, outputs: int) -> dict[str, Tensor]:
    """Return the keyword argument that passes train.class_weights to the loss of a model with `outputs` scores.

    auto is timm's: negatives over positives as `pos_weight` for several labels per image, else the inverse frequency.
    `labels`: labels of all training images, [N] or [N, classes]; None if the dataset does not list them.
    """
    import torch
    from timm.loss import compute_class_weights

    if config.class_weights != "auto":
        if len(config.class_weights) != outputs:
            raise ValueError(
                f"train.class_weights={config.class_weights}: expected a number for each of the model's {outputs} classes"
            )
        return {"class_weight": torch.tensor(config.class_weights, dtype=torch.float32)}
    if labels is None:
        raise ValueError(
            "train.class_weights=auto: this dataset does not list its labels; give a number for each class"
        )
    if labels.ndim == 2:
        return dict([compute_class_weights((labels > 0.5).sum(0), len(labels), method="neg_pos")])
    return dict([compute_class_weights(torch.bincount(labels, minlength=outputs), len(labels), method="inv_freq")])

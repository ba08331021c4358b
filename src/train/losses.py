"""Loss functions. To add one, put it into LOSSES; nothing else names the losses.

Import torch and timm inside functions only: train.py reads the names before it imports them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from timm_parallel.errors import refuse_wrong_arguments
from timm_parallel.machine.process import import_name

if TYPE_CHECKING:
    from torch import Tensor, nn

    from src.schema import AugmentConfig, TrainConfig

Criterion = Callable[["Tensor", "Tensor"], "Tensor"]


def cross_entropy(
    config: TrainConfig, augment: AugmentConfig, class_weight: Tensor | None = None
) -> Criterion:
    """Build softmax cross entropy, with `train.smoothing`.

    With weights, the loss is a mean over images, not over weights as in torch, so that the mean
    over ranks equals the loss of the whole batch.
    """
    from timm.loss import create_classification_loss
    from torch import nn

    if class_weight is None:
        return create_classification_loss(
            "ce", smoothing=config.smoothing, soft_targets=augment.mixes
        )
    # Mixed targets are already smoothed.
    smoothing = 0 if augment.mixes else config.smoothing

    # A module, which strategies can move and DataParallel can copy with its weights.
    class WeightedCrossEntropy(nn.CrossEntropyLoss):
        def forward(self, input: Tensor, target: Tensor) -> Tensor:
            return super().forward(input, target).mean()

    return _without_state(
        WeightedCrossEntropy(class_weight, reduction="none", label_smoothing=smoothing)
    )


def binary_cross_entropy(
    config: TrainConfig,
    augment: AugmentConfig,
    class_weight: Tensor | None = None,
    pos_weight: Tensor | float | None = None,
    sum_classes: bool = False,
) -> Criterion:
    """Build binary cross entropy with a sigmoid per class (Wightman et al. 2021, arXiv:2110.00476,
    section 3).

    `sum_classes`, as in timm: sum over the classes of an image instead of averaging. Weights apply
    to training only.
    """
    from timm.loss import create_classification_loss

    criterion = create_classification_loss(
        "bce",
        multi_label=config.task == "multilabel",
        smoothing=config.smoothing,
        class_weight=class_weight,
        pos_weight=pos_weight,
        bce_target_thresh=config.bce_target_thresh,
        bce_sum=sum_classes,
    )
    return _without_state(criterion)


def asymmetric(
    config: TrainConfig,
    augment: AugmentConfig,
    class_weight: Tensor | None = None,
    pos_weight: Tensor | None = None,
    gamma_pos: float = 1.0,
    gamma_neg: float = 4.0,
    clip: float = 0.05,
) -> Criterion:
    """Build the asymmetric loss (Ridnik et al. 2021, arXiv:2009.14119): negatives that the model is
    sure of count less.
    """
    from timm.loss import create_classification_loss

    criterion = create_classification_loss(
        "asl",
        multi_label=True,
        smoothing=config.smoothing,
        class_weight=class_weight,
        pos_weight=pos_weight,
        asl_gamma_pos=gamma_pos,
        asl_gamma_neg=gamma_neg,
        asl_clip=clip,
    )
    return _without_state(criterion)


def _without_state(criterion: nn.Module) -> nn.Module:
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


@dataclass(frozen=True)
class Loss:
    """An option of `train.loss`: training loss, evaluation loss, and the conversion of scores to
    probabilities.
    """

    # (config, augment, **train.loss_kwargs) -> criterion, which maps outputs [B, classes] and
    # targets ([B], or [B, classes] under mixup) to a mean loss.
    build: Callable[..., Criterion]
    # (scores [B, classes], labels [B]) -> the loss of each image in evaluation.
    of_images: Callable[[Tensor, Tensor], Tensor] = softmax_losses
    # Scores [B, classes] -> probabilities of the classes. None: the scores are values, as in
    # regression.
    probabilities: Callable[[Tensor], Tensor] | None = lambda scores: scores.softmax(1)
    tasks: tuple[str, ...] = ("classification",)
    # True if an image has a term for each class, not only for its own. train.class_weights then
    # weight these terms.
    has_class_terms: bool = False
    # Those of smoothing, mixup (with cutmix) and class_weights that the loss reads. train.py
    # refuses the others.
    reads: tuple[str, ...] = ()


LOSSES = {
    "ce": Loss(cross_entropy, reads=("smoothing", "mixup", "class_weights")),
    "bce": Loss(
        binary_cross_entropy,
        sigmoid_losses,
        lambda scores: scores.sigmoid(),
        ("classification", "multilabel"),
        True,
        ("smoothing", "mixup", "class_weights"),
    ),
    "asl": Loss(
        asymmetric,
        sigmoid_losses,
        lambda scores: scores.sigmoid(),
        ("multilabel",),
        True,
        ("smoothing", "class_weights"),
    ),
}


def find_loss(name: str) -> Loss:
    """Return the entry of LOSSES for a value of `train.loss`, or build one for your class
    `src.<module>.<Class>`.
    """
    if name in LOSSES:
        return LOSSES[name]
    loss_class = import_name(name)
    reads = getattr(loss_class, "reads", ())

    def build(config: TrainConfig, augment: AugmentConfig, **kwargs: Any) -> Criterion:
        if "smoothing" in reads:
            # Mixed targets are already smoothed.
            kwargs.setdefault("smoothing", 0.0 if augment.mixes else config.smoothing)
        criterion: Criterion = loss_class(**kwargs)
        return criterion

    return Loss(build, reads=reads)


def build_criterion(
    config: TrainConfig, augment: AugmentConfig, weights: dict[str, Tensor] | None = None
) -> Criterion:
    """Build the training loss: maps outputs [B, classes] and targets ([B], with mixup [B, classes])
    to a mean loss.

    `weights`: keyword arguments of the loss, from `class_weights`.
    """
    weights = weights or {}
    given = {**dict.fromkeys(weights, "of train.class_weights"), **config.loss_kwargs}
    with refuse_wrong_arguments("train.loss_kwargs", given, config.loss):
        return find_loss(config.loss).build(config, augment, **weights, **config.loss_kwargs)


def class_weights(config: TrainConfig, labels: Tensor | None, outputs: int) -> dict[str, Tensor]:
    """Return the keyword arguments that pass train.class_weights to the loss of a model with
    `outputs` scores.

    The weights have mean 1 over all terms of the loss on the training images. So the loss keeps its
    size, and optim.lr and optim.clip_grad their meaning; with equal classes it is the unweighted
    loss. With N images, n of a class, K classes:

    - Cross entropy has a term per image. auto is N / (K n), scikit-learn's "balanced". The mean
      over all training images is torch's weighted mean. torch divides by the weights of a batch,
      with which ranks would differ.
    - bce and asl have a term per image and class, so the mean over the classes is 1; auto is timm's
      inverse frequency.
    - auto for several labels per image: N / (2 n) for the n positives of a class, N / (2 (N - n))
      for its negatives. The loss multiplies `class_weight`, that of negatives, by `pos_weight`,
      which is timm's negatives / positives.

    `labels`: labels of all training images, [N] or [N, classes]; None if the dataset does not list
    them.
    """
    import torch
    from timm.loss import compute_class_weights

    counts = None if labels is None else _count_classes(labels, outputs)
    if config.class_weights != "auto":
        if len(config.class_weights) != outputs:
            raise ValueError(
                f"train.class_weights={config.class_weights}: expected a number for each of the "
                f"model's {outputs} classes"
            )
        weights = torch.tensor(config.class_weights, dtype=torch.float64)
    elif labels is None or counts is None:
        raise ValueError(
            "train.class_weights=auto: this dataset does not list its labels; give a number for "
            "each class"
        )
    elif labels.ndim == 2:
        return _balance_labels(counts, len(labels))
    else:
        # A class without an image (model.num_classes, data.limit_train) gets the mean weight of the
        # others.
        weights, present = torch.ones(outputs, dtype=torch.float64), counts > 0
        weights[present] = compute_class_weights(counts[present], len(labels), method="inv_freq")[
            1
        ].double()
    has_class_terms = find_loss(config.loss).has_class_terms or (
        labels is not None and labels.ndim == 2
    )
    terms = torch.ones(outputs) if has_class_terms else counts
    if terms is not None:
        mean = (weights * terms).sum() / terms.sum()
        if mean == 0:
            raise ValueError(
                f"train.class_weights={config.class_weights}: no training image has a weight "
                "above 0"
            )
        weights = weights / mean
    return {"class_weight": weights.float()}


def _count_classes(labels: Tensor, outputs: int) -> Tensor | None:
    """Count the images of each class: [outputs]; of several labels [classes]. None for targets of a
    regression.
    """
    if labels.ndim == 2:
        return (labels > 0.5).sum(0)
    return None if labels.is_floating_point() else labels.bincount(minlength=outputs)


def _balance_labels(positives: Tensor, images: int) -> dict[str, Tensor]:
    """Give positives and negatives of each class half of the weight. A class that has only one of
    them keeps weight 1.
    """
    import torch

    negatives = images - positives
    has_both = (positives > 0) & (negatives > 0)
    of_positives, of_negatives = (
        torch.where(has_both, images / (2 * count), 1.0) for count in (positives, negatives)
    )
    return {"class_weight": of_negatives, "pos_weight": of_positives / of_negatives}

"""What is minimised: the loss, and the mixing of images that goes with it."""

from __future__ import annotations

import numpy as np
from timm.data import Mixup
from timm.loss import BinaryCrossEntropy, LabelSmoothingCrossEntropy, SoftTargetCrossEntropy
from torch import Tensor, nn

from src.data.sampling import seed_for
from src.schema import AugmentConfig, TrainConfig


def _cross_entropy(config: TrainConfig, augment: AugmentConfig) -> nn.Module:
    if augment.mixup or augment.cutmix:
        return SoftTargetCrossEntropy()  # the mixed targets carry the smoothing
    return LabelSmoothingCrossEntropy(config.smoothing) if config.smoothing else nn.CrossEntropyLoss()


def _binary_cross_entropy(config: TrainConfig, augment: AugmentConfig) -> nn.Module:
    """One sigmoid per class (Wightman, Touvron and Jégou 2021, arXiv:2110.00476, section 3)."""
    return BinaryCrossEntropy(smoothing=config.smoothing, target_threshold=config.bce_target_thresh)


# `train.loss` -> what builds it. A loss is added here, and only here; its name is read without running this file.
LOSSES = {"ce": _cross_entropy, "bce": _binary_cross_entropy}


def build_criterion(config: TrainConfig, augment: AugmentConfig) -> nn.Module:
    """Maps outputs [B, classes] and targets ([B], or [B, classes] under mixup) to a mean loss."""
    return LOSSES[config.loss](config, augment)


class Mixing:
    """Mixup and cutmix, whose draws are a function of (seed, batch, rank): batches are paired within a rank."""

    def __init__(self, augment: AugmentConfig, smoothing: float, num_classes: int, seed: int, rank: int) -> None:
        self.mixup = Mixup(augment.mixup, augment.cutmix, label_smoothing=smoothing, num_classes=num_classes)
        self.seed, self.rank = seed, rank
        self.batch = 0  # number of batches mixed since training began

    def __call__(self, images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        np.random.seed(seed_for(self.seed, self.batch, self.rank) & 0xFFFFFFFF)  # timm draws from numpy's global state
        self.batch += 1
        mixed, soft = self.mixup(images, targets)
        return mixed, soft


def build_mixing(augment: AugmentConfig, smoothing: float, num_classes: int, seed: int, rank: int) -> Mixing | None:
    return Mixing(augment, smoothing, num_classes, seed, rank) if augment.mixup or augment.cutmix else None

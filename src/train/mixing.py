"""Mixup and cutmix."""

from __future__ import annotations

import numpy as np
from timm.data import Mixup
from torch import Tensor

from src.engine.data.seeds import seed_for
from src.schema import AugmentConfig


class Mixing:
    """Mixup and cutmix of images within a rank. Random draws depend on (seed, batch, rank) only."""

    def __init__(self, augment: AugmentConfig, smoothing: float, num_classes: int, seed: int, rank: int) -> None:
        self.mixup = Mixup(
            augment.mixup,
            augment.cutmix,
            augment.cutmix_minmax,
            prob=augment.mixup_prob,
            switch_prob=augment.mixup_switch_prob,
            mode=augment.mixup_mode,
            label_smoothing=smoothing,
            num_classes=num_classes,
        )
        self.off_epoch = augment.mixup_off_epoch
        self.seed, self.rank = seed, rank
        # Number of batches mixed since training began.
        self.batch = 0

    def __call__(self, images: Tensor, targets: Tensor, epoch: int) -> tuple[Tensor, Tensor]:
        """Return a mixed batch: images and soft targets [B, classes]. From epoch `mixup_off_epoch` on, labels are only smoothed."""
        self.mixup.mixup_enabled = not self.off_epoch or epoch < self.off_epoch
        # timm draws from numpy's global state.
        np.random.seed(seed_for(self.seed, self.batch, self.rank) & 0xFFFFFFFF)
        self.batch += 1
        mixed, soft = self.mixup(images, targets)
        return mixed, soft

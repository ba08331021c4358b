"""Strategy single: one process on one device."""

from __future__ import annotations

from torch import nn

from timm_parallel.parallel.networks import PhaseStep
from timm_parallel.parallel.strategy import Strategy


class Single(Strategy):
    """Strategy single, which runs the training step unchanged on one device."""

    has_one_device = True

    def wrap(self, step: PhaseStep) -> nn.Module:
        return step

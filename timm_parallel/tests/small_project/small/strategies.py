"""Strategy of the small project, next to those of the library."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from timm_parallel import Distributed, Strategy


class Each(Strategy):
    """Strategy that trains with one rank per device and averages gradients over the ranks."""

    traits = Distributed.traits

    def choose_devices(self, ranks: Any) -> list[torch.device]:
        return [torch.device("cpu")]

    def wrap(self, step: Any) -> nn.Module:
        return DistributedDataParallel(step)

"""Strategies of the small project for one device, and for several devices with
DistributedDataParallel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from timm_parallel.machine.ranks import Ranks
from timm_parallel.parallel.strategy import Strategy


class One(Strategy):
    """Strategy that trains on one device in one process."""

    has_one_device = True

    def wrap(self, step: Any) -> nn.Module:
        return step


class Each(Strategy):
    """Strategy that trains with one rank per device and averages gradients over the ranks."""

    process_per_device = True

    def choose_devices(self, ranks: Ranks) -> list[torch.device]:
        return [torch.device("cpu")]

    def wrap(self, step: Any) -> nn.Module:
        return DistributedDataParallel(step)

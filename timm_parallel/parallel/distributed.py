"""Strategy ddp: DistributedDataParallel, with one process per device.

All-reduces average the gradients over the ranks during the backward pass.
"""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from timm_parallel.keys import strategy_options
from timm_parallel.machine.ranks import Ranks
from timm_parallel.parallel.communication import Communication, UnmeasuredCommunication
from timm_parallel.parallel.ddp_timing import (
    DdpCommunication,
    TimedDistributedDataParallel,
    has_only_batch_norm_buffers,
)
from timm_parallel.parallel.networks import PhaseStep
from timm_parallel.parallel.strategy import Strategy


class Distributed(Strategy):
    """Strategy ddp, in which each rank drives one device."""

    process_per_device = True

    def choose_devices(self, ranks: Ranks) -> list[torch.device]:
        if self.config.accelerator != "cuda":
            return [torch.device("cpu")]
        index = (
            self.config.device_ids[ranks.local_rank] if self.config.device_ids else ranks.local_rank
        )
        # Wrap around at the number of GPUs, because ranks that communicate with gloo may share a
        # GPU.
        return [torch.device("cuda", index % torch.cuda.device_count())]

    def wrap(self, step: PhaseStep) -> nn.Module:
        # Leave out dist_bn, which is not an argument of DistributedDataParallel.
        keys = [
            key for key, owner in strategy_options().items() if owner == "ddp" and key != "dist_bn"
        ]
        options = {
            key: getattr(self.config, key) for key in keys if getattr(self.config, key) is not None
        }
        # With dist_bn=reduce, each rank must keep its own BatchNorm statistics until they are
        # averaged. A broadcast would overwrite them.
        if self.config.dist_bn == "reduce" or has_only_batch_norm_buffers(step):
            options.setdefault("broadcast_buffers", False)
        # Use the new name of the option broadcast_buffers, which torch 2.13 renamed.
        renamed = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
        if renamed and "broadcast_buffers" in options:
            options["forward_sync_buffers"] = options.pop("broadcast_buffers")
        if self.device.type == "cuda":
            options |= {"device_ids": [self.device], "output_device": self.config.output_device}
        return TimedDistributedDataParallel(step, **options)

    def skip_sync(self, wrapped: nn.Module) -> AbstractContextManager[Any]:
        assert isinstance(wrapped, DistributedDataParallel)
        return wrapped.no_sync()

    def communication(self, wrapped: nn.Module) -> Communication:
        if self.group.world_size == 1:
            return Communication()
        # Report the communication as unknown if a subclass wraps the step in another class than
        # DDP.
        if not isinstance(wrapped, TimedDistributedDataParallel):
            return UnmeasuredCommunication()
        return DdpCommunication(wrapped)

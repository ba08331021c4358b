"""What the meter asks of a device that works on while its process asks for more."""

from __future__ import annotations

import torch


class DeviceClock:
    """A CUDA device, or Apple's GPU: an event after every step says how far it is, without waiting for it."""

    def __init__(self, device: torch.device) -> None:
        module = torch.get_device_module(device)
        event = module.Event()
        self.wait, self.step_ends, self.is_idle = module.synchronize, event.record, event.query

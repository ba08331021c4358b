"""What the meter asks of a device that works on while its process asks for more."""

from __future__ import annotations

from typing import Any

import torch


class DeviceClock:
    """A CUDA device, or Apple's GPU: an event after every step says how far it is, without waiting for it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._step_done: Any = torch.cuda.Event() if device.type == "cuda" else torch.mps.Event()

    def wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        else:
            torch.mps.synchronize()

    def step_ends(self) -> None:
        self._step_done.record()

    def is_idle(self) -> bool:
        return bool(self._step_done.query())

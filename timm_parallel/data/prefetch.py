"""Moves batches to the device as uint8, and normalizes them there."""

from __future__ import annotations

import math
import mmap
import weakref

import torch
from torch import Tensor

Batch = tuple[Tensor, Tensor]  # images [B, C, H, W], or with views [B, V, C, H, W]; targets [B, …]

# Values of a batch from which on it gets memory of BatchMemory. For smaller ones malloc is faster:
# it keeps their memory, and looking for a free block takes 40 us with cold caches.
LARGE = 2**20


class BatchMemory:
    """Memory for batches on a CPU, reused once no tensor, view or graph holds it."""

    # malloc maps each of these blocks again, so the kernel clears it for every batch. Reusing 19 MB
    # batches saves a tenth of the processor time of a tiny ViT's step; with a larger model the
    # share is too small to measure.

    def __init__(self) -> None:
        self._free: dict[int, list[mmap.mmap]] = {}  # by size in bytes

    def empty(self, *shape: int) -> Tensor:
        """Return an uninitialized float32 tensor."""
        size = 4 * math.prod(shape)
        free = self._free.setdefault(size, [])
        block = (
            free.pop() if free else mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        )
        # The storage of the tensor holds the view; when the view ends, the block is free.
        view = memoryview(block)
        weakref.finalize(view, free.append, block)
        return torch.frombuffer(view, dtype=torch.float32).view(shape)


class DevicePrefetcher:
    """Moves batches to a device and normalizes them there: uint8 takes a quarter of the bytes of
    float images.
    """

    def __init__(
        self,
        device: torch.device,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        channels_last: bool,
    ) -> None:
        """`mean` and `std`: per channel, of images in 0..1."""
        self.device = device
        self.mean = torch.tensor(mean, device=device).view(1, -1, 1, 1) * 255
        self.inverse_std = 1 / (torch.tensor(std, device=device).view(1, -1, 1, 1) * 255)
        self.shift = -self.mean * self.inverse_std
        self.channels_last = channels_last
        self._blocks = BatchMemory()
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None

    def send(self, batch: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Copy the tensors of a batch to the device. A GPU copies them while it computes what was
        launched before.
        """
        if self._copies is None:
            return batch
        # A copy from memory that is not pinned would block.
        pinned = [tensor if tensor.is_pinned() else tensor.pin_memory() for tensor in batch]
        with torch.cuda.stream(self._copies):
            sent = tuple(tensor.to(self.device, non_blocking=True) for tensor in pinned)
        current = torch.cuda.current_stream(self.device)
        current.wait_event(self._copies.record_event())
        for tensor in sent:
            # Otherwise the allocator would give their memory to the next copy too early.
            tensor.record_stream(current)
        return sent

    def normalize(self, images: Tensor) -> Tensor:
        """Return normalized float32 images in the memory format of the model."""
        if images.ndim == 5:
            return self.normalize(images.flatten(0, 1)).unflatten(0, images.shape[:2])
        normalized = self._empty_like(images)
        if self._copies is not None:
            # One kernel reads bytes and writes floats. autocast rounds them later, because some
            # models do not begin with an operator that it casts for.
            return torch.addcmul(self.shift, images, self.inverse_std, out=normalized)
        # On a CPU, an operator on uint8 would make one more copy.
        return normalized.copy_(images).sub_(self.mean).mul_(self.inverse_std)

    def _empty_like(self, images: Tensor) -> Tensor:
        """Return an uninitialized float32 tensor with the shape of `images`, in the memory format
        of the model.
        """
        count, channels, height, width = images.shape
        shape = (
            (count, height, width, channels)
            if self.channels_last
            else (count, channels, height, width)
        )
        is_large = self.device.type == "cpu" and images.numel() >= LARGE
        empty = self._blocks.empty(*shape) if is_large else torch.empty(shape, device=self.device)
        return empty.permute(0, 3, 1, 2) if self.channels_last else empty

"""Copy batches of uint8 images to the device, and normalize the images on the device."""

from __future__ import annotations

import math
import mmap
import weakref
from typing import TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

T = TypeVar("T")

# Batches with at least so many values get their memory from BatchMemory. For smaller batches malloc
# is faster, because it keeps their memory, while finding a free block takes 40 us with cold caches.
LARGE = 2**20


class BatchMemory:
    """Memory for batches on a CPU. A block is reused when no tensor, view or autograd graph needs
    it any more.
    """

    # malloc would request each large block from the kernel again, and the kernel would clear it for
    # every batch. Reusing blocks of 19 MB saves a tenth of the processor time of a training step of
    # a tiny ViT. With a larger model the saving is too small to measure.

    def __init__(self) -> None:
        # Free memory blocks, which no tensor uses, by their size in bytes.
        self._free: dict[int, list[mmap.mmap]] = {}

    def empty(self, *shape: int) -> Tensor:
        """Return an uninitialized float32 tensor with the given shape, in a free memory block or a
        new one.
        """
        size = 4 * math.prod(shape)
        free = self._free.setdefault(size, [])
        block = (
            free.pop() if free else mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        )
        # The tensor keeps this memory view alive. When the view is deleted, its memory block is
        # free again.
        view = memoryview(block)
        weakref.finalize(view, free.append, block)
        return torch.frombuffer(view, dtype=torch.float32).view(shape)


class DevicePrefetcher:
    """Copies batches of uint8 images to a device and normalizes them on the device.

    The copy of uint8 images has a quarter of the bytes of float32 images.
    """

    def __init__(
        self,
        device: torch.device,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        channels_last: bool,
    ) -> None:
        """Prepare the copies to `device`. `mean`, `std`: mean and standard deviation of each image
        channel, for pixel values from 0 to 1.
        """
        self.device = device
        # For pixel values from 0 to 255.
        self.mean = torch.tensor(mean, device=device).view(1, -1, 1, 1) * 255
        self.std = torch.tensor(std, device=device).view(1, -1, 1, 1) * 255
        self._inverse_std = 1 / self.std
        self._shift = -self.mean * self._inverse_std
        self._channels_last = channels_last
        self._blocks = BatchMemory()
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None

    def send(self, batch: T) -> T:
        """Copy the tensors of a batch, a tree of tensors, to the device.

        A GPU copies them while it still computes operations that were launched before.
        """
        if self._copies is None:
            return batch
        current = torch.cuda.current_stream(self.device)

        def copy(tensor: Tensor) -> Tensor:
            # Copy from pinned memory, because the CPU would otherwise wait until the copy is
            # finished.
            pinned = tensor if tensor.is_pinned() else tensor.pin_memory()
            sent = pinned.to(self.device, non_blocking=True)
            # Tell the allocator that the current stream uses this tensor. Otherwise the next copy
            # could overwrite its memory too early.
            sent.record_stream(current)
            return sent

        with torch.cuda.stream(self._copies):
            on_device: T = tree_map_only(Tensor, copy, batch)
        current.wait_event(self._copies.record_event())
        return on_device

    def normalize(self, images: Tensor) -> Tensor:
        """Convert uint8 images to normalized float32 images in the memory format of the model. With
        V views per sample, images are [B, V, C, H, W]; single images are [C, H, W].
        """
        if images.ndim == 3:
            return self.normalize(images[None])[0]
        if images.ndim == 5:
            return self.normalize(images.flatten(0, 1)).unflatten(0, images.shape[:2])
        normalized = self._empty_like(images)
        if self._copies is not None:
            # Read bytes and write floats in one kernel. The result stays float32, because some
            # models do not begin with an operator for which autocast converts its input.
            return torch.addcmul(self._shift, images, self._inverse_std, out=normalized)
        # On a CPU, copy to float32 first, because an arithmetic operator on uint8 would make one
        # more copy.
        return normalized.copy_(images).sub_(self.mean).mul_(self._inverse_std)

    def _empty_like(self, images: Tensor) -> Tensor:
        """Return an uninitialized float32 tensor with the shape of `images`, in the memory format
        of the model.
        """
        count, channels, height, width = images.shape
        shape = (
            (count, height, width, channels)
            if self._channels_last
            else (count, channels, height, width)
        )
        is_large = self.device.type == "cpu" and images.numel() >= LARGE
        empty = self._blocks.empty(*shape) if is_large else torch.empty(shape, device=self.device)
        return empty.permute(0, 3, 1, 2) if self._channels_last else empty

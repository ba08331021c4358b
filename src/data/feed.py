"""Batches onto the device: sent as uint8, normalised there."""

from __future__ import annotations

import math
import mmap
import sys
from collections.abc import Iterator
from itertools import chain, pairwise
from typing import Any

import torch
from torch import Tensor

from src.data.augment import Preprocessing

Batch = tuple[Tensor, Tensor]  # images [B, C, H, W], labels int64 [B]

# Batches of at least so many values get memory of their own. malloc keeps that of smaller ones, and finds it faster: looking
# for a free block takes 40 us with cold caches.
LARGE = 2**20


class BatchMemory:
    """Memory for batches on a CPU, used again as soon as no tensor, view or graph holds it.

    glibc's malloc returns such blocks to the kernel after every batch, or finds no room for the next one in what is
    free: measured with 19 MB batches, a third of the speed and 2 GB of growth in some runs, nothing in others.
    """

    def __init__(self) -> None:
        self._blocks: list[mmap.mmap] = []
        for block in [object()]:  # as in `empty`: the list's, the variable's and, up to Python 3.13, the call's own
            self._references_when_free = sys.getrefcount(block)

    def empty(self, *shape: int) -> Tensor:
        """float32, of any contents."""
        count = math.prod(shape)
        for block in self._blocks:
            if len(block) == 4 * count and sys.getrefcount(block) == self._references_when_free:
                break
        else:
            block = mmap.mmap(-1, 4 * count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self._blocks.append(block)
        return torch.frombuffer(block, dtype=torch.float32).view(shape)  # holds the block until its storage is freed


class DeviceFeed:
    """Moves batches to a device and normalises them there: a quarter of the bytes of float images travel."""

    def __init__(self, device: torch.device, preprocessing: Preprocessing, channels_last: bool) -> None:
        self.device = device
        self.mean = torch.tensor(preprocessing.mean, device=device).view(1, -1, 1, 1) * 255
        self.inverse_std = 1 / (torch.tensor(preprocessing.std, device=device).view(1, -1, 1, 1) * 255)
        self.channels_last = channels_last
        self._blocks = BatchMemory()
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __call__(self, batch: Batch) -> Batch:
        return self._received(self._sent(batch))

    def stream(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The batches on the device; on a GPU, each is copied while the one before it is worked on."""
        if self._copies is None:
            yield from map(self, batches)
            return
        sent: Iterator[Any] = chain(map(self._sent, batches), [None])
        for one, _ in pairwise(sent):  # the next one is on its way before this one is waited for
            yield self._received(one)

    def _sent(self, batch: Batch) -> tuple[Batch, torch.cuda.Event | None]:
        """The batch as it will be on the device, and when it is."""
        if self._copies is None:
            return batch, None
        pinned = (tensor if tensor.is_pinned() else tensor.pin_memory() for tensor in batch)  # else a copy waits
        with torch.cuda.stream(self._copies):
            images, labels = (tensor.to(self.device, non_blocking=True) for tensor in pinned)
        return (images, labels), self._copies.record_event()

    def _received(self, sent: tuple[Batch, torch.cuda.Event | None]) -> Batch:
        """Normalised, for whatever the current stream is asked for from now on."""
        (images, labels), arrived = sent
        if arrived is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(arrived)
            images.record_stream(current)  # else the allocator gives their memory to the next copy too early
            labels.record_stream(current)
        normalised = self._empty_like(images).copy_(images)  # torch.sub of uint8 would make a copy of its own
        return normalised.sub_(self.mean).mul_(self.inverse_std), labels

    def _empty_like(self, images: Tensor) -> Tensor:
        """float32 of the same shape, in the format that the model is in."""
        count, channels, height, width = images.shape
        shape = (count, height, width, channels) if self.channels_last else (count, channels, height, width)
        is_large = self.device.type == "cpu" and images.numel() >= LARGE
        empty = self._blocks.empty(*shape) if is_large else torch.empty(shape, device=self.device)
        return empty.permute(0, 3, 1, 2) if self.channels_last else empty

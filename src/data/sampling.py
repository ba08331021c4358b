"""Which rank reads which index, and the seeds of random draws: both follow from their arguments, never from earlier draws.

Step n sees the same set of images on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DistributedSampler

MASK = 0xFFFFFFFFFFFFFFFF  # 64 bits
BATCHES_ADDED_AT_ONCE = 100


def seed_for(*values: int) -> int:
    """One seed in 0 .. 2^63 - 1 from several integers; neighbouring ones give unrelated seeds.

    splitmix64's finaliser (Steele, Lea, Flood 2014), applied once per value.
    """
    mixed = 0
    for value in values:
        mixed = ((mixed ^ value) + 0x9E3779B97F4A7C15) & MASK
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & MASK
        mixed ^= mixed >> 31
    return mixed >> 1


class Request(NamedTuple):
    """What a loader worker is asked for: a batch of sample indices, and the epoch, on which augmentation depends."""

    epoch: int
    indices: NDArray[np.int64]  # [batch]; numpy, because a tensor would travel to a worker as shared memory


class TrainRequests(DistributedSampler[Any]):
    """torch's DistributedSampler, batch by batch: with its shard as a tensor (10^7 indices: 80 MB instead of 400), an
    epoch that can be entered at any batch, and the tail dropped.

    Rank r of w takes every w-th index of the epoch's permutation, so that the ranks' n-th batches of size B/w together
    are the n-th global batch of size B. What does not fill an optimizer step, which takes `accumulate` of these, is
    dropped, on all ranks alike.

    With `copies` c (repeated augmentation, Hoffer et al. 2020, arXiv:1901.09335) an epoch is as long, of a c-th of the
    images; copy k of image i is the index i + k x num_images, so that each has draws of its own, and copies are
    neighbours, so that ddp spreads them over its ranks.
    """

    def __init__(
        self,
        num_images: int,
        batch_size: int,
        rank: int,
        world_size: int,
        seed: int,
        copies: int = 1,
        accumulate: int = 1,
    ) -> None:
        """`batch_size` is the global one."""
        if num_images < batch_size:
            raise ValueError(
                f"data.batch_size={batch_size}: larger than the training split ({num_images} images); use at most that"
            )
        batches = num_images // batch_size
        if batches < accumulate:
            raise ValueError(f"train.accumulate={accumulate}: an epoch has only {batches} batches")
        super().__init__(range(num_images), world_size, rank, shuffle=True, seed=seed, drop_last=True)  # type: ignore[arg-type]
        self.num_images, self.batch_size, self.copies = num_images, batch_size, copies
        self.batches_per_epoch = batches // accumulate * accumulate
        self.dropped = num_images - self.batches_per_epoch * batch_size
        self.first_batch = 0

    def start_at(self, epoch: int, first_batch: int = 0) -> None:
        """The next iteration is over this epoch; a resumed run starts inside one."""
        self.set_epoch(epoch)
        self.first_batch = first_batch

    def shard(self) -> Tensor:
        """This rank's indices of the epoch, in order: int64 [batches x batch_size / num_replicas]."""
        return self._order()[self.rank :: self.num_replicas]

    def global_batches(self, first: int, count: int) -> list[int]:
        """The images that all ranks read in this epoch's batches `first` to `first + count`."""
        indices = self._order()[first * self.batch_size : (first + count) * self.batch_size]
        return (indices % self.num_images).tolist()  # type: ignore[no-any-return]

    def _order(self) -> Tensor:
        """The epoch's indices, of all ranks: int64 [batches x batch_size]."""
        generator = torch.Generator().manual_seed(self.seed + self.epoch)  # as DistributedSampler draws
        order = torch.randperm(self.num_images, generator=generator)
        if self.copies > 1:
            chosen = order[: -(-self.num_images // self.copies)]
            order = (chosen[:, None] + torch.arange(self.copies) * self.num_images).flatten()
        return order[: self.batches_per_epoch * self.batch_size]

    def __iter__(self) -> Iterator[Request]:
        for indices in self.shard().split(self.batch_size // self.num_replicas)[self.first_batch :]:
            yield Request(self.epoch, indices.numpy())

    def __len__(self) -> int:
        return self.batches_per_epoch - self.first_batch


class EvaluationRequests:
    """Every sample once: rank r of w takes range(r, n, w), unpadded, so that shards may differ by one or be empty."""

    def __init__(self, num_samples: int, batch_size: int, rank: int, world_size: int) -> None:
        """`batch_size` is the global one."""
        if num_samples == 0:
            raise ValueError("the evaluation split is empty: no image to evaluate on")
        self.indices = np.arange(rank, num_samples, world_size)
        self.batch_size = max(1, batch_size // world_size)

    def __iter__(self) -> Iterator[Request]:
        for start in range(0, len(self.indices), self.batch_size):
            yield Request(0, self.indices[start : start + self.batch_size])

    def __len__(self) -> int:
        return -(-len(self.indices) // self.batch_size)


class Reads:
    """How often each index was read. Added up for many batches in one go: in a step of 4 ms, each would cost it 15 us."""

    def __init__(self, num_indices: int) -> None:
        self._counts = np.zeros(num_indices, np.uint8)
        self._not_added: list[NDArray[np.int64]] = []

    def add(self, indices: NDArray[np.int64]) -> None:
        self._not_added.append(indices)
        if len(self._not_added) == BATCHES_ADDED_AT_ONCE:
            self.counts()

    def counts(self) -> NDArray[np.uint8]:
        """[indices]"""
        batches, self._not_added = self._not_added, []
        if batches:
            np.add.at(self._counts, np.concatenate(batches), np.uint8(1))  # 100 times as fast as with an int
        return self._counts

"""Samplers assign sample indices to ranks. Step n reads the same set of images on any number of
ranks.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DistributedSampler

from timm_parallel.data.fractions import batches_per_epoch
from timm_parallel.data.seeds import seed_for


def seed_draws(seed: int, epoch: int, index: int) -> None:
    """Seed the generators of torch, random and numpy from (seed, epoch, index of a sample), on any
    rank and worker alike.
    """
    mixed = seed_for(seed, epoch, index)
    torch.default_generator.manual_seed(mixed)
    random.seed(mixed)
    np.random.seed(mixed & 0xFFFFFFFF)


def fixed_choice(total: int, count: int | None) -> Tensor | None:
    """Choose `count` of `total` images at random, the same in every run: indices [count]; None for
    all.
    """
    if count is None or count >= total:
        return None
    # Not the first images, which in a folder all have one class.
    return torch.randperm(total, generator=torch.Generator().manual_seed(0))[:count]


def class_balance(labels: Tensor | None, balance: float) -> Tensor:
    """Return image weights [N] that draw a class of n images with a probability proportional to
    n^(1 - balance).
    """
    if labels is None or labels.ndim != 1 or labels.is_floating_point():
        raise ValueError(
            f"data.balance={balance}: needs a dataset that lists one class per image; set it to 0"
        )
    counts = labels.bincount().double()
    return counts[labels] ** -balance


class IndexBatch(NamedTuple):
    """Sample indices of a batch, and the epoch, from which augmentation is seeded. Sent to loader
    workers.
    """

    epoch: int
    indices: NDArray[np.int64]  # [batch]; numpy, because a tensor would be sent as shared memory


class TrainSampler(DistributedSampler[Any]):
    """DistributedSampler that yields batches: an epoch can start at any batch. A shard of 10^7
    indices takes 80 MB.

    Rank r of w takes every w-th index of the epoch's permutation, so that the ranks' n-th batches
    of size B/w together are the n-th global batch of size B. Images that do not fill an optimizer
    step of `accumulate` batches are dropped.
    """

    # With `copies` c (repeated augmentation, Hoffer et al. 2020, arXiv:1901.09335) an epoch has the
    # same length, but a c-th of the images. Copy k of image i has the index i + k x num_images, so
    # that augmentation draws differently for each.

    def __init__(
        self,
        num_images: int,
        batch_size: int,
        rank: int,
        world_size: int,
        seed: int,
        copies: int = 1,
        accumulate: int = 1,
        weights: Tensor | None = None,
    ) -> None:
        """`batch_size` is the global one. With `weights` [num_images], images are drawn with
        replacement.
        """
        self.batches_per_epoch = batches_per_epoch(num_images, batch_size, accumulate)
        super().__init__(
            range(num_images),  # type: ignore[arg-type]
            world_size,
            rank,
            shuffle=True,
            seed=seed,
            drop_last=True,
        )
        self.num_images, self.batch_size, self.copies, self.weights = (
            num_images,
            batch_size,
            copies,
            weights,
        )
        self.dropped = num_images - self.batches_per_epoch * batch_size
        self.first_batch = 0

    def start_at(self, epoch: int, first_batch: int = 0) -> None:
        """Set the epoch and first batch of the next iteration, because a resumed run may start
        inside an epoch.
        """
        self.set_epoch(epoch)
        self.first_batch = first_batch

    def shard(self) -> Tensor:
        """Return this rank's indices of the epoch, in order: int64 [batches x batch_size /
        num_replicas].
        """
        return self._order()[self.rank :: self.num_replicas]

    def global_batches(self, first: int, count: int) -> list[int]:
        """List the images, below `num_images`, that all ranks read in batches `first` to `first +
        count` of the epoch.
        """
        indices = self._order()[first * self.batch_size : (first + count) * self.batch_size]
        return (indices % self.num_images).tolist()  # type: ignore[no-any-return]

    def _order(self) -> Tensor:
        """Return the indices of the epoch for all ranks: int64 [batches x batch_size]."""
        # DistributedSampler seeds with seed + epoch, so a sweep's repeats with seeds s, s + 1, …
        # would share orders.
        generator = torch.Generator().manual_seed(seed_for(self.seed, self.epoch))
        if self.weights is not None:
            return self._draw(self.weights, generator)
        order = torch.randperm(self.num_images, generator=generator)
        if self.copies > 1:
            chosen = order[: -(-self.num_images // self.copies)]
            # Copies are adjacent, so that ddp spreads them over its ranks.
            order = (chosen[:, None] + torch.arange(self.copies) * self.num_images).flatten()
        return order[: self.batches_per_epoch * self.batch_size]

    def _draw(self, weights: Tensor, generator: torch.Generator) -> Tensor:
        """Draw images with replacement. The k-th draw of an image is its k-th copy, augmented
        differently.
        """
        bounds = weights.double().cumsum(0)
        draws = (
            torch.rand(
                self.batches_per_epoch * self.batch_size, generator=generator, dtype=torch.float64
            )
            * bounds[-1]
        )
        images = torch.searchsorted(bounds, draws, right=True).clamp(max=self.num_images - 1)
        ordered, at = images.sort(stable=True)
        first = torch.searchsorted(ordered, ordered)
        copy = torch.empty_like(images)
        copy[at] = torch.arange(len(images)) - first
        return images + copy * self.num_images

    def __iter__(self) -> Iterator[IndexBatch]:
        for indices in self.shard().split(self.batch_size // self.num_replicas)[self.first_batch :]:
            yield IndexBatch(self.epoch, indices.numpy())

    def __len__(self) -> int:
        return self.batches_per_epoch - self.first_batch


class EvalSampler:
    """Samples each image once: rank r of w takes range(r, n, w) without padding, so shard sizes may
    differ by one.
    """

    def __init__(self, num_samples: int, batch_size: int, rank: int, world_size: int) -> None:
        """`batch_size` is the global one."""
        if num_samples == 0:
            raise ValueError(
                "data: the split to evaluate on is empty; add images, or choose another split"
            )
        self.indices = np.arange(rank, num_samples, world_size)
        self.batch_size = max(1, batch_size // world_size)

    def __iter__(self) -> Iterator[IndexBatch]:
        for start in range(0, len(self.indices), self.batch_size):
            yield IndexBatch(0, self.indices[start : start + self.batch_size])

    def __len__(self) -> int:
        return -(-len(self.indices) // self.batch_size)

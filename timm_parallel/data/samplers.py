"""Samplers, which assign the indices of images to ranks.

Step n of training reads the same set of images on any number of ranks.
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

from timm_parallel.data.file_list import batches_per_epoch
from timm_parallel.machine.seeds import seed_for


def seed_draws(seed: int, epoch: int, index: int) -> None:
    """Seed the global generators of torch, random and numpy to read and augment one image.

    The seed depends on the run's seed, the epoch and the index of the image. So any rank and any
    loader worker draws the same numbers for the image.
    """
    mixed = seed_for(seed, epoch, index)
    torch.default_generator.manual_seed(mixed)
    random.seed(mixed)
    np.random.seed(mixed & 0xFFFFFFFF)


def fixed_choice(total: int, count: int | None) -> Tensor | None:
    """Choose `count` of `total` images at random, and return their indices as a tensor [count].

    Every run chooses the same images. Returns None if all images are used.
    """
    if count is None or count >= total:
        return None
    # Do not take the first images, because in an image folder all of them have the same class.
    return torch.randperm(total, generator=torch.Generator().manual_seed(0))[:count]


def class_balance(labels: Tensor | None, balance: float) -> Tensor:
    """Compute the weight of each image for drawing images with replacement, as a tensor [N].

    A class of n images is drawn with a probability proportional to n^(1 - balance).
    """
    if labels is None or labels.ndim != 1 or labels.is_floating_point():
        raise ValueError(
            f"data.balance={balance}: needs a dataset that lists one class per image; set "
            "data.balance=0"
        )
    counts = labels.bincount().double()
    return counts[labels] ** -balance


class IndexBatch(NamedTuple):
    """Indices of the images in a batch, which a sampler sends to loader workers.

    The epoch is sent too, because the seeds of augmentation depend on it.
    """

    epoch: int
    # Indices of the images, with the shape [batch]. They are a numpy array, because torch would
    # send a tensor through shared memory.
    indices: NDArray[np.int64]


class TrainSampler(DistributedSampler[Any]):
    """Sampler that yields the batches of indices that one rank trains on.

    Unlike its base DistributedSampler, it can start an epoch at any batch. Rank r of w takes every
    w-th index of the permutation of an epoch, starting at r. So the n-th batches of all ranks, of
    size B / w each, form the n-th global batch of size B. Images that do not fill an optimizer step
    of `accumulate` batches are dropped. The indices of a rank take 80 MB for 10^7 images.
    """

    # Repeated augmentation (Hoffer et al. 2020, arXiv:1901.09335) puts c copies of an image into an
    # epoch. The epoch keeps its length, so it has only a c-th of the images. Copy k of image i has
    # the index i + k * num_images, so that each copy is augmented with another seed.

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
        shuffle: bool = True,
    ) -> None:
        """Configure the sampler. `batch_size`: the global batch size. `shuffle`: False for a
        stream, which has an order of its own.

        `weights` [num_images]: draw images with replacement, with probabilities proportional to
        these weights. None: read each image once per epoch.
        """
        self.batches_per_epoch = batches_per_epoch(num_images, batch_size, accumulate)
        super().__init__(
            range(num_images),  # type: ignore[arg-type]
            world_size,
            rank,
            shuffle=shuffle,
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
        """Set the epoch and the first batch of the next iteration.

        A resumed run may continue inside an epoch, so it does not start at batch 0.
        """
        self.set_epoch(epoch)
        self.first_batch = first_batch

    def shard(self) -> Tensor:
        """Return the indices that this rank reads in the epoch, in order.

        The result is an int64 tensor [batches * batch_size / number of ranks].
        """
        return self._order()[self.rank :: self.num_replicas]

    def global_batches(self, first: int, count: int) -> list[int]:
        """Return the indices of the images that all ranks together read in `count` batches of the
        epoch.

        `first`: index of the first of these batches. For an augmented copy of an image, the index
        of the image itself is returned.
        """
        indices = self._order()[first * self.batch_size : (first + count) * self.batch_size]
        return (indices % self.num_images).tolist()  # type: ignore[no-any-return]

    def _order(self) -> Tensor:
        """Return the indices of the epoch for all ranks, an int64 tensor [batches * batch_size]."""
        # Do not use seed + epoch as DistributedSampler does. Repeats of a sweep with the seeds s, s
        # + 1, … would then share permutations.
        generator = torch.Generator().manual_seed(seed_for(self.seed, self.epoch))
        if self.weights is not None:
            return self._draw(self.weights, generator)
        if not self.shuffle:
            return torch.arange(self.batches_per_epoch * self.batch_size)
        order = torch.randperm(self.num_images, generator=generator)
        if self.copies > 1:
            chosen = order[: -(-self.num_images // self.copies)]
            # Put the copies of an image next to each other, so that ddp distributes them to
            # different ranks.
            order = (chosen[:, None] + torch.arange(self.copies) * self.num_images).flatten()
        return order[: self.batches_per_epoch * self.batch_size]

    def _draw(self, weights: Tensor, generator: torch.Generator) -> Tensor:
        """Draw the images of an epoch with replacement, with probabilities proportional to
        `weights`.

        The k-th draw of an image gets the index of its k-th copy, so that each draw is augmented
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
    """Sampler that assigns each image to exactly one rank.

    Rank r of w takes range(r, n, w) without padding, so the numbers of images of two ranks may
    differ by one.
    """

    def __init__(self, num_samples: int, batch_size: int, rank: int, world_size: int) -> None:
        """Select the images of this rank. `batch_size`: the global batch size."""
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

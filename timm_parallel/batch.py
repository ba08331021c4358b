"""A batch: fields by name, such as `image` and `target`, and random draws for its samples."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._pytree import tree_map_only

from timm_parallel.machine.seeds import seeds_for

# Added to the values that make the seeds of draws, so that they differ from the seeds of
# augmentation.
DRAWS = 2
# Bits of precision of a uniform float32 number.
BITS = 24


class Batch:
    """Samples of one forward pass on one device.

    Fields are attributes: `batch.image` is a normalized float tensor [B, C, H, W], and
    `batch.target` what the dataset returns next to it. A dataset that returns a dictionary of
    fields gives each of them its own name. A field is a tensor [B, …], or a list with an entry per
    sample, for example of tensors of unequal length.
    """

    def __init__(
        self,
        fields: dict[str, Any],
        indices: NDArray[np.int64] | None = None,
        *,
        seed: int = 0,
        epoch: int = 0,
        share: float = 0.0,
    ) -> None:
        """`indices` [B]: indices of the samples in their split; None: 0, 1, …, for made-up batches.
        `seed`: seed of the run. `epoch`: number of the epoch, from 0; in evaluation always 0.
        `share`: part of the training that is done, from 0 to 1.
        """
        self.fields, self._seed, self.epoch, self.share = fields, seed, epoch, share
        count = len(next(iter(fields.values())))
        self.indices = np.arange(count) if indices is None else indices
        # Number of draws so far, so that two draws differ.
        self.draws = 0

    def __getattr__(self, name: str) -> Any:
        # copy and pickle ask for attributes before the fields exist.
        fields = self.__dict__.get("fields", {})
        if name not in fields:
            raise AttributeError(
                f"the batch has no field {name}; it has {', '.join(fields)}", name=name, obj=self
            )
        return fields[name]

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def device(self) -> torch.device:
        return next(field.device for field in self.fields.values() if isinstance(field, Tensor))

    def replace(self, **fields: Any) -> Batch:
        """Return a batch of the same samples in which some fields have other values."""
        changed = Batch(
            {**self.fields, **fields},
            self.indices,
            seed=self._seed,
            epoch=self.epoch,
            share=self.share,
        )
        changed.draws = self.draws
        return changed

    def normal(self, *shape: int) -> Tensor:
        """Draw normally distributed numbers, a float tensor [B, *shape] on the device of the batch.

        All draws of a batch are functions of the seed of the run, the epoch and the sample. So they
        are equal on any number of devices and after a resume, and the same in every evaluation.
        """
        words = self._words(math.prod(shape))
        # The method of Box and Muller (1958), with two numbers from the bits of one word.
        first = ((words >> (64 - BITS)) & (2**BITS - 1)).float().add_(1).mul_(2.0**-BITS)
        second = (words & (2**BITS - 1)).float().mul_(2.0**-BITS)
        drawn = first.log_().mul_(-2).sqrt_() * second.mul_(2 * math.pi).cos_()
        return drawn.view(len(self), *shape)

    def integers(self, high: int) -> Tensor:
        """Draw an integer from 0 to high - 1 for each sample, an int64 tensor [B] on the device of
        the batch.
        """
        return ((self._words(1)[:, 0] >> 1) & (2**63 - 1)) % high

    def _words(self, count: int) -> Tensor:
        """Draw `count` words of 64 random bits for each sample, int64 [B, count].

        Each is the finalizer of splitmix64 (Steele, Lea, Flood 2014) of a counter, because one
        generator per sample would launch a kernel per sample on a GPU.
        """
        seeds = seeds_for(self._seed, self.epoch, self.indices, DRAWS, self.draws)
        self.draws += 1
        words = torch.tensor(seeds, device=self.device)[:, None] + _GOLDEN * torch.arange(
            1, count + 1, device=self.device
        )
        words = (words ^ ((words >> 30) & (2**34 - 1))) * _FIRST
        words = (words ^ ((words >> 27) & (2**37 - 1))) * _SECOND
        return words ^ ((words >> 31) & (2**33 - 1))


def stretched(batch: Batch, count: int, device: str = "meta") -> Batch:
    """Build a batch of `count` samples like the first one of a batch, whose values are undefined.
    The meta device computes only shapes.
    """

    def empty(tensor: Tensor) -> Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)

    return Batch(
        {
            name: torch.empty((count, *field.shape[1:]), dtype=field.dtype, device=device)
            if isinstance(field, Tensor)
            else [tree_map_only(Tensor, empty, field[0])] * count
            for name, field in batch.fields.items()
        }
    )


# Constants of splitmix64, as int64.
_GOLDEN, _FIRST, _SECOND = (
    np.array([0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB], dtype=np.uint64)
    .view(np.int64)
    .tolist()
)

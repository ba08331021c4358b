"""Mixup and cutmix, which mix pairs of images and of labels in a batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from timm.data import Mixup
from timm.data.mixup import rand_bbox_minmax
from torch import Tensor

from timm_parallel.batch import Batch
from timm_parallel.machine.seeds import seed_for


class BatchedMixup(Mixup):
    """timm's Mixup with faster modes elem and pair.

    All images of a batch are mixed by one operation, and one copy to the device is enough. The
    results equal those of timm.
    """

    def _mix_elem(self, x: Tensor) -> Tensor:
        return self._mix(x, *self._params_per_elem(len(x)))

    def _mix_pair(self, x: Tensor) -> Tensor:
        return self._mix(x, *self._params_per_elem(len(x) // 2))

    def _mix(self, images: Tensor, share: Any, use_cutmix: NDArray[np.bool_]) -> Tensor:
        """Mix images [B, C, H, W] in place, each with the image at the mirrored position in the
        batch.

        Returns the weight [B, 1] of each image's own label in its mixed label. `share` [B]: weight
        of an image against its partner. `use_cutmix` [B]: True for cutmix, False for mixup. If the
        two images of a pair have equal values, `share` and `use_cutmix` have the shape [B / 2].
        """
        # The columns per image are: weight of its own pixels, weight of the other image's pixels,
        # weight of its own label, and the cutmix box as top, bottom, left, right.
        numbers = np.zeros((len(share), 7), np.float32)
        use_cutmix = use_cutmix & (share != 1)
        numbers[:, :3] = np.stack(
            [np.where(use_cutmix, 1, share), np.where(use_cutmix, 0, 1 - share), share], 1
        )
        numbers[use_cutmix, 2:] = self._draw_boxes(share[use_cutmix], images.shape[2:])
        if len(share) < len(images):
            numbers = np.concatenate([numbers, numbers[::-1]])
        drawn = torch.from_numpy(numbers)
        # Copy from pinned memory, because the CPU would otherwise wait until the copy is finished.
        drawn = drawn.pin_memory().to(images.device, non_blocking=True) if images.is_cuda else drawn
        own, other, of_label, top, bottom, left, right = drawn.view(-1, 7, 1, 1, 1).unbind(1)
        rows = torch.arange(images.shape[2], device=images.device)[:, None]
        columns = torch.arange(images.shape[3], device=images.device)
        inside = (rows >= top) & (rows < bottom) & (columns >= left) & (columns < right)
        own, other = own.masked_fill(inside, 0), other.masked_fill(inside, 1)
        others = images.flip(0).mul_(other)
        images.mul_(own).add_(others)
        return of_label.view(-1, 1)

    def _draw_boxes(self, share: Any, size: tuple[int, ...]) -> NDArray[Any]:
        """Draw the cutmix boxes of N images from the same distribution as timm. `share` [N]: part
        of each image that the box should leave unchanged, from 0 to 1.

        Returns an array [N, 5]. Its columns are the weight of the image's own label, and the top,
        bottom, left and right edge of the box.
        """
        if self.cutmix_minmax is not None:
            boxes = np.array([rand_bbox_minmax(size, self.cutmix_minmax) for _ in share]).reshape(
                -1, 4
            )
        else:
            sides = (np.sqrt(1 - share)[:, None] * np.array(size, np.float32)).astype(int)
            centers = np.random.randint(0, size, sides.shape)
            edges = np.clip([centers - sides // 2, centers + (sides + 1) // 2], 0, size)
            boxes = edges.transpose(1, 2, 0).reshape(-1, 4)
        areas = (boxes[:, 1] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 2])
        return np.column_stack([1 - areas / (size[0] * size[1]), boxes])


class Mixing:
    """Applies mixup and cutmix to the images of one rank.

    Random numbers depend only on the seed, the number of the batch and the rank.
    """

    def __init__(self, seed: int, rank: int, off_epoch: int = 0, **arguments: Any) -> None:
        """Configure mixup and cutmix.

        `off_epoch`: the first epoch without mixing; 0: mix in all epochs. `arguments`: keyword
        arguments of timm's Mixup.
        """
        self.mixup, self.off_epoch = BatchedMixup(**arguments), off_epoch
        self.seed, self.rank = seed, rank
        # Number of batches that were mixed since the training began, also before a resume.
        self.batch = 0

    def __call__(self, batch: Batch) -> Batch:
        """Mix the images of a batch, and give it soft targets [B, classes].

        From the epoch `off_epoch` on, images are not mixed and labels are only smoothed.
        """
        self.mixup.mixup_enabled = not self.off_epoch or batch.epoch < self.off_epoch
        # Seed numpy's global generator, because timm's Mixup draws from it.
        np.random.seed(seed_for(self.seed, self.batch, self.rank) & 0xFFFFFFFF)
        self.batch += 1
        mixed, soft = self.mixup(batch.image, batch.target)
        return batch.replace(image=mixed, target=soft)

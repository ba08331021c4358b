"""Copy a batch to its device, and work on it there: normalize images, erase random boxes, and mix
pairs of images and of labels by mixup and cutmix.
"""

from __future__ import annotations

import math
import mmap
import random
import weakref
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from timm.data import Mixup
from timm.data.mixup import rand_bbox_minmax
from timm.data.random_erasing import RandomErasing
from torch import Tensor
from torch.utils._pytree import tree_map_only

from timm_parallel.batch import Batch
from timm_parallel.machine.seeds import seed_for

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


# Box of pixels to erase: top, left, height and width.
Box = tuple[int, int, int, int]


class Erasing:
    """timm's random erasing as one operation on a whole batch.

    Boxes and noise of an image depend only on its seed, and are drawn on the CPU with separate
    generators. So every device, rank and loader worker erases an image in the same way.
    """

    def __init__(self, probability: float, mode: str = "const", max_count: int = 1) -> None:
        """Set the options of timm's random erasing.

        `probability`: probability that an image is erased. `mode`: const (zeros), rand (one random
        color per box) or pixel (random noise). `max_count`: largest number of boxes per image.
        """
        # This object is never called. It only holds timm's default ranges of box area and aspect
        # ratio.
        self._timm = RandomErasing(probability, mode=mode, max_count=max_count, device="cpu")

    def draw(self, seeds: list[int], shape: torch.Size) -> list[Tensor]:
        """Draw which pixels of a batch are erased, and the noise that replaces them.

        The first tensor in the returned list has the indices of these pixels, int32 [P], counted
        over all pixels of all images. The second tensor has the noise, float32 [P, C]. In the mode
        const, which erases to zeros, the list has no second tensor.
        """
        # Create the generators here and not as attributes, because a torch.Generator cannot be
        # pickled for loader workers that are spawned.
        draws, noise_draws = random.Random(), torch.Generator()
        channels, height, width = shape[1:]
        grid = np.arange(height * width, dtype=np.int32).reshape(height, width)
        pixels, noise = [np.empty(0, np.int32)], [torch.empty(0, channels)]
        for number, seed in enumerate(seeds):
            draws.seed(seed)
            if draws.random() > self._timm.probability:
                continue
            noise_draws.manual_seed(seed)
            for top, left, rows, columns in self._boxes(draws, height, width):
                pixels.append(
                    grid[top : top + rows, left : left + columns].ravel() + number * grid.size
                )
                if self._timm.mode != "const":
                    of_box = (rows, columns) if self._timm.per_pixel else (1, 1)
                    drawn = torch.empty(channels, *of_box).normal_(generator=noise_draws)
                    noise.append(drawn.expand(channels, rows, columns).flatten(1).T)
        erased, values = np.concatenate(pixels), torch.cat(noise)
        if self._timm.max_count > 1:
            # Where two boxes of an image overlap, keep the values of the later box. Without this,
            # two writes to one pixel would happen in an undefined order.
            erased, last = np.unique(erased[::-1], return_index=True)
            values = values.flip(0)[torch.from_numpy(last)] if len(values) else values
        return (
            [torch.from_numpy(erased)]
            if self._timm.mode == "const"
            else [torch.from_numpy(erased), values]
        )

    def __call__(self, images: Tensor, *draws: Tensor) -> Tensor:
        """Erase the drawn pixels of images [B, C, H, W] in place, and return these images."""
        pixels, *noise = draws
        values = noise[0] if noise else images.new_zeros(())
        area = images.shape[2] * images.shape[3]
        numbers = pixels.long() // area
        images.view(*images.shape[:2], area).transpose(1, 2).index_put_(
            (numbers, pixels - numbers * area), values
        )
        return images

    def _boxes(self, draw: random.Random, height: int, width: int) -> list[Box]:
        """Draw the boxes to erase in one image of `height` x `width` pixels, as timm's
        RandomErasing does.
        """
        timm = self._timm
        # If only one number of boxes is possible, timm draws no random number for it. Do the same,
        # so that the boxes are those of timm.
        count = (
            timm.min_count
            if timm.min_count == timm.max_count
            else draw.randint(timm.min_count, timm.max_count)
        )
        boxes: list[Box] = []
        for _ in range(count):
            for _attempt in range(10):
                area = draw.uniform(timm.min_area, timm.max_area) * (height * width) / count
                aspect = math.exp(draw.uniform(*timm.log_aspect_ratio))
                rows, columns = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
                if rows < height and columns < width:
                    boxes.append(
                        (
                            draw.randint(0, height - rows),
                            draw.randint(0, width - columns),
                            rows,
                            columns,
                        )
                    )
                    break
        return boxes


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
        self._mixup, self._off_epoch = BatchedMixup(**arguments), off_epoch
        self._seed, self._rank = seed, rank
        # Number of batches that were mixed since the training began, also before a resume.
        self.batch = 0

    def __call__(self, batch: Batch) -> Batch:
        """Mix the images of a batch, and give it soft targets [B, classes].

        From the epoch `off_epoch` on, images are not mixed and labels are only smoothed.
        """
        self._mixup.mixup_enabled = not self._off_epoch or batch.epoch < self._off_epoch
        # Seed numpy's global generator, because timm's Mixup draws from it.
        np.random.seed(seed_for(self._seed, self.batch, self._rank) & 0xFFFFFFFF)
        self.batch += 1
        mixed, soft = self._mixup(batch.image, batch.target)
        return batch.replace(image=mixed, target=soft)

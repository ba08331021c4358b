"""Data loaders: read samples by index and stack them to uint8 batches. prefetch.py moves batches to
the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.util import get_temp_dir
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from timm_parallel.data.dataset import InMemory, Sample, Split, train_labels
from timm_parallel.data.prefetch import Batch, DevicePrefetcher
from timm_parallel.data.samplers import (
    EvalSampler,
    IndexBatch,
    TrainSampler,
    class_balance,
    fixed_choice,
    seed_draws,
)
from timm_parallel.data.seeds import seeds_for
from timm_parallel.errors import UnreadableImageError
from timm_parallel.machine import hardware
from timm_parallel.machine.process import kill_on_parent_exit
from timm_parallel.machine.signals import ignore_stop_signals
from timm_parallel.parallel.group import ProcessGroup
from timm_parallel.task import Targets

# Changes an image [C, H, W] and its target.
Transform = Callable[[Tensor, Any], Sample]
# A batch, the indices that could not be read for it, and the random draws of its batch steps.
Fetched = tuple[Tensor, Tensor, list[int], list[Tensor]]
# Seconds until the kernel reports the end of a worker whose connections it has closed.
SIGNAL_SECONDS = 1.0
# Limit of consecutive unreadable images to skip. More are not just a few damaged files.
MAX_IN_A_ROW = 100


class Draws(Protocol):
    """Augmentation of whole batches, whose random numbers are drawn on the host, where a batch is
    read.
    """

    def draw(self, seeds: list[int], shape: torch.Size) -> list[Tensor]:
        """Draw for images of this shape [B, C, H, W], each from its seed, without the global
        generators.

        A thread may call it while training uses those.
        """


class PixelStep(Draws, Protocol):
    """Augmentation of uint8 images and their targets, on their device."""

    def __call__(self, images: Tensor, targets: Tensor, *draws: Tensor) -> Batch: ...


class NormalizedStep(Draws, Protocol):
    """Augmentation of normalized images, on their device."""

    def __call__(self, images: Tensor, *draws: Tensor) -> Tensor: ...


class BatchFetcher:
    """Reads batches of uint8 images and targets, in loader workers or in the rank itself."""

    def __init__(
        self,
        split: Split,
        targets: Targets | None,
        transform: Transform | None,
        seed: int,
        on_error: str = "raise",
        substitutes: int = 0,
        chosen: Tensor | None = None,
        on_pixels: PixelStep | None = None,
        on_normalized: NormalizedStep | None = None,
    ) -> None:
        """`on_error`: an unreadable image ends the run (raise), or is replaced or left out (skip).

        `substitutes`: number of images, of which the next readable one replaces an unreadable one;
        0: it is left out. A training batch must keep its size on every rank. `chosen`: numbers of
        the images of the split to read; None: all. `on_pixels`, `on_normalized`: steps on uint8
        images after `transform`, and on normalized images.
        """
        # Without a task, targets are stacked.
        targets = targets or Targets()
        self.split, self.targets, self.transform, self.seed = split, targets, transform, seed
        self.on_error, self.substitutes, self.chosen = on_error, substitutes, chosen
        self.on_pixels, self.on_normalized = on_pixels, on_normalized
        # Only in the rank itself, because a forked worker has no CUDA.
        self.pin_memory = False
        # Indices >= num_images are additional copies of images.
        self.num_images = substitutes or len(split)
        # A batch is rows of tensors: nothing to decode, nothing to do for each image.
        self.in_memory = InMemory.of(split)
        self.gathers = self.in_memory is not None and transform is None
        if self.in_memory is not None:
            targets.check_targets(self.in_memory.labels)

    def read(self, batch: IndexBatch) -> Fetched:
        images, labels, unreadable = self._gather(batch) if self.gathers else self._read_each(batch)
        draws = self._draw(batch, images.shape)
        return (
            images,
            labels,
            unreadable,
            [draw.pin_memory() for draw in draws] if self.pin_memory else draws,
        )

    # torch's loader calls it with a whole batch.
    __getitems__ = read

    def finish(
        self,
        images: Tensor,
        targets: Tensor,
        draws: Sequence[Tensor],
        normalize: Callable[[Tensor], Tensor],
    ) -> Batch:
        """Apply the batch steps, and between them `normalize`, to uint8 images and their targets on
        their device.
        """
        if self.on_pixels is not None:
            images, targets = self.on_pixels(images, targets, draws[0])
            draws = draws[1:]
        images = normalize(images)
        if self.on_normalized is not None:
            images = self.on_normalized(images, *draws)
        return images, targets

    def _draw(self, batch: IndexBatch, shape: torch.Size) -> list[Tensor]:
        draws: list[Tensor] = []
        if self.on_pixels is not None:
            draws += self.on_pixels.draw(seeds_for(self.seed, batch.epoch, batch.indices), shape)
        if self.on_normalized is not None:
            # Seeds that are independent of those of the images' other augmentation.
            draws += self.on_normalized.draw(
                seeds_for(self.seed, batch.epoch, batch.indices, 1), shape
            )
        return draws

    def _gather(self, batch: IndexBatch) -> tuple[Tensor, Tensor, list[int]]:
        assert self.in_memory is not None
        # numpy's remainder takes 20 us with cold caches.
        indices = torch.from_numpy(batch.indices) % self.num_images
        indices = indices if self.chosen is None else self.chosen[indices]
        return (
            self._rows(self.in_memory.images, indices),
            self._rows(self.in_memory.labels, indices),
            [],
        )

    def _read_each(self, batch: IndexBatch) -> tuple[Tensor, Tensor, list[int]]:
        unreadable: list[int] = []
        # Keep augmentation from advancing the generator that dropout uses.
        with torch.random.fork_rng(devices=[]):
            read = [
                self._sample(batch.epoch, index, unreadable) for index in batch.indices.tolist()
            ]
        samples = [sample for sample in read if sample is not None]
        if not samples:
            return torch.empty(0), torch.empty(0, dtype=torch.int64), unreadable
        images, targets = zip(*samples, strict=True)
        labels = self.targets.collate(targets)
        self.targets.check_targets(labels)
        return torch.stack(images), labels, unreadable

    def numbers(self, indices: list[int]) -> list[int]:
        """Convert indices among the `chosen` images to indices in the whole split."""
        return indices if self.chosen is None else self.chosen[indices].tolist()

    def _rows(self, of: Tensor, indices: Tensor) -> Tensor:
        # `of[indices]` would take 17 times as long.
        if not self.pin_memory:
            return of.index_select(0, indices)
        # torch reuses pinned memory once the device has copied it, so no pages are faulted in.
        pinned = torch.empty((len(indices), *of.shape[1:]), dtype=of.dtype, pin_memory=True)
        return torch.index_select(of, 0, indices, out=pinned)

    def _sample(self, epoch: int, index: int, unreadable: list[int]) -> Sample | None:
        """Read a sample. If it is unreadable, return the same substitute on any rank or worker, or
        None to skip it.
        """
        for offset in range(MAX_IN_A_ROW):
            number = self.numbers([(index + offset) % self.num_images])[0]
            try:
                image, label = self.split[number]
            except UnreadableImageError as error:
                if self.on_error == "raise":
                    raise UnreadableImageError(f"{error}, or set data.on_error=skip") from None
                unreadable.append(number)
                if not self.substitutes:
                    return None
                continue
            if self.transform is not None:
                seed_draws(self.seed, epoch, index)
                image, label = self.transform(image, label)
            return image, label
        raise ValueError(
            f"data.on_error=skip: {MAX_IN_A_ROW} unreadable images in a row, up to number "
            f"{number}; check the files"
        )


class Loader:
    """Batches of one split for this rank, on its device."""

    def __init__(
        self,
        fetcher: BatchFetcher,
        sampler: TrainSampler | EvalSampler,
        prefetcher: DevicePrefetcher,
        num_workers: int,
    ) -> None:
        self.fetcher, self.sampler, self.prefetcher, self.num_workers = (
            fetcher,
            sampler,
            prefetcher,
            num_workers,
        )
        self.unreadable: set[int] = set()  # numbers of the images that this rank could not read
        self._loader: DataLoader[Any] | None = None
        on_gpu = prefetcher.device.type == "cuda"
        fetcher.pin_memory = on_gpu and not num_workers
        if num_workers:
            # The workers inherit the folder of their sockets. A killed worker could not remove one
            # that it has made itself.
            get_temp_dir()
            self._loader = DataLoader(
                fetcher,  # type: ignore[arg-type]
                batch_sampler=sampler,  # type: ignore[arg-type]
                num_workers=num_workers,
                # The fetcher returns a batch already.
                collate_fn=tuple,
                pin_memory=on_gpu,
                persistent_workers=True,
                worker_init_fn=_start_worker,
                # By default, torch would draw a seed from the generator that dropout uses.
                generator=torch.Generator(),
            )

    def __iter__(self) -> Iterator[Batch]:
        self.unreadable.clear()
        return self._batches()

    def _batches(self) -> Iterator[Batch]:
        batches = self._read()
        # Only a gather is thread-safe: transforms use the global generators.
        if self.fetcher.pin_memory and self.fetcher.gathers:
            batches = one_ahead(batches)
        # A batch is asked for once the previous step has been launched, so that a late one does not
        # delay that step. A GPU copies it meanwhile.
        return map(self._to_device, batches)

    def _read(self) -> Iterator[tuple[Tensor, ...]]:
        """Yield batches from the workers: images, labels, and the draws of the batch steps."""
        fetched = self._loader if self._loader is not None else map(self.fetcher.read, self.sampler)
        try:
            for images, labels, unreadable, draws in fetched:
                self.unreadable.update(unreadable)
                if len(labels):
                    yield images, labels, *draws
        except (ConnectionError, EOFError):
            # A killed worker closes its connections first. Then SIGCHLD lets torch raise an error
            # that names the worker.
            time.sleep(SIGNAL_SECONDS)
            raise

    def _to_device(self, batch: tuple[Tensor, ...]) -> Batch:
        images, labels, *draws = self.prefetcher.send(batch)
        return self.fetcher.finish(images, labels, draws, self.prefetcher.normalize)

    def close(self) -> None:
        """End the worker processes. They ignore SIGTERM, so the interpreter would wait for them
        forever at its exit.
        """
        iterator = None if self._loader is None else self._loader._iterator
        if iterator is not None:
            # torch calls this too, but only once nothing else refers to the iterator.
            iterator._shutdown_workers()  # type: ignore[attr-defined]


def one_ahead(batches: Iterator[tuple[Tensor, ...]]) -> Iterator[tuple[Tensor, ...]]:
    """Yield batches, each read in a thread while the one before is used. Reading releases the
    interpreter's lock.
    """
    with ThreadPoolExecutor(1, "reader") as reader:
        upcoming = reader.submit(next, batches, None)
        while (batch := upcoming.result()) is not None:
            upcoming = reader.submit(next, batches, None)
            yield batch


def num_workers(
    workers: int | str, fetcher: BatchFetcher, device: torch.device, local_world_size: int
) -> int:
    """Return the number of loader workers. `auto` gives 0 for data in memory, else this rank's
    share of the cores.

    For a GPU it also gives that share for data in memory that are transformed image by image: the
    thread that launches kernels has no time for it.
    """
    if workers != "auto":
        return int(workers)
    if fetcher.gathers or (isinstance(fetcher.split, InMemory) and device.type != "cuda"):
        return 0
    return max(1, hardware.cores() // local_world_size)


class EvalLoader(Loader):
    """Loader of this rank's share of a split, in order and each image once."""

    def __init__(
        self,
        split: Split,
        targets: Targets | None,
        prefetcher: DevicePrefetcher,
        group: ProcessGroup,
        *,
        batch_size: int,
        transform: Transform | None = None,
        seed: int = 0,
        workers: int | str = "auto",
        on_error: str = "raise",
    ) -> None:
        """`batch_size` is the global one. `transform`: None for images that need no preparation;
        data in memory is then read by the batch. `on_error`: an unreadable image ends the run
        (raise), or is left out (skip).
        """
        fetcher = BatchFetcher(split, targets, transform, seed, on_error)
        sampler = EvalSampler(len(split), batch_size, group.rank, group.world_size)
        count = num_workers(workers, fetcher, prefetcher.device, group.local_world_size)
        super().__init__(fetcher, sampler, prefetcher, count)


class TrainLoader(Loader):
    """Loader of this rank's share of the training split, shuffled in each epoch."""

    sampler: TrainSampler

    def __init__(
        self,
        split: Split,
        targets: Targets | None,
        prefetcher: DevicePrefetcher,
        group: ProcessGroup,
        *,
        batch_size: int,
        seed: int,
        transform: Transform | None = None,
        on_pixels: PixelStep | None = None,
        on_normalized: NormalizedStep | None = None,
        workers: int | str = "auto",
        on_error: str = "raise",
        accumulate: int = 1,
        copies: int = 1,
        limit: int | None = None,
        balance: float = 0.0,
    ) -> None:
        """`batch_size` is the global one; an optimizer step has `accumulate` such batches.
        `transform` changes each image, `on_pixels` the uint8 images of a batch, `on_normalized`
        normalized ones. `on_error`: an unreadable image ends the run (raise), or is replaced by the
        next one (skip). `copies`: augmented copies of an image in a batch. `limit`: train on so
        many images. `balance`: 1 draws all classes equally often, with replacement; 0 reads the
        images as they are.
        """
        chosen = fixed_choice(len(split), limit)
        num_images = len(split) if chosen is None else len(chosen)
        weights = class_balance(train_labels(split, chosen), balance) if balance else None
        sampler = TrainSampler(
            num_images, batch_size, group.rank, group.world_size, seed, copies, accumulate, weights
        )
        fetcher = BatchFetcher(
            split,
            targets,
            transform,
            seed,
            on_error,
            substitutes=num_images,
            chosen=chosen,
            on_pixels=on_pixels,
            on_normalized=on_normalized,
        )
        count = num_workers(workers, fetcher, prefetcher.device, group.local_world_size)
        super().__init__(fetcher, sampler, prefetcher, count)

    def epoch(self, epoch: int, first_batch: int = 0) -> Iterator[Batch]:
        """Return the batches of an epoch from `first_batch` on, because a resumed run may start
        inside an epoch.
        """
        self.sampler.start_at(epoch, first_batch)
        return self._batches()

    def global_batches(self, first: int, count: int) -> list[int]:
        """List the images (indices in the split) that all ranks read in `count` batches of the
        epoch from `first`.
        """
        return self.fetcher.numbers(self.sampler.global_batches(first, count))

    def labels(self) -> Tensor | None:
        """Return the labels of the images: [N] or [N, classes]. None if the split does not list
        them.
        """
        return train_labels(self.fetcher.split, self.fetcher.chosen)

    def peek(self) -> Tensor:
        """Return the normalized images of this rank's first batch of epoch 0, which `epoch` will
        still yield.
        """
        self.sampler.start_at(0)
        images, labels, _, draws = self.fetcher.read(next(iter(self.sampler)))
        return self._to_device((images, labels, *draws))[0]


def _start_worker(worker: int) -> None:
    kill_on_parent_exit()
    ignore_stop_signals()

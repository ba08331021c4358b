"""Data loaders, which read samples by index and stack them to batches of uint8 images.

The module on_device.py then copies each batch to the device.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle, islice
from multiprocessing.util import get_temp_dir
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.data import DataLoader

from timm_parallel.batch import Batch
from timm_parallel.data.dataset import InMemory, Sample, Split, in_memory, train_labels
from timm_parallel.data.on_device import DevicePrefetcher
from timm_parallel.data.samplers import (
    EvalSampler,
    IndexBatch,
    TrainSampler,
    class_balance,
    fixed_choice,
    seed_draws,
)
from timm_parallel.errors import UnreadableImageError, UnsentBatchError
from timm_parallel.machine import hardware
from timm_parallel.machine.platform import WORKER_START
from timm_parallel.machine.process import kill_on_parent_exit
from timm_parallel.machine.seeds import seeds_for
from timm_parallel.machine.signals import ignore_stop_signals
from timm_parallel.parallel.group import ProcessGroup
from timm_parallel.patches import report_unsent_batches
from timm_parallel.task import Targets

# Function that augments one image [C, H, W] together with its target.
Transform = Callable[[Tensor, Any], Sample]
# Result of reading a batch: its fields, the index batch of the samples that could be read, the
# numbers of unreadable images, and the random numbers for the augmentation of the batch.
Fetched = tuple[dict[str, Any], IndexBatch, list[int], list[Tensor]]
# Seconds to wait for SIGCHLD after a worker process has closed its connections.
SIGNAL_SECONDS = 1.0
# Largest number of consecutive unreadable images to skip. If more are unreadable, the cause is not
# just a few damaged files.
MAX_IN_A_ROW = 100
# Images with pixels from 0 to 255 have a larger value than this. Images in 0..1, and normalized
# ones, do not.
MAX_NORMALIZED = 4
# Largest absolute value of such pixels. Interpolation and noise may exceed 255, but pixels of more
# than 8 bits, and negative ones, are larger.
MAX_PIXEL = 512


def as_fields(images: Tensor, targets: Any) -> dict[str, Any]:
    """Return the fields of a batch. `targets`: the field `target`, or a dictionary of fields."""
    return {"image": images, **(targets if isinstance(targets, dict) else {"target": targets})}


class BatchStep(Protocol):
    """Interface of an augmentation of the images of whole batches, on the device that holds them.

    The process that reads a batch also draws the random numbers for the augmentation of this batch.
    """

    def __call__(self, images: Tensor, *draws: Tensor) -> Tensor: ...

    def draw(self, seeds: list[int], shape: torch.Size) -> list[Tensor]:
        """Draw the random numbers for a batch of images with the shape [B, C, H, W].

        `seeds`: one seed per image. Implementations must not use the global random generators,
        because this method may run in a thread while training uses these generators.
        """


class BatchFetcher:
    """Reads batches of uint8 images and their targets, either in worker processes or in the process
    of the rank.
    """

    def __init__(
        self,
        split: Split,
        targets: Targets | None,
        transform: Transform | None,
        seed: int,
        on_error: str = "raise",
        substitutes: int = 0,
        chosen: Tensor | None = None,
        on_pixels: BatchStep | None = None,
        on_normalized: BatchStep | None = None,
    ) -> None:
        """Configure how batches are read.

        `on_error`: raise ends the run at an unreadable image; skip continues without this image.
        `substitutes`: 0 to omit an unreadable image from its batch, as in an evaluation. In
        training it is the number of images. The next readable image then replaces an unreadable
        one, so that a batch keeps its size on every rank. `chosen`: indices of the images of the
        split to read; None: all. `on_pixels`: augmentation of batches of uint8 images, after
        `transform`. `on_normalized`: augmentation of batches of normalized images.
        """
        # Without a task, the targets of a batch are stacked to one tensor, which is the default.
        targets = targets or Targets()
        self.split, self.targets, self.transform, self.seed = split, targets, transform, seed
        self.on_error, self.substitutes, self.chosen = on_error, substitutes, chosen
        self.on_pixels, self.on_normalized = on_pixels, on_normalized
        # Whether to gather batches in pinned memory. Only a rank that reads the batches itself can
        # do so, because a forked worker process cannot use CUDA.
        self.pin_memory = False
        # Indices from num_images on stand for further augmented copies of the images. Index i reads
        # the image i % num_images.
        self.num_images = substitutes or len(split)
        # A stream has no order of its own, so every process reads it from its start, and keeps the
        # samples that it needs.
        self.is_stream = hasattr(split, "stream")
        self._stream: Iterator[Sample] | None = None
        # Epoch of the stream that is being read, and the place of its next sample.
        self._at = (0, 0)
        self.in_memory = in_memory(split)
        # If the images are in memory and no transform changes each image, a batch is read by one
        # indexing operation.
        self.gathers = self.in_memory is not None and transform is None
        self.is_range_checked = False
        if self.in_memory is not None:
            targets.check_targets(self.in_memory.labels)
            self._check_range(self.in_memory.images)

    def read(self, batch: IndexBatch) -> Fetched:
        fields, read, unreadable = self._gather(batch) if self.gathers else self._read_each(batch)
        draws = self._draw(batch, fields["image"].shape)
        return (
            fields,
            read,
            unreadable,
            [draw.pin_memory() for draw in draws] if self.pin_memory else draws,
        )

    # torch's DataLoader calls __getitems__ with all indices of a batch, instead of __getitem__ with
    # one index.
    __getitems__ = read

    def finish(
        self,
        fields: Mapping[str, Any],
        draws: Sequence[Tensor],
        normalize: Callable[[Tensor], Tensor],
    ) -> dict[str, Any]:
        """Apply the batch augmentations and normalize the images, on the device that holds the
        batch. Return the changed fields.

        `draws`: random numbers for the augmentations. `normalize`: the function that normalizes
        images. It is called after the augmentation of uint8 images, and before that of normalized
        images. Of the fields that the task names as images, both augmentations change `image` only.
        """
        fields = dict(fields)
        if self.on_pixels is not None:
            fields["image"] = self.on_pixels(fields["image"], draws[0])
            draws = draws[1:]
        for name in self.targets.images:
            if name in fields:
                fields[name] = tree_map_only(Tensor, normalize, fields[name])
        if self.on_normalized is not None:
            fields["image"] = self.on_normalized(fields["image"], *draws)
        return fields

    def _draw(self, batch: IndexBatch, shape: torch.Size) -> list[Tensor]:
        draws: list[Tensor] = []
        if self.on_pixels is not None:
            draws += self.on_pixels.draw(seeds_for(self.seed, batch.epoch, batch.indices), shape)
        if self.on_normalized is not None:
            # Pass the additional number 1, so that the augmentation of batches uses other seeds
            # than that of single images.
            draws += self.on_normalized.draw(
                seeds_for(self.seed, batch.epoch, batch.indices, 1), shape
            )
        return draws

    def _gather(self, batch: IndexBatch) -> tuple[dict[str, Any], IndexBatch, list[int]]:
        assert self.in_memory is not None
        # Compute the remainder with torch, because numpy takes 20 us for it with cold caches.
        indices = torch.from_numpy(batch.indices) % self.num_images
        indices = indices if self.chosen is None else self.chosen[indices]
        labels = tree_map_only(Tensor, lambda of: self._rows(of, indices), self.in_memory.labels)
        return as_fields(self._rows(self.in_memory.images, indices), labels), batch, []

    def _read_each(self, batch: IndexBatch) -> tuple[dict[str, Any], IndexBatch, list[int]]:
        unreadable: list[int] = []
        start_epoch = getattr(self.transform, "start_epoch", None)
        if start_epoch is not None:
            start_epoch(batch.epoch)
        # Restore torch's global generator afterwards, because dropout uses it and augmentation
        # would advance it.
        with torch.random.fork_rng(devices=[]):
            samples = [
                self._sample(batch.epoch, index, unreadable) for index in batch.indices.tolist()
            ]
        is_read = np.array([sample is not None for sample in samples], dtype=bool)
        read = batch._replace(indices=batch.indices[is_read])
        if not len(read.indices):
            return {"image": torch.empty(0)}, read, unreadable
        images, targets = zip(*(sample for sample in samples if sample is not None), strict=True)
        labels = self.targets.collate(targets)
        self.targets.check_targets(labels)
        stacked = torch.stack(images)
        self._check_range(stacked)
        return as_fields(stacked, labels), read, unreadable

    def _check_range(self, images: Tensor) -> None:
        """Raise ValueError if the first images are divided by 255 or normalized, or have pixels of
        more than 8 bits.

        Training divides pixels by 255 and normalizes them.
        """
        if self.is_range_checked or images.dtype == torch.uint8:
            return
        smallest, largest = (float(end) for end in images.double().aminmax())
        if 0 < largest <= MAX_NORMALIZED or max(largest, -smallest) > MAX_PIXEL:
            kind = str(images.dtype).removeprefix("torch.")
            raise ValueError(
                f"data.name: the dataset returns images of {kind} from {smallest:.3g} to "
                f"{largest:.3g}; expected uint8, or floats from 0 to 255; scale pixels to this "
                "range, and leave the normalization to data.mean and data.std"
            )
        # Images without light do not show their range.
        self.is_range_checked = largest > 0

    def numbers(self, indices: list[int]) -> list[int]:
        """Convert positions in `chosen`, the list of images that are used, to indices in the whole
        split. Without such a list, both are equal.
        """
        return indices if self.chosen is None else self.chosen[indices].tolist()

    def _rows(self, of: Tensor, indices: Tensor) -> Tensor:
        # Use index_select, because indexing with brackets takes 17 times as long.
        if not self.pin_memory:
            return of.index_select(0, indices)
        # Gather into pinned memory, which torch reuses after the copy to the device. New memory
        # would cause page faults.
        pinned = torch.empty((len(indices), *of.shape[1:]), dtype=of.dtype, pin_memory=True)
        return torch.index_select(of, 0, indices, out=pinned)

    def _sample(self, epoch: int, index: int, unreadable: list[int]) -> Sample | None:
        """Read a sample and transform it, or handle an unreadable image as data.on_error says.

        The next readable image replaces an unreadable one in training. Every rank and worker
        process chooses the same replacement. In an evaluation, an unreadable image is not replaced
        and the result is None.
        """
        for offset in range(MAX_IN_A_ROW):
            number = self.numbers([(index + offset) % self.num_images])[0]
            # Seed before reading, because a split may draw random numbers too.
            seed_draws(self.seed, epoch, index)
            try:
                image, label = self._read_sample(epoch, number)
            except UnreadableImageError as error:
                if self.on_error == "raise":
                    raise UnreadableImageError(
                        f"{error}, or set data.on_error=skip, which skips unreadable images"
                    ) from None
                unreadable.append(number)
                if not self.substitutes:
                    return None
                continue
            if self.transform is not None:
                image, label = self.transform(image, label)
            return image, label
        raise ValueError(
            f"data.on_error=skip: {MAX_IN_A_ROW} consecutive images cannot be read; the last of "
            f"them has the index {number}; check the files"
        )

    def _read_sample(self, epoch: int, number: int) -> Sample:
        """Read a sample by its number, or the sample at this place in a stream."""
        if not self.is_stream:
            return self.split[number]
        # Samples come in ascending order, except at the start of an epoch or after `peek`.
        if self._stream is None or (epoch, number) < self._at or epoch != self._at[0]:
            self._stream, self._at = iter(self.split.stream(epoch)), (epoch, 0)  # type: ignore[attr-defined]
        for sample in self._stream:
            place, self._at = self._at[1], (epoch, self._at[1] + 1)
            if place == number:
                return sample  # type: ignore[no-any-return]
        raise ValueError(
            f"data.name: the stream of epoch {epoch} ended after {self._at[1]} samples, but its "
            f"length is {len(self.split)}; yield as many samples as len() declares"
        )


class Loader:
    """Iterates over the batches of one split that this rank reads. Each batch is copied to the
    device of the rank.
    """

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
        # Indices of the images in the split that this rank could not read.
        self.unreadable: set[int] = set()
        self._loader: DataLoader[Any] | None = None
        on_gpu = prefetcher.device.type == "cuda"
        fetcher.pin_memory = on_gpu and not num_workers
        if num_workers:
            # Create the temporary folder for sockets in this process before the workers start. A
            # worker that is killed could not remove a folder that it has created.
            get_temp_dir()
            self._loader = DataLoader(
                fetcher,  # type: ignore[arg-type]
                batch_sampler=sampler,  # type: ignore[arg-type]
                num_workers=num_workers,
                multiprocessing_context=WORKER_START,
                # Do not collate samples, because the fetcher already returns a complete batch.
                collate_fn=tuple,
                pin_memory=on_gpu,
                persistent_workers=True,
                worker_init_fn=_start_worker,
                # Pass a generator, because torch would otherwise draw a seed from the global
                # generator that dropout uses.
                generator=torch.Generator(),
            )

    def __iter__(self) -> Iterator[Batch]:
        self.unreadable.clear()
        return self._batches()

    def _batches(self) -> Iterator[Batch]:
        batches = self._read()
        # Read ahead in a thread only if batches are gathered from memory. Transforms use the global
        # random generators, so they must not run in a thread.
        if self.fetcher.pin_memory and self.fetcher.gathers:
            batches = one_ahead(batches)
        # Fetch a batch only after the previous step was launched, so that waiting for this batch
        # does not delay the previous step. A GPU copies the batch while it computes that step.
        return map(self._to_device, batches)

    def _read(self) -> Iterator[Fetched]:
        """Read the batches of this rank from the worker processes, or read them in this process."""
        fetched = self._loader if self._loader is not None else map(self.fetcher.read, self.sampler)
        try:
            for batch in fetched:
                _, read, unreadable, _ = batch
                self.unreadable.update(unreadable)
                if len(read.indices):
                    yield batch
        except (ConnectionError, EOFError):
            # A worker process that is killed closes its connections first. Wait until SIGCHLD
            # arrives, because torch then raises an error that names the worker.
            time.sleep(SIGNAL_SECONDS)
            raise

    def _to_device(self, batch: Fetched) -> Batch:
        fields, (epoch, indices), _, draws = batch
        fields, draws = self.prefetcher.send((fields, draws))
        finished = self.fetcher.finish(fields, draws, self.prefetcher.normalize)
        return Batch(finished, indices, seed=self.fetcher.seed, epoch=epoch)

    def peek(self, count: int) -> Batch:
        """Return the first `count` samples of the first batch of this rank, or fewer if some cannot
        be read. A rank without samples gets the first one of the split.

        The batch is not consumed: the loader still reads it.
        """
        first = next(iter(self.sampler), IndexBatch(0, np.zeros(1, np.int64)))
        batch = self.fetcher.read(first._replace(indices=first.indices[:count]))
        fields, read, *_ = batch
        return self._to_device(batch) if len(read.indices) else Batch(fields, read.indices)

    def close(self) -> None:
        """End the worker processes of this loader.

        The workers ignore SIGTERM, so without this call the interpreter would wait for them forever
        when it exits.
        """
        iterator = None if self._loader is None else self._loader._iterator
        if iterator is not None:
            # Shut down the workers now. torch would do so only when nothing refers to the iterator
            # of the loader any more.
            iterator._shutdown_workers()  # type: ignore[attr-defined]


def one_ahead(batches: Iterator[Fetched]) -> Iterator[Fetched]:
    """Yield batches, and read the next batch in a thread while the caller uses the current one.

    This saves time, because copying images from memory into a batch releases Python's global
    interpreter lock. The caller can launch GPU kernels meanwhile.
    """
    with ThreadPoolExecutor(1, "reader") as reader:
        upcoming = reader.submit(next, batches, None)
        while (batch := upcoming.result()) is not None:
            upcoming = reader.submit(next, batches, None)
            yield batch


def num_workers(
    workers: int | str, fetcher: BatchFetcher, device: torch.device, local_world_size: int
) -> int:
    """Return the number of worker processes for the loader of one rank.

    With `auto`, this is the number of cores divided by the number of ranks on this machine. Data in
    memory need no workers. An exception is a run on a GPU that transforms each image separately. It
    uses workers, because its main thread is busy with launching kernels.
    """
    if workers != "auto":
        return int(workers)
    if fetcher.gathers or (isinstance(fetcher.split, InMemory) and device.type != "cuda"):
        return 0
    return max(1, hardware.cores() // local_world_size)


class EvalLoader(Loader):
    """Loader of the images that this rank evaluates. Images come in order, and each of
    them once.
    """

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
        """Build the loader of a split for evaluation.

        `batch_size`: the global batch size. `transform`: preparation of each image. With None,
        images in memory are read by whole batches. `on_error`: raise ends the run at an unreadable
        image; skip leaves the image out.
        """
        fetcher = BatchFetcher(split, targets, transform, seed, on_error)
        super().__init__(
            fetcher,
            EvalSampler(len(split), batch_size, group.rank, group.world_size),
            prefetcher,
            num_workers(workers, fetcher, prefetcher.device, group.local_world_size),
        )


class TrainLoader(Loader):
    """Loader of the training images of this rank, which are shuffled in each epoch."""

    sampler: TrainSampler
    # Number of batches to read once and then replay, to measure the speed that a perfect loader
    # would give; None: read all batches.
    replay: int | None = None
    # These batches, in the memory from which they are copied to the device.
    _replayed: list[Fetched] | None = None

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
        on_pixels: BatchStep | None = None,
        on_normalized: BatchStep | None = None,
        workers: int | str = "auto",
        on_error: str = "raise",
        accumulate: int = 1,
        copies: int = 1,
        limit: int | None = None,
        balance: float = 0.0,
        replay: int | None = None,
    ) -> None:
        """Build the loader of the training split.

        `batch_size`: the global batch size. `accumulate`: batches per optimizer step. `transform`:
        augments one image. `on_pixels`: augments a batch of uint8 images. `on_normalized`: augments
        a batch of normalized images. `on_error`: raise ends the run at an unreadable image; skip
        takes the next image instead. `copies`: number of differently augmented copies of an image
        in a batch. `limit`: number of images to train on; None: all. `balance`: 1 draws all classes
        equally often, with replacement; 0 reads each image once per epoch. `replay`: number of
        batches to read once and then replay; None: read all batches.
        """
        self.replay, self.balance = replay, balance
        is_stream = hasattr(split, "stream")
        for key, value, off in (
            ("data.balance", balance, 0),
            ("data.augment.aug_repeats", copies, 1),
            ("data.limit_train", limit, None),
        ):
            if is_stream and value != off:
                raise ValueError(
                    f"{key}={value}: the dataset is a stream, which is read in its own order; set "
                    f"{key}={'null' if off is None else off}"
                )
        chosen = fixed_choice(len(split), limit)
        num_images = len(split) if chosen is None else len(chosen)
        weights = class_balance(train_labels(split, chosen), balance) if balance else None
        sampler = TrainSampler(
            num_images,
            batch_size,
            group.rank,
            group.world_size,
            seed,
            copies,
            accumulate,
            weights,
            shuffle=not is_stream,
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
        super().__init__(
            fetcher,
            sampler,
            prefetcher,
            num_workers(workers, fetcher, prefetcher.device, group.local_world_size),
        )

    def epoch(self, epoch: int, first_batch: int = 0) -> Iterator[Batch]:
        """Return an iterator over the batches of an epoch, from the batch `first_batch` on.

        A resumed run may continue inside an epoch, so it does not start at batch 0.
        """
        self.sampler.start_at(epoch, first_batch)
        if self.replay is None:
            return self._batches()
        if self._replayed is None:
            self._replayed = list(islice(self._read(), self.replay))
            if self.prefetcher.device.type == "cuda":
                self._replayed = tree_map_only(Tensor, Tensor.pin_memory, self._replayed)
            # End the workers, which would read further batches meanwhile.
            self.close()
        return map(self._to_device, islice(cycle(self._replayed), len(self.sampler)))

    def peek(self, count: int) -> Batch:
        self.sampler.start_at(0)
        return super().peek(count)

    def labels(self) -> Tensor | None:
        """Return the labels of the training images as a tensor [N] or [N, classes].

        Returns None if the split has no list of labels.
        """
        return train_labels(self.fetcher.split, self.fetcher.chosen)


def _start_worker(worker: int) -> None:
    kill_on_parent_exit()
    ignore_stop_signals()
    report_unsent_batches(_unsent)


def _unsent(error: BaseException, batch: Any) -> UnsentBatchError:
    """Build the error for a batch that this worker process cannot send to the process of the
    rank.
    """
    size = sum(part.nbytes for part in tree_leaves(batch) if isinstance(part, Tensor)) / 2**20
    cause = "/dev/shm may be full: enlarge it (docker run --shm-size=8g), use a smaller batch, or"
    try:
        os.close(os.dup(0))
    # torch's errors have no number, so try to open one more file.
    except OSError:
        cause = "the limit of open files is reached: raise it with ulimit -n, or"
    return UnsentBatchError(
        f"a loader worker could not send a batch of {size:.1f} MiB ({error}); {cause} set "
        "data.workers=0"
    )

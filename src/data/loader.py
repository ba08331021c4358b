"""How samples become this rank's batches: read by index, stacked as uint8; src/data/feed.py takes them to the device."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader

from src.data.augment import Transform, seed_draws
from src.data.datasets import InMemory, Split
from src.data.feed import Batch, DeviceFeed
from src.data.images import UnreadableImageError
from src.data.sampling import EvaluationRequests, Reads, Request, TrainRequests
from src.engine.machine import hardware
from src.engine.machine.process import die_with_parent
from src.engine.machine.signals import ignore_stop_signals
from src.schema import DataConfig

Fetched = tuple[Tensor, Tensor, list[int]]  # a batch, and the indices that could not be read for it
MOST_IN_A_ROW = 100  # unreadable images in a row that are skipped; more are not a few damaged files


class Reader:
    """Answers a Request with a batch of uint8 images and labels; runs in loader workers, or in the rank itself."""

    def __init__(
        self,
        split: Split,
        num_classes: int,
        transform: Transform | None,
        seed: int,
        on_error: str = "raise",
        substitutes: int = 0,
    ) -> None:
        """An unreadable image ends the run (`on_error=raise`), or is skipped.

        Skipped: replaced by the next readable one among the first `substitutes` of the split, so that a training batch
        keeps its size on every rank; with 0, left out.
        """
        self.split, self.num_classes, self.transform, self.seed = split, num_classes, transform, seed
        self.on_error, self.substitutes = on_error, substitutes
        self.pin_memory = False  # only the rank itself may: a forked worker has no CUDA
        self.num_images = substitutes or len(split)  # an index above it is a further copy of an image
        if isinstance(split, InMemory):
            self._check_labels(split.labels)

    def __getitems__(self, request: Request) -> tuple[Fetched, NDArray[np.int64]]:
        """What torch's fetcher calls with a whole batch; the indices that were read travel with it, to be counted."""
        return self.read(request), request.indices

    def read(self, request: Request) -> Fetched:
        if self.gathers:
            assert isinstance(self.split, InMemory)
            indices = torch.from_numpy(request.indices) % self.num_images  # numpy's own takes 20 us with cold caches
            return self._rows(self.split.images, indices), self._rows(self.split.labels, indices), []
        unreadable: list[int] = []
        with torch.random.fork_rng(devices=[]):  # a step's own draws, dropout's, are no business of augmentation's
            read = [self._sample(request.epoch, index, unreadable) for index in request.indices.tolist()]
        samples = [sample for sample in read if sample is not None]
        if not samples:
            return torch.empty(0), torch.empty(0, dtype=torch.int64), unreadable
        images, targets = zip(*samples, strict=True)
        labels = torch.tensor(targets)
        self._check_labels(labels)
        return torch.stack(images), labels, unreadable

    @property
    def gathers(self) -> bool:
        """True if a batch is rows of one tensor: nothing to decode, nothing to draw."""
        return isinstance(self.split, InMemory) and self.transform is None

    def _rows(self, of: Tensor, indices: Tensor) -> Tensor:
        """`of[indices]`, which would take 17 times as long, and page-fault fresh memory in for a GPU to copy from.

        torch hands pinned memory out again as soon as the device has copied what was in it.
        """
        if not self.pin_memory:
            return of.index_select(0, indices)
        pinned = torch.empty((len(indices), *of.shape[1:]), dtype=of.dtype, pin_memory=True)
        return torch.index_select(of, 0, indices, out=pinned)

    def _check_labels(self, labels: Tensor) -> None:
        """On a GPU a label outside the head would end the process without a word about labels."""
        if len(labels) and not (int(labels.min()) >= 0 and int(labels.max()) < self.num_classes):
            raise ValueError(
                f"the data has labels from {int(labels.min())} to {int(labels.max())}, but {self.num_classes} classes "
                "(0 is the first): mend the labels or the dataset's class_names"
            )

    def _sample(self, epoch: int, index: int, unreadable: list[int]) -> tuple[Tensor, int] | None:
        found = self._readable(index % self.num_images, unreadable)
        if found is None:
            return None
        image, label = found
        if self.transform is not None:
            seed_draws(self.seed, epoch, index)
            image = self.transform(image)
        return image, label

    def _readable(self, index: int, unreadable: list[int]) -> tuple[Tensor, int] | None:
        """The sample, or its substitute: the same one whatever rank or worker asks."""
        for offset in range(MOST_IN_A_ROW):
            tried = (index + offset) % self.num_images
            try:
                return self.split[tried]
            except UnreadableImageError:
                if self.on_error == "raise":
                    raise
                unreadable.append(tried)
            if not self.substitutes:
                return None
        raise ValueError(f"data.on_error=skip: {MOST_IN_A_ROW} unreadable images in a row, from number {index} on")


class Loader:
    """Batches of one split for this rank, on its device."""

    def __init__(
        self, reader: Reader, requests: TrainRequests | EvaluationRequests, feed: DeviceFeed, num_workers: int
    ) -> None:
        self.reader, self.requests, self.feed, self.num_workers = reader, requests, feed, num_workers
        self.unreadable: set[int] = set()  # indices that this rank could not read
        self._loader: DataLoader[Any] | None = None
        reader.pin_memory = not num_workers and feed.device.type == "cuda"
        if num_workers:
            self._loader = DataLoader(
                reader,  # type: ignore[arg-type]
                batch_sampler=requests,  # type: ignore[arg-type]
                num_workers=num_workers,
                collate_fn=tuple,  # it is a batch already
                pin_memory=feed.device.type == "cuda",
                persistent_workers=True,
                worker_init_fn=_start_worker,
                generator=torch.Generator(),  # else it draws a seed from the generator that a step's dropout draws from
            )

    def __iter__(self) -> Iterator[Batch]:
        self.unreadable.clear()
        return self._batches()

    def _batches(self) -> Iterator[Batch]:
        batches = self._read()
        if self.reader.pin_memory and self.reader.gathers:
            batches = one_ahead(batches)
        return self.feed.stream(batches)

    def _read(self) -> Iterator[Batch]:
        raw = self._loader if self._loader is not None else map(self.reader.__getitems__, self.requests)
        for (images, labels, unreadable), indices in raw:
            self._count(indices)
            self.unreadable.update(unreadable)
            if len(labels):
                yield images, labels

    def _count(self, indices: NDArray[np.int64]) -> None:
        """A batch of these indices has been read."""

    def close(self) -> None:
        """End the worker processes. They ignore SIGTERM, so the interpreter at its own end would wait for them for ever."""
        iterator = None if self._loader is None else self._loader._iterator
        if iterator is not None:
            iterator._shutdown_workers()  # type: ignore[attr-defined]  # what torch calls where nothing else refers to it


class TrainLoader(Loader):
    """The shuffled, sharded epoch."""

    requests: TrainRequests
    reads: Reads | None = None  # of the epoch under way
    reads_of_whole: Reads | None = None  # of the last one that was read from its start to its end

    def epoch(self, epoch: int, first_batch: int = 0) -> Iterator[Batch]:
        """The batches of one epoch, from `first_batch` on (a resumed run starts inside one)."""
        self.requests.start_at(epoch, first_batch)
        self.reads = Reads(self.requests.num_images * self.requests.copies)
        self._batches_to_read = self.requests.batches_per_epoch if first_batch == 0 else -1
        return self._batches()

    def _count(self, indices: NDArray[np.int64]) -> None:
        assert self.reads is not None
        self.reads.add(indices)
        self._batches_to_read -= 1
        if self._batches_to_read == 0:
            self.reads_of_whole = self.reads

    def peek(self) -> Tensor:
        """The normalised images of this rank's first batch, read aside: nothing moves on."""
        self.requests.start_at(0)
        return self.feed(self.reader.read(next(iter(self.requests)))[:2])[0]


def one_ahead(batches: Iterator[Batch]) -> Iterator[Batch]:
    """Prefetch one batch in a thread; gathering rows releases the interpreter's lock meanwhile."""
    with ThreadPoolExecutor(1, "reader") as reader:
        upcoming = reader.submit(next, batches, None)
        while (batch := upcoming.result()) is not None:
            upcoming = reader.submit(next, batches, None)
            yield batch


def num_workers(config: DataConfig, split: Split, local_world_size: int) -> int:
    """`data.workers`, or for auto: none for data in memory, else this rank's share of the cores."""
    if config.workers != "auto":
        return int(config.workers)
    return 0 if isinstance(split, InMemory) else max(1, hardware.cores() // local_world_size)


def _start_worker(worker: int) -> None:
    die_with_parent()
    ignore_stop_signals()

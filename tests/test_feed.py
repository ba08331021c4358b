"""Batches come to the device whole and in order; on a CPU they share memory only with batches that nobody holds any more."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import plain
from torch import Tensor

from src.data.datasets import InMemory
from src.data.feed import BatchMemory, DeviceFeed
from src.data.loader import Reader, TrainLoader
from src.data.sampling import TrainRequests


def test_a_block_that_nobody_holds_is_used_again() -> None:
    blocks = BatchMemory()
    places = set()
    for _ in range(20):
        batch = blocks.empty(8, 3, 16, 16)
        places.add(batch.data_ptr())  # the one before is held until this one is bound
    assert len(places) == len(blocks._blocks) == 2


@pytest.mark.parametrize(
    "keep",
    [
        lambda batch: batch,
        lambda batch: batch[2:3, :, 4:],
        lambda batch: batch.detach(),
        lambda batch: batch.numpy(),
        lambda batch: memoryview(batch.numpy()),
        lambda batch: (torch.nn.Conv2d(3, 2, 3)(batch) ** 2).sum(),  # the graph needs it for the backward pass
        lambda batch: {"nested": [batch.permute(0, 2, 3, 1)]},
        lambda batch: torch.utils.data.TensorDataset(batch),
    ],
    ids=["itself", "view", "detached", "numpy", "buffer", "graph", "nested", "dataset"],
)
def test_what_somebody_holds_is_never_written_to(keep: Callable[[Tensor], Any]) -> None:
    blocks = BatchMemory()
    batch = blocks.empty(4, 3, 8, 8).fill_(1.0)
    place = batch.data_ptr()
    held = keep(batch)
    del batch
    others = [blocks.empty(4, 3, 8, 8) for _ in range(3)]
    assert place not in {other.data_ptr() for other in others}
    del held
    assert blocks.empty(4, 3, 8, 8).data_ptr() == place, "and it comes back"


def test_the_last_smaller_batch_of_an_epoch_fits() -> None:
    feed = DeviceFeed(torch.device("cpu"), plain(3, 8), channels_last=False)
    for size in (4, 4, 3, 4, 1, 4):
        images = torch.randint(0, 256, (size, 3, 8, 8), dtype=torch.uint8)
        assert torch.equal(feed((images, torch.zeros(size)))[0], images.float())


def test_only_large_batches_are_kept_from_malloc() -> None:
    feed = DeviceFeed(torch.device("cpu"), plain(3, 8), channels_last=False)
    for size, blocks in ((32, 0), (256, 1)):
        found, _ = feed((torch.zeros(6, 3, size, size, dtype=torch.uint8), torch.zeros(6)))
        assert found.shape == (6, 3, size, size) and len(feed._blocks._blocks) == blocks


@pytest.mark.parametrize("channels_last", [False, True])
def test_normalising_is_as_ever_in_both_formats(channels_last: bool) -> None:
    feed = DeviceFeed(torch.device("cpu"), plain(3, 8, mean=0.5, std=0.25), channels_last)
    images = torch.randint(0, 256, (4, 3, 8, 8), dtype=torch.uint8)
    found, _ = feed((images, torch.zeros(4)))
    torch.testing.assert_close(found, (images / 255 - 0.5) / 0.25)
    wanted = torch.channels_last if channels_last else torch.contiguous_format
    assert found.is_contiguous(memory_format=wanted)


@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_on_a_gpu_each_batch_is_sent_before_the_one_before_it_is_handed_out(
    monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    feed = DeviceFeed(torch.device("cpu"), plain(3, 8), channels_last=False)
    monkeypatch.setattr(feed, "_copies", object())  # as if there were a stream for copies
    sent: list[int] = []
    monkeypatch.setattr(feed, "_sent", lambda batch: (sent.append(batch), batch)[1])
    monkeypatch.setattr(feed, "_received", lambda batch: batch)
    batches: Any = iter(range(count))
    for number, batch in enumerate(feed.stream(batches)):
        assert batch == number and sent == list(range(min(number + 2, count))), "one ahead, and no more"
    assert len(sent) == count, "and none is lost"


def test_batches_for_a_gpu_are_gathered_into_pinned_memory_by_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same rows in the same order; what fails in the thread fails here."""
    images = torch.randint(0, 256, (40, 3, 4, 4), dtype=torch.uint8)
    split = InMemory(images, torch.arange(40))
    feed = DeviceFeed(torch.device("cpu"), plain(3, 4), channels_last=False)
    loader = TrainLoader(Reader(split, 40, None, 0), TrainRequests(len(split), 8, 0, 1, seed=0), feed, 0)
    wanted = list(loader.epoch(0))
    pinned: list[int] = []
    empty = torch.empty

    def noted(*shape: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        if pin_memory:
            pinned.append(threading.get_ident())
        return empty(*shape, **options)

    loader.reader.pin_memory = True  # as on a GPU
    monkeypatch.setattr(torch, "empty", noted)
    found = list(loader.epoch(0))
    assert len(found) == len(wanted) == 5
    for (images, labels), (other_images, other_labels) in zip(found, wanted, strict=True):
        assert torch.equal(images, other_images) and torch.equal(labels, other_labels)
    assert len(pinned) == 2 * 5 and threading.get_ident() not in pinned
    monkeypatch.setattr(loader.reader, "_rows", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        list(loader.epoch(0))


def test_a_worker_process_never_pins() -> None:
    split = InMemory(torch.zeros(8, 3, 4, 4, dtype=torch.uint8), torch.zeros(8, dtype=torch.int64))
    feed = DeviceFeed(torch.device("cpu"), plain(3, 4), channels_last=False)
    feed.device = torch.device("cuda")  # by name alone
    for workers in (0, 2):
        loader = TrainLoader(Reader(split, 1, None, 0), TrainRequests(len(split), 4, 0, 1, seed=0), feed, workers)
        assert loader.reader.pin_memory == (workers == 0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("pinned", [False, True])
def test_a_copy_to_the_gpu_overlaps_with_work_there(pinned: bool) -> None:
    device = torch.device("cuda", 0)
    feed = DeviceFeed(device, plain(3, 224), channels_last=True)
    images = torch.randint(0, 256, (256, 3, 224, 224), dtype=torch.uint8)
    batches = [(image.pin_memory() if pinned else image, torch.zeros(256)) for image in (images, images + 1) * 4]
    weights = torch.randn(8192, 8192, device=device)
    with torch.profiler.profile() as profile:
        for number, (found, _) in enumerate(feed.stream(iter(batches))):
            for _ in range(4):
                weights = (weights @ weights).clamp_(-1, 1)
            assert torch.equal(found, batches[number][0].to(device).float())  # waits: the next is under way by now
        torch.cuda.synchronize()
    ours = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    copies = [event.time_range for event in ours if "Memcpy HtoD" in event.name]
    kernels = [event.time_range for event in ours if not event.name.startswith("Mem")]
    overlapping = [c for c in copies if any(c.start < p.end and p.start < c.end for p in kernels)]
    assert len(overlapping) >= 6, f"{len(overlapping)} of {len(copies)} copies beside {len(kernels)} kernels"

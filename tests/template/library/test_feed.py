"""Batches reach the device complete and in order."""

from __future__ import annotations

import gc
import multiprocessing
import resource
import sys
import threading
import weakref
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from src.data.transforms import CropAndFlip, OnImage
from src.schema import AugmentConfig
from tests.template.runs import cpu_loader
from timm_parallel.data.dataset import InMemory, Split, split_fingerprint, train_labels
from timm_parallel.data.decode import Files, TarSplit
from timm_parallel.data.loader import BatchFetcher, num_workers
from timm_parallel.data.masks import MaskFiles
from timm_parallel.data.on_device import BatchMemory, DevicePrefetcher, Erasing
from timm_parallel.data.samplers import IndexBatch, TrainSampler
from timm_parallel.errors import UnsentBatchError
from timm_parallel.machine import hardware
from timm_parallel.task import Targets
from timm_parallel.testing.configs import plain, train_loader_of
from timm_parallel.testing.gpu import EACH_ACCELERATOR, ON_CUDA, error_on_waits


def without_files(image: Tensor, target: Any) -> tuple[Tensor, Any]:
    """Let this worker process open no further file."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    return image, target


def full(*_: object) -> None:
    raise RuntimeError("unable to allocate shared memory(shm) for file </torch_7>: (28)")


@pytest.mark.processes
@pytest.mark.parametrize(
    ("limited", "reason"),
    [("files", "ulimit -n"), ("shm", "/dev/shm"), ("queue", "data.workers=0")],
)
def test_batch_that_a_worker_cannot_send_ends_the_epoch_with_the_limit_and_the_fix(
    monkeypatch: pytest.MonkeyPatch, limited: str, reason: str
) -> None:
    """A worker only prints this error, and the loader would wait for the batch forever."""
    if limited == "shm":
        monkeypatch.setattr(torch.UntypedStorage, "_share_fd_cpu_", full)
    split = InMemory(torch.zeros(12, 3, 8, 8, dtype=torch.uint8), torch.arange(12))
    fetcher = BatchFetcher(
        split, Targets(), without_files if limited == "files" else lambda *sample: sample, 0
    )
    if limited == "queue":
        cannot_be_sent: Any = ({"image": lambda: None}, IndexBatch(0, np.array([1])), [], [])
        monkeypatch.setattr(BatchFetcher, "__getitems__", lambda *_: cannot_be_sent)
    loader = cpu_loader(fetcher, TrainSampler(12, 4, 0, 1, seed=0), 1)
    try:
        with pytest.raises(UnsentBatchError, match=reason):
            list(loader.epoch(0))
    finally:
        loader.close()


@pytest.mark.parametrize(
    "keep",
    [
        lambda batch: batch[2:3, :, 4:],
        lambda batch: batch.numpy(),
        # The autograd graph keeps the batch for the backward pass.
        lambda batch: (torch.nn.Conv2d(3, 2, 3)(batch) ** 2).sum(),
    ],
    ids=["view", "numpy", "graph"],
)
def test_cpu_batch_memory_is_reused_only_when_the_batch_is_released(
    keep: Callable[[Tensor], Any],
) -> None:
    blocks = BatchMemory()
    batch = blocks.empty(4, 3, 8, 8).fill_(1.0)
    address = batch.data_ptr()
    held = keep(batch)
    del batch
    others = [blocks.empty(4, 3, 8, 8) for _ in range(3)]
    assert address not in {other.data_ptr() for other in others}
    del held
    assert [len(free) for free in blocks._free.values()] == [1]
    assert blocks.empty(4, 3, 8, 8).data_ptr() == address


@pytest.mark.parametrize("channels_last", [False, True])
def test_prefetcher_normalizes_images_in_contiguous_and_channels_last_format(
    channels_last: bool,
) -> None:
    prefetcher = DevicePrefetcher(
        torch.device("cpu"), **plain(3, mean=0.5, std=0.25), channels_last=channels_last
    )
    images = torch.randint(0, 256, (4, 3, 8, 8), dtype=torch.uint8)
    received = prefetcher.normalize(images)
    torch.testing.assert_close(received, (images / 255 - 0.5) / 0.25)
    expected = torch.channels_last if channels_last else torch.contiguous_format
    assert received.is_contiguous(memory_format=expected)


def test_loader_yields_a_batch_before_loading_the_next_and_does_not_keep_the_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If the loader first waited for the next batch, a training step would start late although its
    images are on the device.
    """
    split = InMemory(torch.zeros(20, 3, 4, 4, dtype=torch.uint8), torch.arange(20))
    loader = cpu_loader(BatchFetcher(split, Targets(), None, 0), TrainSampler(20, 4, 0, 1, seed=0))
    prefetcher = loader.prefetcher
    sent: list[weakref.ref[Tensor]] = []
    to_device = prefetcher.send

    def send(batch: Any) -> Any:
        copies = to_device(tree_map_only(Tensor, Tensor.clone, batch))
        sent.append(weakref.ref(copies[0]["image"]))
        return copies

    monkeypatch.setattr(prefetcher, "send", send)
    for number, _ in enumerate(loader.epoch(0)):
        assert len(sent) == number + 1, "expected that the next batch waits"
        assert sent[-1]() is None, "expected the memory of the bytes to be free"
    assert len(sent) == 5


def test_train_loader_gathers_batches_into_pinned_memory_in_a_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The rows of a batch keep their order. An exception in the thread is raised in the caller."""
    images = torch.randint(0, 256, (40, 3, 4, 4), dtype=torch.uint8)
    split = InMemory(images, torch.arange(40))
    loader = cpu_loader(
        BatchFetcher(split, Targets(), None, 0), TrainSampler(len(split), 8, 0, 1, seed=0)
    )
    expected = list(loader.epoch(0))
    pinned: list[int] = []
    empty = torch.empty

    def recording_empty(*shape: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        if pin_memory:
            pinned.append(threading.get_ident())
        return empty(*shape, **options)

    # Let the loader pin memory, as it does for a GPU.
    loader.fetcher.pin_memory = True
    monkeypatch.setattr(torch, "empty", recording_empty)
    received = list(loader.epoch(0))
    assert len(received) == len(expected) == 5
    for batch, other in zip(received, expected, strict=True):
        assert torch.equal(batch.image, other.image) and torch.equal(batch.target, other.target)
    assert len(pinned) == 2 * 5 and threading.get_ident() not in pinned
    monkeypatch.setattr(loader.fetcher, "_rows", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        list(loader.epoch(0))


def test_workers_auto_is_0_for_data_in_memory_except_in_gpu_runs_that_transform_each_image(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hardware, "cores", lambda: 8)
    split = InMemory(torch.zeros(8, 3, 4, 4, dtype=torch.uint8), torch.arange(8))
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    gathers, each = (
        BatchFetcher(split, Targets(), None, 0),
        BatchFetcher(split, Targets(), OnImage(torch.clone), 0),
    )
    workers = [
        num_workers("auto", fetcher, device, 2)
        for fetcher in (gathers, each)
        for device in (cpu, cuda)
    ]
    assert workers == [0, 0, 0, 4]
    assert num_workers("0", each, cuda, 2) == 0
    # Workers do not pin memory. No GPU is needed, because this test copies no batch.
    prefetcher = DevicePrefetcher(cpu, **plain(3), channels_last=False)
    prefetcher.device = cuda
    for count in (0, 2):
        loader = train_loader_of(gathers, TrainSampler(8, 4, 0, 1, seed=0), prefetcher, count)
        assert loader.fetcher.pin_memory == (count == 0)


def feed(
    device: torch.device, pinned: bool, size: int, matrix: int
) -> tuple[list[Tensor], list[Tensor]]:
    prefetcher = DevicePrefetcher(device, **plain(3), channels_last=True)
    images = torch.randint(0, 256, (size, 3, 224, 224), dtype=torch.uint8)
    sent = [image.pin_memory() if pinned else image for image in (images, images + 1) * 4]
    weights = torch.randn(matrix, matrix, device=device)
    received = []
    for batch in sent:
        copies, _ = prefetcher.send((batch, torch.zeros(size)))
        # Compare the images after the loop, because a comparison would wait for the GPU.
        received.append(prefetcher.normalize(copies))
        for _ in range(4):
            weights = (weights @ weights).clamp_(-1, 1)
    return sent, received


def test_prefetched_batches_arrive_unchanged_and_in_order_on_cpu() -> None:
    for sent, received in zip(*feed(torch.device("cpu"), False, 2, 8), strict=True):
        torch.testing.assert_close(received, sent.float())


@pytest.mark.parametrize(
    "pinned", [pytest.param(pinned, marks=ON_CUDA) for pinned in (False, True)]
)
def test_prefetcher_overlaps_copies_with_gpu_work(pinned: bool) -> None:
    device = torch.device("cuda", 0)
    with torch.profiler.profile() as profile:
        batches = feed(device, pinned, 256, 8192)
        torch.cuda.synchronize()
    for sent, received in zip(*batches, strict=True):
        torch.testing.assert_close(received, sent.to(device).float())
    ours = [
        event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    copies = [event.time_range for event in ours if "Memcpy HtoD" in event.name]
    kernels = [event.time_range for event in ours if not event.name.startswith("Mem")]
    overlapping = [c for c in copies if any(c.start < p.end and p.start < c.end for p in kernels)]
    assert len(overlapping) >= 6, (
        f"{len(overlapping)} of {len(copies)} copies overlap with {len(kernels)} kernels"
    )


class Counted(InMemory):
    read = 0

    def __getitem__(self, index: int) -> tuple[Tensor, Any]:
        self.read += 1
        return super().__getitem__(index)


def test_peek_reads_only_the_first_images_of_the_first_batch_as_training_reads_them() -> None:
    images = torch.randint(0, 256, (60, 3, 8, 8), dtype=torch.uint8)
    split = Counted(images, torch.arange(60))
    fetcher = BatchFetcher(
        split,
        Targets(),
        lambda image, label: (image + torch.randint(0, 9, (1,), dtype=torch.uint8), label),
        seed=3,
        substitutes=60,
        on_normalized=Erasing(0.9, "pixel", 2),
    )
    loader = cpu_loader(fetcher, TrainSampler(60, 20, 0, 1, seed=5))
    peeked = loader.peek(7)
    assert len(peeked) == split.read == 7
    assert torch.equal(peeked.image, next(loader.epoch(0)).image[:7])
    assert len(loader.peek(99)) == 20


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.processes)])
def test_loader_with_replay_reads_its_first_batches_once_and_repeats_them_in_each_epoch(
    workers: int,
) -> None:
    images = torch.randint(0, 256, (60, 3, 8, 8), dtype=torch.uint8)
    fetcher = BatchFetcher(
        InMemory(images, torch.arange(60)), Targets(), lambda *sample: sample, 0, substitutes=60
    )
    loader = cpu_loader(fetcher, TrainSampler(60, 10, 0, 1, seed=5), workers)
    loader.replay = 2
    try:
        first, second, third = ([*loader.epoch(*place)] for place in ((0, 0), (1, 0), (1, 1)))
    finally:
        loader.close()
    loader.replay = None
    if not workers:
        ordinary = [*loader.epoch(0)]
        assert torch.equal(first[1].image, ordinary[1].image)
    labels = [batch.target.tolist() for batch in first]
    assert labels == labels[:2] * 3 and labels[0] != labels[1]
    assert [batch.target.tolist() for batch in second] == labels
    assert [batch.target.tolist() for batch in third] == labels[:5]


@pytest.mark.skipif(sys.platform != "linux", reason="other systems cannot fork safely")
def test_loader_forks_its_workers_when_python_starts_processes_by_a_fork_server() -> None:
    images = torch.zeros(20, 3, 8, 8, dtype=torch.uint8)
    # A lambda cannot be pickled, so only a forked worker can have it.
    fetcher = BatchFetcher(InMemory(images, torch.arange(20)), Targets(), lambda *sample: sample, 0)
    method = multiprocessing.get_start_method()
    # The default of Python 3.14.
    multiprocessing.set_start_method("forkserver", force=True)
    try:
        loader = cpu_loader(fetcher, TrainSampler(20, 10, 0, 1, seed=5), 1)
        try:
            assert len([*loader.epoch(0)]) == 2
        finally:
            loader.close()
    finally:
        multiprocessing.set_start_method(method, force=True)


class Boxes:
    """Split with boxes of any number, crops of two sizes, and a name."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> tuple[Tensor, Any]:
        crops = [torch.full((3, side, side), index, dtype=torch.uint8) for side in (2, 4)]
        fields = {"boxes": torch.full((index, 4), float(index)), "crops": crops, "name": f"{index}"}
        return torch.full((3, 4, 4), index, dtype=torch.uint8), {**fields, "count": index}


class BoxTargets(Targets):
    images = ("image", "crops")


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.processes)])
def test_fields_of_unequal_sizes_reach_the_device_as_lists(workers: int) -> None:
    """Fields that the task names as images are normalized, and others travel as they are."""
    prefetcher = DevicePrefetcher(
        torch.device("cpu"), **plain(3, mean=0.5, std=0.25), channels_last=False
    )
    fetcher = BatchFetcher(Boxes(), BoxTargets(), None, 0)
    loader = train_loader_of(fetcher, TrainSampler(6, 3, 0, 1, seed=0), prefetcher, workers)
    try:
        batches = list(loader.epoch(0))
    finally:
        loader.close()
    indices = [index for batch in batches for index in batch.indices.tolist()]
    assert sorted(indices) == [0, 1, 2, 3, 4, 5]
    for batch in batches:
        assert len(batch) == 3 and torch.equal(batch.count, torch.from_numpy(batch.indices))
        samples = zip(batch.indices.tolist(), batch.boxes, batch.crops, batch.name, strict=True)
        for index, boxes, crops, name in samples:
            assert torch.equal(boxes, torch.full((index, 4), float(index)))
            assert name == f"{index}"
            for crop, side in zip(crops, (2, 4), strict=True):
                expected = torch.full((3, side, side), (index / 255 - 0.5) / 0.25)
                torch.testing.assert_close(crop, expected)
    with pytest.raises(AttributeError, match="no field target; it has image, boxes"):
        _ = batches[0].target


def listed_files(labels: str, count: int) -> Split:
    """Build a split of `count` files that do not exist, with labels of the given kind."""
    if labels == "tar":
        members = [(0, 512 * n, 99, str(n % 7)) for n in range(count)]
        return TarSplit([Path("a.tar")], members, [*"0123456"])
    label_of: Callable[[int], Any] = {
        "class": lambda n: n % 1000,
        "numbers": lambda n: (n / 3, float(n)),
        "mask": lambda n: f"masks/{n:08}.png",
    }[labels]
    files = [(Path(f"/data/train/{n % 1000:04}/{n:08}.jpg"), label_of(n)) for n in range(count)]
    return MaskFiles(Path("/data"), files, 2) if labels == "mask" else Files(files)


def grown_memory(pipe: Connection, split: Any) -> None:
    """Send the MiB that this process copies when it reads the list of a split."""

    def copied() -> int:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith("Private_Dirty"))

    gc.freeze()
    before = copied()
    for index in range(len(split)):
        # No file exists, so look up what a split looks up before it opens a file.
        _ = split.offset[index] if isinstance(split, TarSplit) else split.files.read(index)
    pipe.send((copied() - before) / 1024)


@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("labels", ["class", "numbers", "mask", "tar"])
def test_worker_does_not_copy_the_list_of_files_when_it_reads_it(labels: str) -> None:
    split = listed_files(labels, 60_000)
    ours, theirs = multiprocessing.Pipe()
    worker = multiprocessing.get_context("fork").Process(target=grown_memory, args=(theirs, split))
    worker.start()
    assert ours.poll(60)
    worker.join(10)
    # A list of tuples would grow by 15 MiB or more.
    assert ours.recv() < 4


class OwnSplit:
    """Split of a project, with a plain list."""

    def __init__(self, files: Any) -> None:
        self.files = [*files]

    def __len__(self) -> int:
        return len(self.files)


def test_file_list_and_what_is_read_of_it_equal_those_of_a_list_of_pairs(tmp_path: Path) -> None:
    for label in (3, True, 2.5, (0.0, 1.0), "masks/\udcffä.png", None, [1, 2]):
        pairs = [(tmp_path / f"{n}\udcffü.png", label) for n in range(5)]
        files = Files(pairs).files
        assert [*files] == pairs and len(files) == 5 and bool(files)
        assert files[-1] == pairs[-1] and files[1:4] == pairs[1:4] and files[::2] == pairs[::2]
        assert all(type(read) is type(label) for _, read in files)
        with pytest.raises(IndexError):
            files[5]
    assert not Files([]).files and [*Files([]).files] == []
    for labels in ("class", "numbers", "mask"):
        split: Any = listed_files(labels, 30)
        own: Any = OwnSplit(split.files)
        assert split_fingerprint(split) == split_fingerprint(own)
        assert split_fingerprint(split, split) == split_fingerprint(own, own)
        ours, theirs = train_labels(split, None), train_labels(own, None)
        assert (
            torch.equal(ours, theirs) if ours is not None and theirs is not None else ours is theirs
        )


@pytest.mark.parametrize("accelerator", EACH_ACCELERATOR)
def test_batch_augmentation_on_gpu_does_not_synchronize_and_equals_that_on_cpu(
    accelerator: str,
) -> None:
    device = torch.device(accelerator, 0)
    erasing, crop = Erasing(0.9, max_count=2), CropAndFlip(AugmentConfig(crop_padding=4, hflip=0.5))
    pixels, seeds = torch.randint(0, 256, (16, 3, 64, 64), dtype=torch.uint8), list(range(16))

    steps: list[tuple[Any, Tensor]] = [(crop, pixels), (erasing, pixels.float())]
    for step, images in steps:
        draws, copies = step.draw(seeds, images.shape), images.to(device)
        sent = [draw.to(device) for draw in draws]
        with error_on_waits(accelerator):
            found = step(copies.clone(), *sent)
        assert torch.equal(found.cpu(), step(images.clone(), *draws))

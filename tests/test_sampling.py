"""Who reads which sample: equal sets under every layout, nothing twice in evaluation, draws that depend on the sample."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from conftest import in_ranks, plain
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DistributedSampler

from src.data.augment import train_transform
from src.data.datasets import Synthetic
from src.data.feed import DeviceFeed
from src.data.loader import Reader, TrainLoader
from src.data.sampling import BATCHES_ADDED_AT_ONCE, EvaluationRequests, Reads, Request, TrainRequests
from src.engine.machine.ranks import Ranks
from src.schema import AugmentConfig, DataConfig

pytestmark = pytest.mark.portable

EVERYTHING = AugmentConfig(
    scale=[0.3, 1.0], hflip=0.5, color_jitter=0.4, aa="rand-m9-mstd0.5-inc1", reprob=0.5
)  # torch's, Python's and numpy's generators all draw


@st.composite
def epochs(draw: st.DrawFn) -> tuple[int, int, int, int, int]:
    """(num_samples, global batch, world size, seed, epoch) that train."""
    world = draw(st.integers(1, 9))
    batch = world * draw(st.integers(1, 6))
    return draw(st.integers(batch, 6 * batch)), batch, world, draw(st.integers(0, 2**40)), draw(st.integers(0, 500))


def shards(num_samples: int, batch: int, world: int, seed: int, epoch: int) -> list[TrainRequests]:
    made = [TrainRequests(num_samples, batch, rank, world, seed) for rank in range(world)]
    for requests in made:
        requests.start_at(epoch)
    return made


@given(epochs())
def test_a_shard_is_what_torchs_distributed_sampler_gives(drawn: tuple[int, int, int, int, int]) -> None:
    num_samples, batch, world, seed, epoch = drawn
    full = num_samples // batch * batch  # for full batches
    for rank, shard in enumerate(shards(full, batch, world, seed, epoch)):
        theirs = DistributedSampler(range(full), world, rank, shuffle=True, seed=seed, drop_last=True)  # type: ignore[arg-type]
        theirs.set_epoch(epoch)
        assert shard.shard().tolist() == list(theirs)


@given(epochs())
def test_the_ranks_nth_batches_are_together_the_nth_global_batch(drawn: tuple[int, int, int, int, int]) -> None:
    num_samples, batch, world, seed, epoch = drawn
    alone = [request.indices.tolist() for request in shards(num_samples, batch, 1, seed, epoch)[0]]
    each = [list(requests) for requests in shards(num_samples, batch, world, seed, epoch)]
    assert {len(requests) for requests in each} == {num_samples // batch} == {len(alone)}
    for step, expected in enumerate(alone):
        parts = [requests[step] for requests in each]
        assert {len(part.indices) for part in parts} == {batch // world}
        assert {part.epoch for part in parts} == {epoch}
        assert sorted(index for part in parts for index in part.indices.tolist()) == sorted(expected)


@given(epochs())
def test_the_tail_is_dropped_alike_and_counted(drawn: tuple[int, int, int, int, int]) -> None:
    num_samples, batch, world, seed, epoch = drawn
    made = shards(num_samples, batch, world, seed, epoch)
    seen = [index for requests in made for index in requests.shard().tolist()]
    assert len(seen) == len(set(seen)) == num_samples - made[0].dropped
    assert set(seen) <= set(range(num_samples))
    assert {shard.dropped for shard in made} == {num_samples % batch}
    assert {shard.batches_per_epoch for shard in made} == {num_samples // batch}


def test_other_epochs_and_seeds_have_other_orders() -> None:
    orders = {tuple(shards(50, 10, 1, seed, epoch)[0].shard().tolist()) for seed in (0, 1, 42) for epoch in range(3)}
    assert len(orders) >= 7, "DistributedSampler adds seed and epoch, so neighbours may share an order"
    assert len({tuple(shards(50, 10, 1, 42, epoch)[0].shard().tolist()) for epoch in range(5)}) == 5


def test_a_split_smaller_than_a_batch_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"data.batch_size=16: .*\(10 images\)"):
        TrainRequests(10, 16, 0, 1, 0)


@given(epochs(), st.data())
def test_an_epoch_can_start_in_its_middle(drawn: tuple[int, int, int, int, int], data: Any) -> None:
    num_samples, batch, world, seed, epoch = drawn
    first = data.draw(st.integers(0, num_samples // batch))
    requests = TrainRequests(num_samples, batch, data.draw(st.integers(0, world - 1)), world, seed)
    requests.start_at(epoch)
    whole = [request.indices.tolist() for request in requests]
    requests.start_at(epoch, first)
    rest = [request.indices.tolist() for request in requests]
    assert rest == whole[first:]
    assert len(requests) == len(rest)


@given(st.integers(1, 60), st.integers(1, 9), st.integers(1, 8))
def test_evaluation_reads_every_sample_exactly_once(num_samples: int, world: int, batch: int) -> None:
    each = [EvaluationRequests(num_samples, batch, rank, world) for rank in range(world)]
    read = [[request.indices.tolist() for request in requests] for requests in each]
    assert sorted(index for batches in read for indices in batches for index in indices) == list(range(num_samples))
    assert [len(batches) for batches in read] == [len(requests) for requests in each]
    assert all(0 < len(indices) <= max(1, batch // world) for batches in read for indices in batches)
    sizes = [sum(map(len, batches)) for batches in read]
    assert max(sizes) - min(sizes) <= 1


def test_an_empty_evaluation_split_is_an_error() -> None:
    with pytest.raises(ValueError, match="empty"):
        EvaluationRequests(0, 8, 0, 1)


def images_by_index(world: int, epoch: int, num_workers: int, seed: int = 7) -> dict[int, Tensor]:
    """The augmented images of one epoch, of all ranks of a layout."""
    split = Synthetic(DataConfig(image_size=16), num_samples=12).train
    found: dict[int, Tensor] = {}
    for rank in range(world):
        reader = Reader(split, 10, train_transform(EVERYTHING, 16, resize=False), seed)
        requests = TrainRequests(len(split), 6, rank, world, seed)
        feed = DeviceFeed(torch.device("cpu"), plain(3, 16), channels_last=False)
        loader = TrainLoader(reader, requests, feed, num_workers)
        for request, (images, labels) in zip(_requests(requests, epoch), loader.epoch(epoch), strict=True):
            assert torch.equal(labels, split.labels[request])
            found.update(zip(request, images, strict=True))
    return found


def _requests(requests: TrainRequests, epoch: int) -> list[list[int]]:
    requests.start_at(epoch)
    return [request.indices.tolist() for request in requests]


def _digests(ranks: Ranks, store: Any, *arguments: Any) -> dict[int, bytes]:
    return {index: image.numpy().tobytes() for index, image in images_by_index(*arguments).items()}


@pytest.mark.slow
@pytest.mark.processes
def test_worker_processes_make_the_images_that_the_rank_itself_makes() -> None:
    alone = _digests(Ranks(), None, 1, 3, 0)
    assert len(alone) == 12
    for num_workers in (1, 2):
        assert in_ranks(_digests, 1, 1, 3, num_workers) == [alone]


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_make_the_images_that_one_process_makes(world: int) -> None:
    assert _digests(Ranks(), None, world, 3, 0) == _digests(Ranks(), None, 1, 3, 0)


def test_another_epoch_or_seed_makes_other_images() -> None:
    first = _digests(Ranks(), None, 1, 0, 0)
    assert _digests(Ranks(), None, 1, 0, 0) == first
    for other in (_digests(Ranks(), None, 1, 1, 0), _digests(Ranks(), None, 1, 0, 0, 8)):
        assert sum(other[index] == image for index, image in first.items()) <= 1


def test_a_drawn_image_does_not_depend_on_what_was_drawn_before() -> None:
    split = Synthetic(DataConfig(image_size=16), num_samples=12).train
    reader = Reader(split, 10, train_transform(EVERYTHING, 16, resize=False), 7)
    first = reader.read(Request(0, np.array([5])))[0][0]
    reader.read(Request(0, np.arange(4)))
    torch.rand(100)
    assert torch.equal(reader.read(Request(0, np.array([4, 5])))[0][1], first)


def test_what_a_step_draws_does_not_depend_on_who_reads_its_batch() -> None:
    """Dropout draws from the process's generator, in which augmentation begins anew for every image."""
    split = Synthetic(DataConfig(image_size=16), num_samples=12).train
    before = torch.get_rng_state()
    Reader(split, 10, train_transform(EVERYTHING, 16, resize=False), 7).read(Request(0, np.arange(4)))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    "batches", [1, BATCHES_ADDED_AT_ONCE - 1, BATCHES_ADDED_AT_ONCE, 2 * BATCHES_ADDED_AT_ONCE + 5]
)
def test_every_read_is_counted(batches: int) -> None:
    """One that is read twice, in one batch or in two, too."""
    reads = Reads(3 * batches + 1)
    for batch in range(batches):
        reads.add(np.array([3 * batch, 3 * batch + 1, 3 * batch + 1]))
    reads.add(np.array([0]))
    expected = np.array([*([1, 2, 0] * batches), 0])
    expected[0] += 1
    assert np.array_equal(reads.counts(), expected) and np.array_equal(reads.counts(), expected)

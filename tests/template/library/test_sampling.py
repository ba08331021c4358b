"""Samplers yield each sample once on any number of ranks, with the same augmentation."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from src.data.datasets import Synthetic
from src.data.transforms import OnImage, train_transform
from src.schema import AugmentConfig, DataConfig
from tests.template.runs import cpu_loader, resolved, task_of
from timm_parallel.batch import Batch
from timm_parallel.data.build import load_dataset
from timm_parallel.data.dataset import ImageDataset, InMemory
from timm_parallel.data.loader import BatchFetcher, Loader, TrainLoader
from timm_parallel.data.on_device import DevicePrefetcher, Erasing
from timm_parallel.data.samplers import EvalSampler, IndexBatch, TrainSampler, class_balance
from timm_parallel.machine.ranks import Ranks
from timm_parallel.parallel.group import ProcessGroup
from timm_parallel.run.replica_checks import check_same_data
from timm_parallel.task import Targets
from timm_parallel.testing.configs import plain
from timm_parallel.testing.ranks import in_ranks

pytestmark = pytest.mark.portable

# This augmentation draws from the random generators of torch, Python and numpy.
EVERYTHING = AugmentConfig(
    scale=[0.3, 1.0], hflip=0.5, color_jitter=0.4, aa="rand-m9-mstd0.5-inc1", reprob=0.5
)


@st.composite
def epochs(draw: st.DrawFn) -> tuple[int, int, int, int, int]:
    """Draw a valid combination of number of samples, global batch, world size, seed and epoch."""
    world = draw(st.integers(1, 9))
    batch = world * draw(st.integers(1, 6))
    return (
        draw(st.integers(batch, 6 * batch)),
        batch,
        world,
        draw(st.integers(0, 2**40)),
        draw(st.integers(0, 500)),
    )


def samplers(num_samples: int, batch: int, world: int, seed: int, epoch: int) -> list[TrainSampler]:
    made = [TrainSampler(num_samples, batch, rank, world, seed) for rank in range(world)]
    for sampler in made:
        sampler.start_at(epoch)
    return made


@given(epochs())
def test_train_sampler_batches_of_all_ranks_together_form_the_global_batch_of_one_rank(
    drawn: tuple[int, int, int, int, int],
) -> None:
    num_samples, batch, world, seed, epoch = drawn
    alone = [
        index_batch.indices.tolist()
        for index_batch in samplers(num_samples, batch, 1, seed, epoch)[0]
    ]
    made = samplers(num_samples, batch, world, seed, epoch)
    each = [list(sampler) for sampler in made]
    assert {shard.dropped for shard in made} == {num_samples % batch}
    assert {shard.batches_per_epoch for shard in made} == {num_samples // batch}
    seen = [index for indices in alone for index in indices]
    assert len(seen) == len(set(seen)) and set(seen) <= set(range(num_samples))
    assert {len(batches) for batches in each} == {num_samples // batch} == {len(alone)}
    for step, expected in enumerate(alone):
        parts = [batches[step] for batches in each]
        assert {len(part.indices) for part in parts} == {batch // world}
        assert {part.epoch for part in parts} == {epoch}
        assert sorted(index for part in parts for index in part.indices.tolist()) == sorted(
            expected
        )


def test_train_sampler_order_differs_between_epochs_and_seeds() -> None:
    """Repeats in a sweep use seeds s, s + 1 and so on. Epoch 1 with seed s must not have the
    order of epoch 0 with seed s + 1.
    """
    for copies in (1, 3):
        orders = set()
        for seed in (0, 1, 2, 42):
            sampler = TrainSampler(50, 10, 0, 1, seed, copies)
            for epoch in range(5):
                sampler.start_at(epoch)
                orders.add(tuple(sampler.shard().tolist()))
        assert len(orders) == 20


@given(epochs(), st.data())
def test_train_sampler_yields_the_remaining_batches_when_started_within_an_epoch(
    drawn: tuple[int, int, int, int, int], data: Any
) -> None:
    num_samples, batch, world, seed, epoch = drawn
    first = data.draw(st.integers(0, num_samples // batch))
    sampler = TrainSampler(num_samples, batch, data.draw(st.integers(0, world - 1)), world, seed)
    sampler.start_at(epoch)
    whole = [index_batch.indices.tolist() for index_batch in sampler]
    sampler.start_at(epoch, first)
    rest = [index_batch.indices.tolist() for index_batch in sampler]
    assert rest == whole[first:]
    assert len(sampler) == len(rest)


@given(st.integers(1, 60), st.integers(1, 9), st.integers(1, 8))
def test_eval_samplers_of_all_ranks_together_read_every_sample_once(
    num_samples: int, world: int, batch: int
) -> None:
    each = [EvalSampler(num_samples, batch, rank, world) for rank in range(world)]
    read = [[index_batch.indices.tolist() for index_batch in sampler] for sampler in each]
    assert sorted(index for batches in read for indices in batches for index in indices) == list(
        range(num_samples)
    )
    assert [len(batches) for batches in read] == [len(sampler) for sampler in each]
    assert all(
        0 < len(indices) <= max(1, batch // world) for batches in read for indices in batches
    )
    sizes = [sum(map(len, batches)) for batches in read]
    assert max(sizes) - min(sizes) <= 1
    with pytest.raises(ValueError, match="empty"):
        EvalSampler(0, batch, 0, world)


def images_by_index(
    world: int, epoch: int, seed: int, transform: Any, erasing: Erasing, copies: int = 1
) -> dict[int, Tensor]:
    split = Synthetic(DataConfig(image_size=16), num_samples=12).train
    assert isinstance(split, InMemory)
    images_of: dict[int, Tensor] = {}
    for rank in range(world):
        fetcher = BatchFetcher(
            split, Targets(), transform, seed, substitutes=12, on_normalized=erasing
        )
        sampler = TrainSampler(len(split), 6, rank, world, seed, copies)
        sampler.start_at(epoch)
        read = [index_batch.indices.tolist() for index_batch in sampler]
        for indices, batch in zip(read, cpu_loader(fetcher, sampler).epoch(epoch), strict=True):
            assert batch.indices.tolist() == indices
            assert torch.equal(batch.target, split.labels[[index % 12 for index in indices]])
            images_of.update(zip(indices, batch.image, strict=True))
    return images_of


def augmented(world: int, epoch: int, seed: int) -> dict[int, Tensor]:
    transform = OnImage.of(train_transform(EVERYTHING, (16, 16), resize=False))
    erasing = Erasing(EVERYTHING.reprob, EVERYTHING.remode, EVERYTHING.recount)
    return images_by_index(world, epoch, seed, transform, erasing)


def test_augmented_images_depend_on_seed_epoch_and_index_only() -> None:
    """Augmentation seeds torch's global random generator for every image. Dropout uses the same
    generator, so its state must be restored.
    """
    before = torch.get_rng_state()
    alone = augmented(1, 3, 7)
    assert torch.equal(torch.get_rng_state(), before)
    assert len(alone) == 12
    for world in (1, 2, 3):
        again = augmented(world, 3, 7)
        assert all(torch.equal(again[index], image) for index, image in alone.items())
    for other in (augmented(1, 4, 7), augmented(1, 3, 8)):
        assert sum(torch.equal(other[index], image) for index, image in alone.items()) <= 1


def test_random_erasing_differs_between_copies_of_an_image_but_not_with_the_rank_count() -> None:
    """With aug_repeats, each copy of an image must get different boxes. There is no transform
    here, so the images of a batch are rows of one tensor.
    """
    first, spread, later = (
        images_by_index(world, epoch, 7, None, Erasing(1.0), copies=2)
        for world, epoch in ((1, 0), (3, 0), (1, 1))
    )
    assert len(first) == 12 and first.keys() == spread.keys()
    assert all(torch.equal(spread[index], image) for index, image in first.items())
    assert all(not torch.equal(first[index], first[index + 12]) for index in first if index < 12)
    assert any(
        index in later and not torch.equal(later[index], image) for index, image in first.items()
    )


class Noisy:
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        draws = [torch.rand(()).item(), random.random(), np.random.random()]
        pixels = torch.tensor([255 * draw for draw in draws])
        return pixels.to(torch.uint8)[:, None, None].expand(3, 4, 4), index


def noisy_draws(ranks: Ranks, store: Any, world: int, epoch: int, seed: int, workers: int) -> Any:
    """Read an epoch of Noisy on `world` ranks. Return a dictionary from index to the draws inside
    of the split and to two draws of the batch.
    """
    drawn: dict[int, list[float]] = {}
    for rank in range(world):
        fetcher, sampler = (
            BatchFetcher(Noisy(), Targets(), None, seed),
            TrainSampler(12, 6, rank, world, 7),
        )
        for batch in cpu_loader(fetcher, sampler, workers).epoch(epoch):
            drawn |= draws_of(batch)
    return drawn


def draws_of(batch: Batch) -> dict[int, list[float]]:
    parts = (batch.image[:, :, 0, 0], batch.normal(2, 3).flatten(1), batch.integers(10**9)[:, None])
    return dict(zip(batch.target.tolist(), torch.cat(parts, 1).tolist(), strict=True))


@pytest.mark.slow
def test_draws_inside_a_split_and_of_a_batch_depend_on_seed_epoch_and_sample_only() -> None:
    """An own dataset may draw random numbers in __getitem__, for example to choose a frame."""
    alone = noisy_draws(Ranks(), None, 1, 0, 7, 0)
    assert len(alone) == len({tuple(drawn) for drawn in alone.values()}) == 12
    torch.rand(5)
    assert noisy_draws(Ranks(), None, 3, 0, 7, 0) == alone
    assert in_ranks(noisy_draws, 1, 1, 0, 7, 2) == [alone], "expected equal draws in workers"
    for epoch, seed in ((1, 7), (0, 8)):
        other = noisy_draws(Ranks(), None, 1, epoch, seed, 0)
        for index, drawn in alone.items():
            assert other[index][:3] != drawn[:3] and other[index][3:] != drawn[3:]


def test_an_evaluation_draws_the_same_numbers_each_time() -> None:
    prefetcher = DevicePrefetcher(torch.device("cpu"), **plain(3), channels_last=False)
    fetcher, sampler = BatchFetcher(Noisy(), Targets(), None, 7), EvalSampler(12, 4, 0, 1)
    loader = Loader(fetcher, sampler, prefetcher, 0)
    first, second = ([draws_of(batch) for batch in loader] for _ in range(2))
    assert first == second and len(first) == 3


class Frames:
    """Stream of numbered images. Each epoch has images of its own."""

    def __init__(self, count: int = 26, yielded: int = 26) -> None:
        self.count, self.yielded = count, yielded

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        raise AssertionError("a stream has no index")

    def stream(self, epoch: int) -> Iterator[tuple[Tensor, int]]:
        for place in range(self.yielded):
            yield torch.full((3, 2, 2), epoch, dtype=torch.uint8), 100 * epoch + place


def stream_loader(split: Any, rank: int = 0, world: int = 1, **options: Any) -> TrainLoader:
    prefetcher = DevicePrefetcher(torch.device("cpu"), **plain(3), channels_last=False)
    group = ProcessGroup(Ranks(rank, world, rank, world))
    return TrainLoader(
        split, Targets(), prefetcher, group, batch_size=6, seed=7, workers=0, **options
    )


@pytest.mark.parametrize(("world", "epoch", "first"), [(1, 1, 0), (3, 0, 0), (3, 1, 2)])
def test_ranks_read_each_sample_of_a_stream_once_and_in_order(
    world: int, epoch: int, first: int
) -> None:
    """A run that continues within an epoch skips the samples before."""
    loaders = [stream_loader(Frames(), rank, world) for rank in range(world)]
    steps = [
        sorted(target for batch in of_ranks for target in batch.target.tolist())
        for of_ranks in zip(*(loader.epoch(epoch, first) for loader in loaders), strict=True)
    ]
    start = 100 * epoch
    assert steps == [list(range(start + at, start + at + 6)) for at in range(6 * first, 24, 6)]


def test_stream_starts_again_in_each_epoch_and_has_no_early_end_or_choice_of_samples() -> None:
    loader = stream_loader(Frames())
    assert loader.peek(2).target.tolist() == [0, 1]
    for epoch in (0, 1, 1):
        targets = [target for batch in loader.epoch(epoch) for target in batch.target.tolist()]
        assert targets == list(range(100 * epoch, 100 * epoch + 24))
    with pytest.raises(ValueError, match=r"^data\.name: .* 20 .* 26"):
        list(stream_loader(Frames(yielded=20)).epoch(0))
    options: dict[str, Any] = {"balance": 0.5, "copies": 2, "limit": 12}
    for option, key in zip(options, ("data.balance", "aug_repeats", "limit_train"), strict=True):
        with pytest.raises(ValueError, match=f"{key}=.*stream"):
            stream_loader(Frames(), **{option: options[option]})


class Stream(Noisy):
    """Split that ignores its index, like a class that wraps a generator."""

    def __init__(self) -> None:
        self.position = 0

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.position += 1
        return torch.full((3, 4, 4), self.position, dtype=torch.uint8), 0


class Unstable(Frames):
    """Stream that differs in each reading."""

    epochs = 0

    def stream(self, epoch: int) -> Iterator[tuple[Tensor, int]]:
        self.epochs += 1
        return super().stream(self.epochs)


@pytest.mark.parametrize(
    ("name", "ordinary", "refused"),
    [("train", Noisy, Stream), ("val", Noisy, Stream), ("train", Frames, Unstable)],
)
def test_data_that_differ_in_a_second_reading_are_refused(
    name: str, ordinary: Any, refused: Any
) -> None:
    dataset = ImageDataset()
    dataset.target_names = ["a"]
    dataset.train, dataset.val = ordinary(), Noisy()
    check_same_data(dataset, ProcessGroup(Ranks()))
    setattr(dataset, name, refused())
    with pytest.raises(ValueError, match=rf"data: .*{name}"):
        check_same_data(dataset, ProcessGroup(Ranks()))


@pytest.mark.parametrize("label", [2, -1, 0.5])
def test_batch_fetcher_refuses_a_label_outside_the_number_of_classes(label: float) -> None:
    class Split:
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> tuple[torch.Tensor, float]:
            return torch.zeros(3, 4, 4, dtype=torch.uint8), label if index == 1 else 0

    with pytest.raises(ValueError, match=rf"labels from .*{label}.*, expected .*0 to 1"):
        BatchFetcher(Split(), task_of(2), None, 0).read(IndexBatch(0, np.arange(3)))


@given(
    num_images=st.integers(6, 60),
    copies=st.integers(1, 4),
    world_size=st.integers(1, 3),
    batch=st.integers(1, 2),
    seed=st.integers(0, 99),
)
@settings(max_examples=60, deadline=None)
def test_aug_repeats_puts_all_copies_of_an_image_into_one_global_batch(
    num_images: int, copies: int, world_size: int, batch: int, seed: int
) -> None:
    """With aug_repeats, an epoch has the same number of samples, from fewer images. Each copy of
    an image has a separate index.
    """
    global_batch = batch * world_size * copies
    if num_images < global_batch:
        return
    shards = [
        TrainSampler(num_images, global_batch, rank, world_size, seed, copies)
        for rank in range(world_size)
    ]
    own = [shard.shard().split(global_batch // world_size) for shard in shards]
    assert all(len(batches) == num_images // global_batch for batches in own)
    for step in zip(*own, strict=True):
        indices = torch.cat(step).tolist()
        assert len(set(indices)) == global_batch
        images = [index % num_images for index in indices]
        assert all(images.count(image) == copies for image in images)
        # The copies of an image must be spread over as many ranks as possible, as in timm's
        # RepeatAugSampler.
        ranks = [{index % num_images for index in part.tolist()} for part in step]
        assert all(
            sum(image in rank for rank in ranks) == min(copies, world_size) for image in images
        )
    assert sorted(shards[0].global_batches(0, 1)) == sorted(
        index % num_images for b in own for index in b[0].tolist()
    )


LONG_TAIL = torch.tensor([0] * 900 + [1] * 90 + [2] * 10)


def sampler(rank: int, world_size: int, balance: float) -> TrainSampler:
    weights = class_balance(LONG_TAIL, balance)
    return TrainSampler(len(LONG_TAIL), 100, rank, world_size, seed=3, weights=weights)


@pytest.mark.parametrize(
    ("balance", "shares"),
    [(0.5, (0.7063, 0.2234, 0.0745)), (1.0, (1 / 3,) * 3)],
)
def test_data_balance_draws_each_class_in_proportion_to_a_power_of_its_size(
    balance: float, shares: tuple[float, ...]
) -> None:
    drawn: Counter[int] = Counter()
    one = sampler(0, 1, balance)
    for epoch in range(20):
        one.start_at(epoch)
        drawn.update(LONG_TAIL[one.shard() % 1000].tolist())
    for label, share in enumerate(shares):
        # Allow five standard deviations of a binomial proportion, so that chance practically never
        # fails the test.
        assert abs(drawn[label] / 20_000 - share) < 5 * (share * (1 - share) / 20_000) ** 0.5


def test_balanced_sampler_draws_the_same_images_in_total_on_1_2_and_4_ranks() -> None:
    whole = sampler(0, 1, 1.0)
    whole.start_at(5)
    drawn = whole.shard().tolist()
    assert len(set(drawn)) == len(drawn) == 1000, (
        "expected distinct numbers, because two draws of an image need different augmentations"
    )
    for world_size in (2, 4):
        shards = []
        for rank in range(world_size):
            own = sampler(rank, world_size, 1.0)
            own.start_at(5)
            shards.append(own.shard())
        assert torch.stack(shards, 1).flatten().tolist() == drawn
    # Each image must have exactly one class.
    with pytest.raises(ValueError, match=r"data\.balance=1"):
        class_balance(None, 1)


@pytest.mark.parametrize(
    ("values", "dtype", "is_refused"),
    [
        ((0, 1), torch.float32, True),
        ((0, 255), torch.float32, False),
        ((-300, 1200), torch.int16, True),
        ((0, 255), torch.int64, False),
        ((0, 1), torch.uint8, False),
    ],
)
@pytest.mark.parametrize("in_memory", [True, False])
def test_images_whose_pixels_are_not_from_0_to_255_are_refused(
    values: tuple[float, float], dtype: torch.dtype, is_refused: bool, in_memory: bool
) -> None:
    images = torch.linspace(*values, 2 * 3 * 4 * 4).view(2, 3, 4, 4).to(dtype)
    rows = InMemory(images, torch.tensor([0, 1]))
    split: Any = rows if in_memory else [rows[0], rows[1]]
    refusal = pytest.raises(ValueError, match=r"^data\.name: .*255")
    with refusal if is_refused else nullcontext():
        fields, *_ = BatchFetcher(split, Targets(), None, 0).read(IndexBatch(0, np.arange(2)))
        assert torch.equal(fields["image"], images)


def test_draws_in_the_constructor_of_a_dataset_depend_on_the_seed_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A dataset may divide its images at random. A resumed run and evaluate.py need the same
    division.
    """

    def draw(dataset: Any, config: DataConfig, **kwargs: Any) -> None:
        dataset.drawn = [float(torch.rand(1)), random.random(), float(np.random.rand())]
        dataset.target_names = ["a"]

    monkeypatch.setattr(Synthetic, "__init__", draw)
    of_seed = {}
    for seed in (3, 4):
        config = resolved("data=synthetic", f"seed={seed}")
        of_seed[seed] = [load_dataset(config).drawn for _ in range(2)]  # type: ignore[attr-defined]
        assert of_seed[seed][0] == of_seed[seed][1]
    assert all(one != other for one, other in zip(of_seed[3][0], of_seed[4][0], strict=True))


class Darker(InMemory):
    """Images in memory that change when they are read."""

    def __getitem__(self, index: int) -> tuple[Tensor, Any]:
        image, label = super().__getitem__(index)
        return image // 2, label


def test_images_in_memory_are_read_by_the_own_method_of_their_class() -> None:
    images = torch.arange(48, dtype=torch.uint8).view(2, 3, 2, 4)
    fetcher = BatchFetcher(Darker(images, torch.tensor([1, 0])), Targets(), None, 0)
    fields, *_ = fetcher.read(IndexBatch(0, np.array([1, 0])))
    assert torch.equal(fields["image"], images.flip(0) // 2)
    assert fields["target"].tolist() == [0, 1]

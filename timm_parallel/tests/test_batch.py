"""Batches: random draws are functions of the sample, and fields of any kind form a batch. Random
erasing, mixup and cutmix of a batch give the same result as the code of timm.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from timm.data import Mixup
from timm.data.random_erasing import RandomErasing
from torch import Tensor

from timm_parallel.batch import Batch, stretched
from timm_parallel.data.on_device import Erasing, Mixing
from timm_parallel.machine.seeds import seed_for, seeds_for
from timm_parallel.task import Targets


def batch_of(indices: list[int], **place: int) -> Batch:
    return Batch({"image": torch.zeros(len(indices), 1)}, np.array(indices), **place)


@pytest.mark.parametrize("world_size", [2, 3])
def test_draws_of_a_sample_do_not_depend_on_the_number_of_ranks(world_size: int) -> None:
    indices = [4, 900, 17, 3, 2**40, 8]
    whole = batch_of(indices, seed=5, epoch=2)
    numbers, places, again = whole.normal(2, 3), whole.integers(1000), whole.normal(2, 3)
    for rank in range(world_size):
        own = slice(rank, None, world_size)
        part = batch_of(indices[own], seed=5, epoch=2)
        assert torch.equal(part.normal(2, 3), numbers[own])
        assert torch.equal(part.integers(1000), places[own])
        assert torch.equal(part.normal(2, 3), again[own])


def test_draws_differ_by_seed_epoch_sample_and_call() -> None:
    drawn = []
    for place in ({"seed": 1}, {"seed": 2}, {"seed": 1, "epoch": 1}):
        batch = batch_of([0, 1], **place)
        drawn += [*batch.normal(), *batch.normal()]
    assert len({number.item() for number in drawn}) == len(drawn)


def test_draws_of_a_replaced_batch_continue_those_of_the_batch() -> None:
    first, second = batch_of([3, 4], seed=1), batch_of([3, 4], seed=1)
    first.normal(2)
    changed = first.replace(image=torch.ones(2, 1))
    second.normal(2)
    assert torch.equal(changed.normal(2), second.normal(2))
    assert torch.equal(changed.image, torch.ones(2, 1)) and list(changed.indices) == [3, 4]


def test_draws_have_the_distributions_that_their_names_say() -> None:
    batch = batch_of(list(range(2000)))
    numbers = batch.normal(50).double()
    # Five standard deviations of the mean, and of the variance, of 100,000 normal numbers.
    assert abs(numbers.mean().item()) < 5 * 0.0032
    assert abs(numbers.var().item() - 1) < 5 * 0.0045
    assert (numbers.abs() < 1).double().mean().item() == pytest.approx(0.6827, abs=0.01)
    assert torch.corrcoef(numbers.T).fill_diagonal_(0).abs().max().item() < 0.12
    counts = batch.integers(10).bincount(minlength=10)
    assert len(counts) == 10
    # Five standard deviations of a binomial count.
    assert (counts - 200).abs().max().item() < 5 * (200 * 0.9) ** 0.5


def test_batch_names_its_fields_when_one_is_missing() -> None:
    batch = Batch({"image": torch.zeros(2, 1), "boxes": [torch.zeros(1, 4), torch.zeros(3, 4)]})
    assert [len(boxes) for boxes in batch.boxes] == [1, 3]
    with pytest.raises(AttributeError, match=r"masks.*image, boxes"):
        batch.masks  # noqa: B018


def test_stretched_batch_repeats_the_first_sample_without_its_values() -> None:
    fields = {"image": torch.zeros(2, 3, 4, 4), "boxes": [torch.zeros(5, 4), torch.zeros(1, 4)]}
    batch = stretched(Batch(fields), 7)
    assert len(batch) == 7 and batch.image.shape == (7, 3, 4, 4)
    assert [boxes.shape for boxes in batch.boxes] == [(5, 4)] * 7
    assert {batch.image.device.type, batch.boxes[0].device.type} == {"meta"}


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        ([1, 2], torch.tensor([1, 2])),
        ([0.5, 2.0], torch.tensor([0.5, 2.0])),
        ([np.int64(3), np.int64(4)], torch.tensor([3, 4])),
        ([(1.0, 2.0), (3.0, 4.0)], torch.tensor([[1.0, 2.0], [3.0, 4.0]])),
        ([torch.tensor([1, 2]), torch.tensor([3, 4])], torch.tensor([[1, 2], [3, 4]])),
        (["a", "b"], ["a", "b"]),
        ([(1,), (1, 2)], [(1,), (1, 2)]),
    ],
)
def test_targets_of_equal_shape_become_a_tensor_and_others_a_list(
    targets: list[Any], expected: Any
) -> None:
    collated = Targets().collate(targets)
    if isinstance(expected, Tensor):
        assert collated.dtype == expected.dtype and torch.equal(collated, expected)
    else:
        assert collated == expected


@given(
    shape=st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(2, 20), st.integers(2, 20)),
    mode=st.sampled_from(("const", "rand", "pixel")),
    chance=st.sampled_from((0.3, 1.0)),
    count=st.integers(1, 4),
    memory_format=st.sampled_from((torch.contiguous_format, torch.channels_last)),
    base=st.integers(0, 2**40),
)
def test_random_erasing_of_a_batch_equals_timm_on_each_image_bit_for_bit(
    shape: tuple[int, ...],
    mode: str,
    chance: float,
    count: int,
    memory_format: torch.memory_format,
    base: int,
) -> None:
    """The erased boxes of one image may overlap. A later box must cover an earlier one."""
    step = Erasing(chance, mode, count)
    theirs = RandomErasing(chance, mode=mode, max_count=count, device="cpu")
    images = torch.full(shape, 5.0).contiguous(memory_format=memory_format)
    seeds = seeds_for(0, 0, np.arange(base, base + shape[0]), 1)
    assert seeds == [seed_for(0, 0, index, 1) for index in range(base, base + shape[0])]
    before = random.getstate(), torch.get_rng_state()
    draws = step.draw(seeds, images.shape)
    assert len(draws[0].unique()) == len(draws[0]), "a GPU may write twice to a pixel in any order"
    found = step(images.clone(), *draws)
    assert random.getstate() == before[0] and torch.equal(torch.get_rng_state(), before[1])
    for seed, image, erased in zip(seeds, images, found, strict=True):
        random.seed(seed)
        torch.manual_seed(seed)
        assert torch.equal(erased, theirs(image.clone()))


MIXUPS: dict[str, dict[str, Any]] = {
    "mixup": {"mixup_alpha": 0.8},
    "cutmix_minmax": {"cutmix_minmax": [0.2, 0.8]},
    "mixup_and_cutmix_minmax": {"mixup_alpha": 0.3, "cutmix_minmax": [0.3, 0.7]},
    "prob": {"mixup_alpha": 0.8, "prob": 0.4},
    "switch_prob": {"mixup_alpha": 0.8, "cutmix_alpha": 1.0, "switch_prob": 0.9},
    "pair": {"mixup_alpha": 0.8, "cutmix_alpha": 1.0, "mode": "pair", "prob": 0.7},
    "elem": {"mixup_alpha": 0.8, "cutmix_alpha": 1.0, "mode": "elem", "prob": 0.7},
    "elem_minmax": {"cutmix_minmax": [0.2, 0.8], "mode": "elem", "prob": 0.7},
}


@pytest.mark.parametrize("name", MIXUPS)
def test_mixup_and_cutmix_equal_timm_when_random_seeds_are_equal(name: str) -> None:
    arguments = {"mixup_alpha": 0.0, "label_smoothing": 0.1, "num_classes": 5} | MIXUPS[name]
    theirs, mixing = Mixup(**arguments), Mixing(3, 1, **arguments)
    for batch in range(12):
        images, labels = torch.randn(8, 3, 16, 20), torch.randint(0, 5, (8,))
        np.random.seed(seed_for(3, batch, 1) & 0xFFFFFFFF)
        expected = theirs(images.clone(), labels)
        found = mixing(Batch({"image": images.clone(), "target": labels}))
        assert torch.equal(found.image, expected[0]) and torch.equal(found.target, expected[1])


def test_mixup_stops_at_mixup_off_epoch_but_label_smoothing_continues() -> None:
    mixing = Mixing(3, 0, off_epoch=2, mixup_alpha=0.8, num_classes=5)
    images, labels = torch.randn(8, 3, 4, 4), torch.arange(8) % 5
    for epoch, is_mixed in ((0, True), (1, True), (2, False), (3, False)):
        found = mixing(Batch({"image": images.clone(), "target": labels}, epoch=epoch))
        targets = found.target
        assert torch.equal(found.image, images) != is_mixed
        assert targets.shape == (8, 5) and targets.sum(1).allclose(torch.ones(8))
        assert is_mixed or targets.max(1).values.allclose(torch.tensor(0.92))

"""Batches: random draws are functions of the sample, and fields of any kind form a batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from timm_parallel.batch import Batch, stretched
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

"""Random erasing, mixup and cutmix of a batch must give the same result as the code of timm."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from timm.data import Mixup
from timm.data.random_erasing import RandomErasing

from timm_parallel.batch import Batch
from timm_parallel.data.on_device import Erasing, Mixing
from timm_parallel.machine.seeds import seed_for, seeds_for


@given(
    shape=st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(2, 20), st.integers(2, 20)),
    mode=st.sampled_from(("const", "rand", "pixel")),
    chance=st.sampled_from((0.3, 1.0)),
    count=st.integers(1, 4),
    memory_format=st.sampled_from((torch.contiguous_format, torch.channels_last)),
    base=st.integers(0, 2**40),
)
@settings(deadline=None)
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

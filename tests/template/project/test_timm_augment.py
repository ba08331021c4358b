"""Augmentation and training settings with timm's names."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from timm.data.transforms_factory import transforms_imagenet_train
from timm.loss import BinaryCrossEntropy
from timm.models import model_parameters
from timm.utils import dispatch_clip_grad
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torchvision.transforms import v2

from src.data.transforms import CropAndFlip, batch_step, train_transform
from src.schema import AugmentConfig, OptimConfig, TrainConfig
from src.train.optim import clip_gradients
from tests.template.runs import parts_of, resolved, task_of
from timm_parallel.batch import Batch
from timm_parallel.data.dataset import InMemory
from timm_parallel.data.on_device import Erasing, Mixing
from timm_parallel.data.samplers import seed_draws
from timm_parallel.machine.seeds import seeds_for

SIZE = 48


def picture(size: tuple[int, int] = (SIZE, SIZE)) -> Tensor:
    """Return a smooth image with all colors, because sharp edges resize differently."""
    rows, columns = np.mgrid[: size[0], : size[1]]
    pixels = [
        rows * 255 // size[0],
        columns * 255 // size[1],
        (rows + 2 * columns) * 255 // (size[0] + 2 * size[1]),
    ]
    return torch.from_numpy(np.stack(pixels).astype(np.uint8))


def timms(steps: Any, image: Tensor) -> Tensor:
    """Apply some of timm's transforms, which work on PIL images, to `image`."""
    changed = Image.fromarray(image.permute(1, 2, 0).numpy())
    for step in steps:
        changed = step(changed)
    return v2.functional.pil_to_tensor(changed)


# Dictionary from a name to settings and the largest difference of a value from timm's.
# Flips and policies are equal bit for bit; otherwise PIL and torch round differently.
SAME_DRAWS: dict[str, tuple[dict[str, Any], int]] = {
    "vflip": ({"vflip": 0.5, "hflip": 0.5}, 0),
    "color_jitter": ({"color_jitter": 0.4}, 4),
    "color_jitter_prob": ({"color_jitter": 0.4, "color_jitter_prob": 0.3}, 4),
    "grayscale_prob": ({"grayscale_prob": 0.4}, 1),
    "gaussian_blur_prob": ({"gaussian_blur_prob": 0.5}, 0),
    "aa_without_color_jitter": ({"aa": "rand-m9-mstd0.5-inc1", "color_jitter": 0.4}, 0),
    "aa_random_interpolation": ({"aa": "rand-m9-inc1", "interpolation": "random"}, 0),
    "aa_bicubic": ({"aa": "rand-m9-inc1", "interpolation": "bicubic"}, 0),
    "aa_original": ({"aa": "original-mstd0.5"}, 0),
    "aa_3a_with_color_jitter": ({"aa": "3a", "color_jitter": 0.3}, 4),
    "augmix": ({"aa": "augmix-m5-w4-d2"}, 0),
}


@pytest.mark.parametrize("name", SAME_DRAWS)
def test_train_transform_matches_timm_with_the_same_random_numbers(name: str) -> None:
    ours, tolerance = SAME_DRAWS[name]
    theirs = {key.replace("aa", "auto_augment"): value for key, value in ours.items()}
    # A policy fills the borders with this color.
    mean = (0.1, 0.9, 0.3)
    transform = train_transform(AugmentConfig(**ours), (SIZE, SIZE), resize=False, mean=mean)
    assert transform is not None
    arguments = {
        "hflip": 0.0,
        "color_jitter": None,
        "interpolation": "bilinear",
        "mean": mean,
    } | theirs
    crop_and_flips, others, _ = transforms_imagenet_train(
        SIZE, normalize=False, separate=True, **arguments
    )
    image, changed = picture(), 0
    for index in range(40):
        seed_draws(0, 0, index)
        found = transform(image)
        seed_draws(0, 0, index)
        expected = timms([*crop_and_flips.transforms[1:], *others.transforms], image)
        assert (found.int() - expected.int()).abs().max() <= tolerance
        changed += not torch.equal(found, image)
    assert changed >= 8
    assert changed <= 36 or "prob" not in name


@pytest.mark.parametrize("mode", ["rkrc", "rkrr"])
@pytest.mark.parametrize(
    "given", [{}, {"scale": [0.5, 1.0], "ratio": [0.8, 1.25]}], ids=["timms_range", "own_range"]
)
def test_train_crop_mode_matches_timm_with_the_same_random_numbers(
    mode: str, given: dict[str, Any]
) -> None:
    transform = train_transform(
        AugmentConfig(train_crop_mode=mode, **given), (SIZE, SIZE), resize=True
    )
    assert transform is not None
    crop = transforms_imagenet_train(
        SIZE,
        train_crop_mode=mode,
        hflip=0,
        color_jitter=None,  # type: ignore[arg-type]
        interpolation="bilinear",
        normalize=False,
        **given,
    )
    for index, size in enumerate([(80, 120), (120, 80), (SIZE, SIZE), (200, 64)] * 5):
        image = picture(size)
        seed_draws(0, 0, index)
        found = transform(image)
        seed_draws(0, 0, index)
        expected = timms(crop.transforms[:2], image)
        assert found.shape == (3, SIZE, SIZE)
        assert (found.int() - expected.int()).abs().max() <= 2


def test_train_crop_mode_rrc_uses_the_default_scale_range_of_timm() -> None:
    plain, named = (
        train_transform(AugmentConfig(**given), (SIZE, SIZE), resize=True)
        for given in ({"scale": [0.08, 1.0]}, {"train_crop_mode": "rrc"})
    )
    assert repr(plain).replace("[0.08, 1.0]", "(0.08, 1)") == repr(named)


@given(
    batch=st.integers(1, 6),
    channels=st.integers(1, 4),
    size=st.tuples(*[st.integers(1, 12)] * 2),
    padding=st.integers(0, 5),
    chances=st.tuples(*[st.sampled_from((0.0, 0.3, 1.0))] * 2),
    base=st.integers(0, 2**40),
)
@settings(deadline=None)
def test_batched_crops_and_flips_equal_those_of_single_images_bit_for_bit(
    batch: int,
    channels: int,
    size: tuple[int, int],
    padding: int,
    chances: tuple[float, float],
    base: int,
) -> None:
    config = AugmentConfig(crop_padding=padding, hflip=chances[0], vflip=chances[1])
    each = train_transform(config, size, resize=False)
    images = torch.randint(0, 256, (batch, channels, *size), dtype=torch.uint8)
    step = batch_step(config, InMemory(images, torch.zeros(batch)), size)
    assert (step is None) == (each is None)
    if step is None or each is None:
        return
    indices = np.arange(base, base + batch)
    before = torch.get_rng_state()
    found = step(images, *step.draw(seeds_for(3, 5, indices), images.shape))
    assert torch.equal(torch.get_rng_state(), before)
    expected = []
    for index, image in zip(indices.tolist(), images, strict=True):
        seed_draws(3, 5, index)
        expected.append(each(image))
    assert torch.equal(found, torch.stack(expected))
    # Augment the last image alone: its random numbers must not depend on the rest of the batch.
    last, draws = images[-1:], step.draw(seeds_for(3, 5, indices[-1:]), images[-1:].shape)
    alone = step(last, *draws)
    assert torch.equal(alone, found[-1:])


def test_training_batches_of_digits_are_equal_with_and_without_batched_augmentation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also of copies of images, and from the middle of a later epoch on."""
    augment = ("data.augment.crop_padding=3", "data.augment.hflip=0.5", "data.augment.vflip=0.2")
    config = resolved(
        "parallel=single", "parallel.accelerator=cpu", *augment, "data.augment.aug_repeats=2"
    )
    seen = []
    for batched in (True, False):
        if not batched:
            monkeypatch.setattr("src.tasks.images.batch_step", lambda *_: None)
        run = parts_of(config)
        assert run.train_loader.fetcher.gathers == batched
        seen.append([batch.image for batch in run.train_loader.epoch(1, first_batch=2)])
    assert len(seen[0]) == 4
    assert all(torch.equal(own, other) for own, other in zip(*seen, strict=True))


@pytest.mark.parametrize(
    ("changed", "side"),
    [
        ({"color_jitter": 0.4}, 16),
        ({"scale": [0.5, 1.0], "crop_padding": 0}, 16),
        ({"aa": "rand-m9"}, 16),
        ({}, 17),
    ],
)
def test_batch_augmentation_is_not_used_when_images_need_resizing_or_other_augmentation(
    changed: Any, side: int
) -> None:
    split = InMemory(torch.zeros(2, 3, side, side, dtype=torch.uint8), torch.zeros(2))
    options: dict[str, Any] = {"crop_padding": 2, "hflip": 0.5}
    assert batch_step(AugmentConfig(**options), split, (side, side)) is not None
    assert batch_step(AugmentConfig(**(options | changed)), split, (16, 16)) is None


class Operations(TorchDispatchMode):
    """Counts operations, each of which is at least one kernel on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["crop", "erase const", "erase pixel", "mixup elem", "mixup pair"])
def test_batch_augmentation_needs_equally_many_operations_for_every_batch_size(name: str) -> None:
    kind, _, mode = name.partition(" ")
    counts = set()
    for size in (8, 64):
        images = torch.randint(0, 256, (size, 3, 16, 16), dtype=torch.uint8)
        given: tuple[Any, ...] = (images,)
        if kind == "mixup":
            step: Any = Mixing(0, 0, mixup_alpha=0.8, cutmix_alpha=1.0, mode=mode, num_classes=5)
            labels = torch.zeros(size, dtype=torch.int64)
            given = (Batch({"image": images.float(), "target": labels}),)
        elif kind == "erase":
            step = Erasing(1.0, mode)
            given = (images.float(), *step.draw(list(range(size)), images.shape))
        else:
            step = CropAndFlip(AugmentConfig(crop_padding=2))
            given = (images, *step.draw(list(range(size)), images.shape))
        with Operations() as operations:
            step(*given)
        counts.add(operations.count)
    assert len(counts) == 1 and counts.pop() < 40


@pytest.mark.parametrize("mode", ["norm", "value", "agc"])
def test_gradient_clipping_matches_timm(mode: str) -> None:
    torch.manual_seed(0)
    ours, theirs = (
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 36, 4)) for _ in range(2)
    )
    theirs.load_state_dict(ours.state_dict())
    images = torch.randn(4, 3, 8, 8)
    for model in (ours, theirs):
        (model(images) ** 2).sum().backward()
    dispatch_clip_grad(model_parameters(theirs, exclude_head="agc" in mode), 0.05, mode)
    clip_gradients(OptimConfig(clip_grad=0.05, clip_mode=mode), {"model": ours})
    for our, their in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(our.grad, their.grad)  # type: ignore[arg-type]


def test_bce_loss_matches_timm_with_sum_classes_and_pos_weight() -> None:
    config = TrainConfig(
        loss="bce", smoothing=0.1, loss_kwargs={"sum_classes": True, "pos_weight": 2.0}
    )
    scores, labels = torch.randn(6, 4), torch.randint(0, 4, (6,))
    expected = BinaryCrossEntropy(smoothing=0.1, sum_classes=True, pos_weight=2.0)(scores, labels)
    criterion = task_of(4, config).build_criterion()
    assert torch.equal(criterion(scores, labels), expected)

"""From a decoded image to a training or an evaluation image of the model's size. timm's names and meanings."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from src.config.schema import AugmentConfig
from src.draws import seed_for

Transform = Callable[[Tensor], Tensor]


def train_transform(config: AugmentConfig, size: int | None, resize: bool) -> Transform | None:
    """uint8 [C, H, W] -> uint8 [C, size, size], with random draws; None where nothing is asked for.

    `resize`: whether the images come in other sizes than `size`.
    """
    from torchvision.transforms import v2

    steps: list[Any] = []
    if config.scale is not None:
        ratio = config.ratio or (3 / 4, 4 / 3)
        steps.append(v2.RandomResizedCrop(_known(size), tuple(config.scale), tuple(ratio), antialias=True))
    elif resize:
        steps += [v2.Resize(_known(size), antialias=True), v2.CenterCrop(_known(size))]
    if config.hflip:
        steps.append(v2.RandomHorizontalFlip(config.hflip))
    if config.aa:
        steps.append(_TimmAutoAugment(config.aa, _known(size)))
    if config.color_jitter:
        steps.append(v2.ColorJitter(*[config.color_jitter] * 3))
    if config.reprob:
        steps.append(v2.RandomErasing(config.reprob, scale=(0.02, 1 / 3)))  # timm's area, filled with black
    return v2.Compose(steps) if steps else None


def evaluation_transform(size: int | None, crop_pct: float) -> Transform | None:
    """Shorter side to size / crop_pct, then the centre. None where the data has one size already."""
    from torchvision.transforms import v2

    if size is None:
        return None
    return v2.Compose([v2.Resize(round(size / crop_pct), antialias=True), v2.CenterCrop(size)])


def seed_draws(seed: int, epoch: int, index: int) -> None:
    """Make the random draws for one sample a function of (seed, epoch, index), whatever rank or worker makes them."""
    mixed = seed_for(seed, epoch, index)
    torch.default_generator.manual_seed(mixed)
    random.seed(mixed)
    np.random.seed(mixed & 0xFFFFFFFF)


def _known(size: int | None) -> int:
    if size is None:
        raise ValueError("data.image_size=null: random crops need a size; set it")
    return size


class _TimmAutoAugment:
    """timm's policies work on PIL images in RGB. A class, because loader workers may have to be sent it (macOS, Python 3.14)."""

    def __init__(self, text: str, size: int) -> None:
        from timm.data import auto_augment as timms

        timms.NAME_TO_OP.update(dict.fromkeys([name for name in timms.NAME_TO_OP if "Posterize" in name], _posterize))
        build = {"rand": timms.rand_augment_transform, "augm": timms.augment_and_mix_transform}.get(
            text[:4], timms.auto_augment_transform
        )
        hparams = {"translate_const": int(size * 0.45), "img_mean": (124, 116, 104)}  # as timm's own transforms
        self.policy: Any = build(text, hparams)

    def __call__(self, image: Tensor) -> Tensor:
        from torchvision.transforms.v2 import functional

        pil = functional.to_pil_image(image)
        return functional.pil_to_tensor(self.policy(pil.convert("RGB")).convert(pil.mode))


def _posterize(image: Any, bits_to_keep: int, **options: Any) -> Any:
    """As timm's, which asks for 0 bits at one end of its scale: black, but an error in newer versions of Pillow."""
    from PIL import ImageOps

    if bits_to_keep >= 8:
        return image
    return ImageOps.posterize(image, bits_to_keep) if bits_to_keep > 0 else image.point(lambda value: 0)

"""From a decoded image to a training or an evaluation image of the model's size. timm's names and meanings."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import ImageOps
from timm.data import auto_augment
from torch import Tensor
from torchvision.transforms import InterpolationMode, v2

from src.data.sampling import seed_for
from src.schema import AugmentConfig

Transform = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Preprocessing:
    """From an image to what the model takes in evaluation; timm's names, under which an export carries it on."""

    input_size: tuple[int, int, int]  # channels, height, width
    mean: tuple[float, ...]  # per channel, of images in 0..1
    std: tuple[float, ...]
    crop_pct: float  # the side of what is seen over that of the whole image, both after resizing
    crop_mode: str  # center, or squash: no side is longer, both are resized
    interpolation: str  # bilinear or bicubic


def train_transform(config: AugmentConfig, size: int, resize: bool) -> Transform | None:
    """uint8 [C, H, W] -> uint8 [C, size, size], with random draws; None where nothing is asked for.

    `resize`: True if the images come in other sizes than `size`.
    """
    steps: list[Any] = []
    if config.scale is not None:
        modes = ("bilinear", "bicubic") if config.interpolation == "random" else (config.interpolation,)
        ratio = config.ratio or (3 / 4, 4 / 3)
        crops = [v2.RandomResizedCrop(size, config.scale, ratio, _mode(mode)) for mode in modes]
        steps.append(crops[0] if len(crops) == 1 else v2.RandomChoice(crops))
    elif resize:
        steps += [v2.Resize(size, _mode(config.interpolation)), v2.CenterCrop(size)]
    if config.crop_padding:
        steps.append(v2.RandomCrop(size, padding=config.crop_padding))
    if config.hflip:
        steps.append(v2.RandomHorizontalFlip(config.hflip))
    if config.aa:
        steps.append(_TimmAutoAugment(config.aa, size))
    if config.color_jitter:
        steps.append(v2.ColorJitter(*[config.color_jitter] * 3))
    if config.reprob:
        steps.append(v2.RandomErasing(config.reprob, scale=(0.02, 1 / 3)))  # timm's area, filled with black
    return v2.Compose(steps) if steps else None


def evaluation_transform(preprocessing: Preprocessing) -> Transform:
    """Shorter side to size / crop_pct, then the centre, as timm does. uint8 [C, any, any] -> uint8 `input_size`."""
    _, height, width = preprocessing.input_size
    resized = [math.floor(side / preprocessing.crop_pct) for side in (height, width)]
    if preprocessing.crop_mode != "squash":
        resized = [min(resized)]
    mode = _mode(preprocessing.interpolation)
    return v2.Compose([v2.Resize(resized, mode), v2.CenterCrop((height, width))])


def seed_draws(seed: int, epoch: int, index: int) -> None:
    """Make the random draws for one sample a function of (seed, epoch, index), whatever rank or worker makes them."""
    mixed = seed_for(seed, epoch, index)
    torch.default_generator.manual_seed(mixed)
    random.seed(mixed)
    np.random.seed(mixed & 0xFFFFFFFF)


def _mode(name: str) -> InterpolationMode:
    return InterpolationMode.BICUBIC if name == "bicubic" else InterpolationMode.BILINEAR


class _TimmAutoAugment:
    """timm's policies work on PIL images in RGB. A class, because loader workers may have to be sent it (macOS, Python 3.14)."""

    def __init__(self, text: str, size: int) -> None:
        auto_augment.NAME_TO_OP.update(
            dict.fromkeys([name for name in auto_augment.NAME_TO_OP if "Posterize" in name], _posterize)
        )
        build = {"rand": auto_augment.rand_augment_transform, "augm": auto_augment.augment_and_mix_transform}.get(
            text[:4], auto_augment.auto_augment_transform
        )
        hparams = {"translate_const": int(size * 0.45), "img_mean": (124, 116, 104)}  # as timm's own transforms
        self.policy: Any = build(text, hparams)

    def __call__(self, image: Tensor) -> Tensor:
        pil = v2.functional.to_pil_image(image)
        return v2.functional.pil_to_tensor(self.policy(pil.convert("RGB")).convert(pil.mode))


def _posterize(image: Any, bits_to_keep: int, **options: Any) -> Any:
    """As timm's, which asks for 0 bits at one end of its scale: black, but an error in newer versions of Pillow."""
    if bits_to_keep >= 8:
        return image
    return ImageOps.posterize(image, bits_to_keep) if bits_to_keep > 0 else image.point(lambda value: 0)

"""Augmentation of training images and preprocessing of evaluation images. Both have the steps and
names of timm.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from timm.data import IMAGENET_DEFAULT_MEAN, auto_augment
from timm.data.transforms import (
    CenterCropOrPad,
    RandomCropOrPad,
    ResizeKeepRatio,
    str_to_pil_interp,
)
from torch import Tensor, nn
from torchvision import tv_tensors
from torchvision.transforms import InterpolationMode, v2

from src.schema import AugmentConfig
from timm_parallel import InMemory, posterize_to_black

Transform = Callable[[Tensor], Tensor]
# Height and width of an image in pixels.
Size = tuple[int, int]
# Side of the kernel of the Gaussian blur, in pixels, as in timm.
BLUR = 23
# Longest side of an image divided by its shortest side, up to which a whole image is resized.
MAX_ASPECT = 200


class OnImage:
    """Applies a transform to the image and leaves the target as it is."""

    def __init__(self, transform: Transform) -> None:
        self.transform = transform

    @classmethod
    def of(cls, transform: Transform | None) -> OnImage | None:
        return None if transform is None else cls(transform)

    def __call__(self, image: Tensor, target: Any) -> tuple[Tensor, Any]:
        return self.transform(image), target


@dataclass(frozen=True)
class Preprocessing:
    """Preprocessing of evaluation images. The fields have the names of timm, and an export writes
    these names.
    """

    # Channels, height and width of an evaluation image.
    input_size: tuple[int, int, int]
    # Mean and standard deviation of each channel, for images in 0..1.
    mean: tuple[float, ...]
    std: tuple[float, ...]
    # Side of the center crop divided by the side of the resized image.
    crop_pct: float
    # Crop mode. center: resize the shorter side; squash: resize both sides; border: resize the
    # longer side, and pad the rest with `mean`.
    crop_mode: str
    # Interpolation with which images are resized: bilinear or bicubic.
    interpolation: str


def train_transform(
    config: AugmentConfig,
    size: Size,
    resize: bool,
    mean: tuple[float, ...] = IMAGENET_DEFAULT_MEAN,
    crop_mode: str | None = None,
    mask_fill: int = 0,
) -> Transform | None:
    """Build the augmentation of a training image, uint8 [C, H, W] -> uint8 [C, *size]. Return None
    if the config turns all augmentation off.

    The steps and their order are those of timm.data.transforms_imagenet_train. Random erasing is
    not one of them, because it follows normalization. `resize`: True if images may have other sizes
    than `size`. `mean`: per channel, of images in 0..1. `crop_mode`: that of `Preprocessing`, for
    images that are not cropped at random; None: center. `mask_fill`: value with which crop_padding
    pads a mask.
    """
    steps: list[Any] = []
    if config.train_crop_mode in ("rkrc", "rkrr"):
        steps += _keep_ratio_crop(config, size)
    elif config.scale is not None or config.train_crop_mode is not None:
        modes = (
            ("bilinear", "bicubic") if config.interpolation == "random" else (config.interpolation,)
        )
        ratio = config.ratio or (3 / 4, 4 / 3)
        crops = [
            v2.RandomResizedCrop(size, config.scale or (0.08, 1), ratio, _mode(mode))
            for mode in modes
        ]
        steps.append(crops[0] if len(crops) == 1 else v2.RandomChoice(crops))
    elif resize:
        steps += _fit(size, size, crop_mode, config.interpolation, mean)
    if config.crop_padding:
        fill: Any = {tv_tensors.Mask: mask_fill, "others": 0} if mask_fill else 0
        steps.append(v2.RandomCrop(size, padding=config.crop_padding, fill=fill))
    if config.hflip:
        steps.append(v2.RandomHorizontalFlip(config.hflip))
    if config.vflip:
        steps.append(v2.RandomVerticalFlip(config.vflip))
    if config.aa:
        steps.append(_TimmAutoAugment(config.aa, size, config.interpolation, mean))
    if config.color_jitter and (config.aa is None or "3a" in config.aa):
        jitter = v2.ColorJitter(*[config.color_jitter] * 3)
        share = config.color_jitter_prob
        steps.append(jitter if share is None else v2.RandomApply([jitter], share))
    if config.grayscale_prob:
        steps.append(v2.RandomGrayscale(config.grayscale_prob))
    if config.gaussian_blur_prob:
        if min(size) <= BLUR // 2:
            raise ValueError(
                f"data.augment.gaussian_blur_prob={config.gaussian_blur_prob}: expected images of "
                f"{BLUR // 2 + 1} pixels per side or more, not {min(size)}; use 0"
            )
        steps.append(v2.RandomApply([v2.GaussianBlur(BLUR)], config.gaussian_blur_prob))
    return v2.Compose(steps) if steps else None


class CropAndFlip:
    """Padded random crops and flips of whole batches. They are bit-equal to those of
    `train_transform`, which augments one image at a time, if an image has the same seed.
    """

    def __init__(self, config: AugmentConfig) -> None:
        self.padding, self.chances = config.crop_padding, (config.vflip, config.hflip)

    def draw(self, seeds: list[int], shape: torch.Size) -> list[Tensor]:
        """Draw the random crop and flips of each image. Return int64 [B, 4]: top and left of the
        crop, then 1 for a vertical and 1 for a horizontal flip, else 0.
        """
        # Create the generator here, because an attribute of this type cannot be sent to loader
        # workers that are spawned.
        generator, count = torch.Generator(), len(seeds)
        corners, draws = torch.zeros(count, 2, dtype=torch.int64), torch.ones(count, 2)
        # Draw in torchvision's order: the horizontal flip first, and no number for a flip that is
        # off.
        used = [column for column in (1, 0) if self.chances[column]]
        shares = torch.empty(count, len(used))
        for seed, corner, share in zip(seeds, corners.unbind(), shares.unbind(), strict=True):
            generator.manual_seed(seed)
            if self.padding:
                corner.random_(0, 2 * self.padding + 1, generator=generator)
            share.uniform_(generator=generator)
        draws[:, used] = shares
        return [torch.cat([corners, draws < torch.tensor(self.chances)], 1)]

    def __call__(self, images: Tensor, *draws: Tensor) -> Tensor:
        """Crop and flip uint8 images [B, C, H, W] with one gather operation."""
        padding, sources = self.padding, []
        for axis, side in enumerate(images.shape[2:]):
            corner, flip = draws[0][:, axis, None], draws[0][:, 2 + axis, None]
            steps = torch.arange(side, device=images.device)
            # Index of the row or column from which each output pixel is copied: [B, side].
            sources.append(corner + torch.where(flip == 1, side - 1 - steps, steps))
        rows, columns = sources
        width = images.shape[3] + 2 * padding
        source = (rows[:, :, None] * width + columns[:, None]).flatten(1)
        padded = torch.nn.functional.pad(images, [padding] * 4).flatten(2)
        source = source[:, None].expand(-1, images.shape[1], -1)
        return padded.gather(2, source).view(images.shape)


def batch_step(config: AugmentConfig, in_memory: InMemory | None, size: Size) -> CropAndFlip | None:
    """Build the augmentation of whole batches, which replaces `train_transform`. Return None if the
    config asks for more than padded crops and flips, or images must be decoded or resized first.

    `in_memory`: the training split; None if its images are not in memory in the right size.
    """
    if in_memory is None or tuple(in_memory.images.shape[2:]) != size:
        return None
    others = train_transform(
        replace(config, crop_padding=0, hflip=0.0, vflip=0.0), size, resize=False
    )
    return (
        CropAndFlip(config)
        if others is None and (config.crop_padding or config.hflip or config.vflip)
        else None
    )


def _keep_ratio_crop(config: AugmentConfig, size: Size) -> list[Any]:
    """Build the steps of timm's train_crop_mode rkrc (center crop) or rkrr (random crop). Each
    image is zoomed with a probability of one half, and independently stretched with a probability
    of one half.
    """
    resize = ResizeKeepRatio(
        size,
        interpolation=config.interpolation,
        random_scale_prob=0.5,
        random_scale_range=config.scale or (0.8, 1),
        random_scale_area=True,
        random_aspect_prob=0.5,
        random_aspect_range=config.ratio or (0.9, 1 / 0.9),
    )
    crop = CenterCropOrPad if config.train_crop_mode == "rkrc" else RandomCropOrPad
    return [_CropNarrow(), resize, crop(list(size), padding_mode="reflect")]


class ResizeAndCrop(v2.Compose):
    """Steps that resize an image, then crop the center. With crop_pct=1, they leave an image of the
    right size as it is.
    """


def evaluation_transform(preprocessing: Preprocessing) -> Transform:
    """Build timm's evaluation transform, uint8 [C, H, W] -> uint8 [C, height, width]. It resizes
    the image, then crops the center.
    """
    _, height, width = preprocessing.input_size
    pct, mode = preprocessing.crop_pct, preprocessing.crop_mode
    resized = math.floor(height / pct), math.floor(width / pct)
    return ResizeAndCrop(
        _fit((height, width), resized, mode, preprocessing.interpolation, preprocessing.mean)
    )


def _fit(
    size: Size,
    resized: Size,
    crop_mode: str | None,
    interpolation: str,
    mean: tuple[float, ...],
) -> list[Any]:
    """Build the steps that resize an image to the size `resized` by a crop mode of
    `Preprocessing`, then crop the center to `size`.
    """
    resize: Any = _resize(resized, interpolation)
    if crop_mode == "squash":
        resize = v2.Resize(resized, _mode(interpolation))
    elif crop_mode == "border":
        fill = [round(255 * value) for value in mean]
        mode = _mode(interpolation)
        resize = partial(_resize_and_pad, size=size, resized=resized, fill=fill, mode=mode)
    return [resize, v2.CenterCrop(size)]


def _resize(size: Size, interpolation: str) -> Any:
    """Build a step that resizes an image until it covers a height and width. The aspect ratio stays
    the same, as in timm.
    """
    resize: Any = ResizeKeepRatio(size, interpolation=interpolation)
    if size[0] == size[1]:
        # Given one number, torchvision resizes the shorter side.
        resize = v2.Resize(size[0], _mode(interpolation))
    return v2.Compose([_CropNarrow(), resize])


class _CropNarrow(nn.Module):
    """Crops the center of an image that is longer than MAX_ASPECT times its shorter side, together
    with a mask or other targets of torchvision.

    A line of 1 x 6000 pixels would otherwise be resized to a million rows, which are cropped later.
    """

    def forward(self, image: Tensor, *targets: Any) -> Any:
        height, width = image.shape[-2:]
        longest = MAX_ASPECT * min(height, width)
        if max(height, width) > longest:
            return v2.CenterCrop([min(height, longest), min(width, longest)])(image, *targets)
        return (image, *targets) if targets else image


def _mode(name: str) -> InterpolationMode:
    return InterpolationMode.BICUBIC if name == "bicubic" else InterpolationMode.BILINEAR


def _resize_and_pad(
    *inputs: Any, size: Size, resized: Size, fill: list[int], mode: InterpolationMode
) -> Any:
    """Resize an image, and its mask or other targets of torchvision, to fit within a height and
    width, then pad the image with a color. timm names this crop mode border.
    """
    sides = inputs[0].shape[-2:]
    ratio = max(side / target for side, target in zip(sides, resized, strict=True))
    fitted = [max(1, round(side / ratio)) for side in sides]
    rows, columns = (max(0, side - new) for side, new in zip(size, fitted, strict=True))
    padding = [columns // 2, rows // 2, columns - columns // 2, rows - rows // 2]
    fills: Any = {tv_tensors.Mask: 0, "others": fill}
    return v2.Compose([v2.Resize(fitted, mode), v2.Pad(padding, fill=fills)])(*inputs)


class _TimmAutoAugment:
    """Applies timm's AutoAugment, RandAugment or AugMix to an image. This is a class, because a
    closure cannot be pickled for loader workers.
    """

    def __init__(self, text: str, size: Size, interpolation: str, mean: tuple[float, ...]) -> None:
        posterize_to_black()
        # Use the same values as timm's transforms. A gray image becomes RGB for the policy, so its
        # mean is repeated.
        colors = mean * 3 if len(mean) == 1 else mean[:3]
        values: dict[str, Any] = {"translate_const": int(min(size) * 0.45)}
        values["img_mean"] = tuple(min(255, round(255 * color)) for color in colors)
        if interpolation != "random":
            values["interpolation"] = str_to_pil_interp(interpolation)
        build: Any = auto_augment.auto_augment_transform
        if text.startswith("rand"):
            build = auto_augment.rand_augment_transform
        elif text.startswith("augmix"):
            build = auto_augment.augment_and_mix_transform
            values["translate_pct"] = 0.3
        self.policy: Any = build(text, values)

    def __call__(self, image: Tensor) -> Tensor:
        pil = v2.functional.to_pil_image(image)
        return v2.functional.pil_to_tensor(self.policy(pil.convert("RGB")).convert(pil.mode))

"""Choose image size, mean and standard deviation of a run: from the config, else from the dataset,
else from the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from timm.data import resolve_model_data_config
from torch import nn

from src.data.transforms import Preprocessing
from src.schema import DataConfig
from timm_parallel import ImageDataset, InMemory, as_size


def train_image_size(model: nn.Module, config: DataConfig, images: ImageDataset) -> tuple[int, int]:
    """Return height and width of training images in pixels. They come from the config, else from
    the dataset, else from the model.
    """
    of_model = resolve_model_data_config(model)["input_size"][1:]
    return as_size(config.image_size or images.image_size or of_model)


def preprocessing_for(
    model: nn.Module,
    config: DataConfig,
    images: ImageDataset,
    of_weights: Mapping[str, Any] | None = None,
) -> Preprocessing:
    """Build the preprocessing of evaluation images. Each value comes from the config, else from the
    dataset, else from the model's weights, else from timm's defaults.

    `of_weights`: mean and std of the weights in the file model.weights; None: use those of timm's
    weights.
    """
    if config.eval_image_size is not None and isinstance(images.val, InMemory):
        raise ValueError(
            f"data.eval_image_size={config.eval_image_size}: images of {config.name} have one "
            "size; leave it at null"
        )
    of_model = resolve_model_data_config(model)
    channels = images.in_chans
    sides = config.eval_image_size or config.image_size or images.image_size
    mean, std = config.mean or images.mean, config.std or images.std
    if mean is None or std is None:
        mean = std = (0.5,) * channels
        if hasattr(model, "pretrained_cfg") and len(of_model["mean"]) == channels:
            mean, std = of_model["mean"], of_model["std"]
        if of_weights and len(of_weights["mean"]) == channels:
            mean, std = of_weights["mean"], of_weights["std"]
    for key, values in (("mean", mean), ("std", std)):
        if len(values) != channels:
            raise ValueError(
                f"data.{key}={list(values)}: expected a number for each of the {channels} channels"
            )
    # Images that already have this size are neither resized nor cropped, as in training.
    size = as_size(sides or of_model["input_size"][1:])
    is_ready = images.image_size is not None and as_size(images.image_size) == size
    is_whole = is_ready or config.keeps_whole_images or isinstance(images.val, InMemory)
    return Preprocessing(
        input_size=(channels, *size),
        mean=tuple(mean),
        std=tuple(std),
        crop_pct=config.crop_pct or (1.0 if is_whole else of_model["crop_pct"]),
        crop_mode=config.crop_mode or of_model["crop_mode"],
        interpolation=config.interpolation or of_model["interpolation"],
    )

"""timm builds the model; it is single-device code, spread from outside by a strategy (src/parallel/)."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import timm
import torch
from timm.utils import ModelEmaV3
from torch import nn

from src.config.schema import ModelConfig
from src.data.datasets import Images


def build_model(config: ModelConfig, images: Images, image_size: int | None, device: torch.device) -> nn.Module:
    """The model of a config on `device`; head, channels and image size come from the data unless given.

    Errors: ValueError when timm, or the class, does not take the arguments.
    """
    num_classes = config.num_classes or len(images.class_names)
    if num_classes < len(images.class_names):
        raise ValueError(f"model.num_classes={num_classes}: the data has {len(images.class_names)} classes")
    arguments: dict[str, Any] = {"num_classes": num_classes, "in_chans": config.in_chans or images.in_chans}
    try:
        if config.name.startswith("src."):
            module, _, name = config.name.rpartition(".")
            kind = getattr(importlib.import_module(module), name)
            if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
                raise ValueError(f"model.name={config.name}: not a torch.nn.Module class")
            model: Any = kind(**arguments, **config.kwargs)
        else:
            if image_size is not None and _takes_image_size(config.name):
                arguments["img_size"] = image_size
            model = timm.create_model(config.name, pretrained=config.pretrained, **{**arguments, **config.kwargs})
    except (TypeError, AttributeError, AssertionError) as error:
        raise ValueError(f"model.kwargs={config.kwargs}: {config.name} does not take them ({error})") from None
    if config.grad_checkpointing:
        if not hasattr(model, "set_grad_checkpointing"):
            raise ValueError(f"model.grad_checkpointing=true: {config.name} has no set_grad_checkpointing")
        model.set_grad_checkpointing(True)
    if config.sync_bn:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    memory_format = torch.channels_last if config.channels_last else torch.preserve_format
    model = model.to(device=device, memory_format=memory_format)  # type: ignore[call-overload]
    assert isinstance(model, nn.Module)
    return model


def normalisation(model: nn.Module, images: Images) -> tuple[tuple[float, ...], tuple[float, ...], float]:
    """(mean, std, crop_pct): the data's own statistics, else those the model was made for, for images in 0..1."""
    declared = getattr(model, "pretrained_cfg", None) or {}
    crop_pct = float(declared.get("crop_pct") or 0.875)
    if images.mean is not None and images.std is not None:
        return images.mean, images.std, crop_pct
    mean, std = tuple(declared.get("mean") or ()), tuple(declared.get("std") or ())
    if len(mean) != images.in_chans:
        mean, std = (0.5,) * images.in_chans, (0.5,) * images.in_chans
    return mean, std, crop_pct


def build_ema(model: nn.Module, decay: float | None) -> ModelEmaV3 | None:
    """Averaged weights beside the model; timm's warm-up lets them follow quickly at first."""
    return None if decay is None else ModelEmaV3(model, decay=decay, use_warmup=True)


def count_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _takes_image_size(name: str) -> bool:
    """Models of a fixed input size take `img_size`; ResNets and their like refuse the argument."""
    cfg = timm.get_pretrained_cfg(name, allow_unregistered=True)
    if cfg is not None and cfg.fixed_input_size:
        return True
    return "img_size" in inspect.signature(timm.model_entrypoint(name)).parameters

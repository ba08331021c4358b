"""timm builds the model; it is single-device code, spread from outside by a strategy (src/parallel/)."""

from __future__ import annotations

import importlib
import inspect
import socket
from pathlib import Path
from typing import Any
from urllib.parse import urlparse
from urllib.request import getproxies

import timm
import torch
from huggingface_hub import constants
from timm.data import resolve_model_data_config
from timm.layers import convert_sync_batchnorm
from timm.utils import ModelEmaV3
from torch import Tensor, nn

from src.data.augment import Preprocessing
from src.data.datasets import Images, InMemory
from src.models.weights import load_weights
from src.schema import DataConfig, EmaConfig, ModelConfig, is_own_class


def build_model(
    config: ModelConfig, classes: int, in_chans: int, image_size: int | None, device: torch.device
) -> nn.Module:
    """The model of a config on `device`; `classes`, channels and image size are those of the data."""
    if config.num_classes is not None and config.num_classes < classes:
        raise ValueError(f"model.num_classes={config.num_classes}: the data has {classes} classes; use at least that")
    if config.in_chans not in (None, in_chans):
        raise ValueError(
            f"model.in_chans={config.in_chans}: the data's images have {in_chans} channels; leave it at null"
        )
    arguments: dict[str, Any] = {"num_classes": config.num_classes or classes, "in_chans": in_chans}
    is_own = is_own_class(config.name)
    try:
        model = _own_model(config, arguments) if is_own else _timm_model(config, arguments, image_size)
    except (TypeError, AttributeError, AssertionError) as error:
        if is_own and not (isinstance(error, TypeError) and "argument" in str(error)):
            raise  # a fault inside it, which its traceback shows
        raise ValueError(f"model.kwargs={config.kwargs}: {config.name} does not take them ({error})") from None
    if config.weights is not None:
        load_weights(model, Path(config.weights))
    if config.grad_checkpointing:
        _checkpoint_gradients(model, config.name)
    if config.sync_bn:
        model = convert_sync_batchnorm(model)  # timm's: torch's would lose the activation that timm's BatchNorm holds
    memory_format = torch.channels_last if config.channels_last else torch.preserve_format
    model = model.to(device=device, memory_format=memory_format)
    assert isinstance(model, nn.Module)
    return model


def _own_model(config: ModelConfig, arguments: dict[str, Any]) -> Any:
    module, _, name = config.name.rpartition(".")
    kind = getattr(importlib.import_module(module), name)
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise ValueError(f"model.name={config.name}: not a torch.nn.Module class")
    return kind(**arguments, **config.kwargs)


def _timm_model(config: ModelConfig, arguments: dict[str, Any], image_size: int | None) -> Any:
    if image_size is not None and _takes_image_size(config.name):
        arguments["img_size"] = image_size
    arguments |= config.kwargs
    if not config.pretrained:
        return timm.create_model(config.name, **arguments)
    _give_up_early()
    try:
        return timm.create_model(config.name, pretrained=True, **arguments)
    except (OSError, RuntimeError) as error:  # not in the cache and no network, or no weights of that name
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"model.pretrained=true: the weights of {config.name} could not be had ({reason}); is there a network? "
            "Else copy a filled cache here (HF_HOME), or give a file: model.weights=<file>"
        ) from None


def _give_up_early() -> None:
    """Where the hub's name is unknown, let its client look into its cache only: it would try for 46 s."""
    if any(getproxies().get(scheme) for scheme in ("http", "https", "all")):
        return  # the proxy knows names
    try:
        socket.getaddrinfo(urlparse(constants.ENDPOINT).hostname, 443)
    except OSError:
        constants.HF_HUB_OFFLINE = True


def _checkpoint_gradients(model: Any, name: str) -> None:
    if not hasattr(model, "set_grad_checkpointing"):
        raise ValueError(f"model.grad_checkpointing=true: {name} has no set_grad_checkpointing")
    try:
        model.set_grad_checkpointing(True)
    except AssertionError as error:
        raise ValueError(f"model.grad_checkpointing=true: {name} cannot ({error})") from None


def check_image_size(model: nn.Module, preprocessing: Preprocessing, num_classes: int, device: torch.device) -> None:
    """Show `model` one black image, in evaluation mode, and refuse a size that it does not take."""
    image = torch.zeros(1, *preprocessing.input_size, device=device)
    height, width = image.shape[-2:]
    was_training = model.training
    try:
        with torch.no_grad():
            outputs = model.eval()(image)
    except torch.OutOfMemoryError:  # a RuntimeError too, but of the device
        raise
    except (AssertionError, RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"data.image_size={height}: the model refuses images of {height}x{width} ({reason})") from None
    finally:
        model.train(was_training)
    if not isinstance(outputs, Tensor) or outputs.ndim != 2 or outputs.shape[1] < num_classes:
        shape = list(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
        raise ValueError(f"model.name: gives {shape} for one image; it must be [1, {num_classes}], a score per class")


def train_image_size(model: nn.Module, config: DataConfig, images: Images) -> int:
    """Pixels of a side: what is given in the config, else the data's own, else what the model was made for."""
    return int(config.image_size or images.image_size or resolve_model_data_config(model)["input_size"][-1])


def preprocessing_for(model: nn.Module, config: DataConfig, images: Images) -> Preprocessing:
    """What is given in the config, else the data's own, else what the model was made with, else timm's defaults."""
    if config.eval_image_size is not None and isinstance(images.val, InMemory):
        raise ValueError(f"data.eval_image_size={config.eval_image_size}: the images of {config.name} have one size")
    made_with = resolve_model_data_config(model)
    channels = images.in_chans
    sides = config.eval_image_size or config.image_size or images.image_size
    mean, std = config.mean or images.mean, config.std or images.std
    if mean is None or std is None:
        fits = hasattr(model, "pretrained_cfg") and len(made_with["mean"]) == channels
        mean, std = (made_with["mean"], made_with["std"]) if fits else ((0.5,) * channels, (0.5,) * channels)
    for key, values in (("mean", mean), ("std", std)):
        if len(values) != channels:
            raise ValueError(f"data.{key}={list(values)}: one number per channel, and these images have {channels}")
    return Preprocessing(
        input_size=(channels, sides, sides) if sides else (channels, *made_with["input_size"][1:]),
        mean=tuple(mean),
        std=tuple(std),
        crop_pct=config.crop_pct or (1.0 if isinstance(images.val, InMemory) else made_with["crop_pct"]),
        crop_mode=made_with["crop_mode"],
        interpolation=config.interpolation or made_with["interpolation"],
    )


def build_ema(model: nn.Module, config: EmaConfig, foreach: bool = True) -> ModelEmaV3 | None:
    """Averaged weights beside the model. `foreach`: all tensors in one go, which mixed kinds of tensors do not allow."""
    if config.decay is None:
        return None
    return (Average if foreach else ModelEmaV3)(model, decay=config.decay, use_warmup=config.warmup, foreach=foreach)


class Average(ModelEmaV3):
    """timm's, without two lists of all tensors made anew in every step: a state_dict's tensors stay where they are."""

    def apply_update_(self, model: nn.Module, decay: float) -> None:
        if not hasattr(self, "_pairs"):
            own, other = self.module.state_dict().values(), model.state_dict().values()
            self._pairs = list(zip(own, other, strict=True))
            self._own, self._other = ([p[i] for p in self._pairs if p[0].is_floating_point()] for i in range(2))
        for average, value in self._pairs:
            if not average.is_floating_point():
                average.copy_(value)
        self._foreach_lerp_(self._own, self._other, weight=1 - decay)


def count_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _takes_image_size(name: str) -> bool:
    """Models of a fixed input size take `img_size`; ResNets and their like refuse the argument."""
    cfg = timm.get_pretrained_cfg(name, allow_unregistered=True)
    if cfg is not None and cfg.fixed_input_size:
        return True
    return "img_size" in inspect.signature(timm.model_entrypoint(name)).parameters

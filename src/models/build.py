"""Build the model from timm or from your own class. Single-device code: a strategy wraps the model (src/parallel/)."""

from __future__ import annotations

import importlib
import inspect
import socket
from typing import Any
from urllib.parse import urlparse
from urllib.request import getproxies

import timm
import torch
from huggingface_hub import constants
from timm.layers import convert_sync_batchnorm
from timm.models import _builder
from torch import Tensor, nn

from src.data.transforms import Preprocessing
from src.engine.keys import is_own_class
from src.engine.machine.text import yaml_text
from src.schema import ModelConfig


def build_model(
    config: ModelConfig, classes: int, in_chans: int, image_size: int | None, device: torch.device
) -> nn.Module:
    """Build the configured model for the data's classes, channels and image size. The caller loads model.weights."""
    if config.num_classes is not None and config.num_classes < classes:
        raise ValueError(
            f"model.num_classes={config.num_classes}: the data has {classes} classes; use {classes} or more"
        )
    if config.in_chans not in (None, in_chans):
        raise ValueError(
            f"model.in_chans={config.in_chans}: the data's images have {in_chans} channels; leave it at null"
        )
    arguments: dict[str, Any] = {"num_classes": config.num_classes or classes, "in_chans": in_chans}
    is_own = is_own_class(config.name)
    try:
        model = _own_model(config, arguments) if is_own else _timm_model(config, arguments, image_size)
    except (TypeError, AttributeError, AssertionError) as error:
        # Other errors are bugs inside your class, and their traceback is shown.
        if is_own and not (isinstance(error, TypeError) and "argument" in str(error)):
            raise
        raise ValueError(f"model.kwargs={config.kwargs}: {config.name} does not accept them ({error})") from None
    if config.grad_checkpointing:
        _checkpoint_gradients(model, config.name)
    if config.sync_bn:
        # timm's function, because torch's drops the activation that timm's BatchNorm holds.
        model = convert_sync_batchnorm(model)
    memory_format = torch.channels_last if config.channels_last else torch.preserve_format
    model = model.to(device=device, memory_format=memory_format)
    assert isinstance(model, nn.Module)
    return model


def _own_model(config: ModelConfig, arguments: dict[str, Any]) -> Any:
    module, _, name = config.name.rpartition(".")
    model_class = getattr(importlib.import_module(module), name)
    if not (isinstance(model_class, type) and issubclass(model_class, nn.Module)):
        raise ValueError(f"model.name={config.name}: not a torch.nn.Module class")
    return model_class(**arguments, **config.kwargs)


def _timm_model(config: ModelConfig, arguments: dict[str, Any], image_size: int | None) -> Any:
    if image_size is not None and _takes_image_size(config.name):
        arguments["img_size"] = image_size
    arguments |= config.kwargs
    if config.weights is not None:
        return _with_checkpoint_filter(config.name, arguments)
    if not config.pretrained:
        return timm.create_model(config.name, **arguments)
    _give_up_early()
    try:
        return timm.create_model(config.name, pretrained=True, **arguments)
    # The weights are not cached and the hub cannot be reached, or no weights have this name.
    except (OSError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"model.pretrained=true: the weights of {config.name} could not be downloaded ({reason}); "
            "check the network, copy a filled cache to HF_HOME, or give a file: model.weights=<file>"
        ) from None


def _with_checkpoint_filter(name: str, arguments: dict[str, Any]) -> Any:
    """Build a timm model with random weights. Store timm's filter for its weight files as `checkpoint_filter`.

    timm passes the filter to its loader and does not keep it, so this function intercepts that call.
    """
    passed: dict[str, Any] = {}

    def take_arguments(model: nn.Module, **kwargs: Any) -> None:
        passed.update(kwargs)

    load = _builder.load_pretrained
    _builder.load_pretrained = take_arguments  # type: ignore[assignment]
    try:
        model: Any = timm.create_model(name, pretrained=True, **arguments)
    finally:
        _builder.load_pretrained = load
    model.checkpoint_filter = passed.get("filter_fn")
    return model


def _give_up_early() -> None:
    """Set the Hugging Face client offline if the hub's host name does not resolve, because it would retry for 46 s."""
    # A proxy resolves names itself.
    if any(getproxies().get(scheme) for scheme in ("http", "https", "all")):
        return
    try:
        socket.getaddrinfo(urlparse(constants.ENDPOINT).hostname, 443)
    except OSError:
        constants.HF_HUB_OFFLINE = True


def _checkpoint_gradients(model: Any, name: str) -> None:
    try:
        model.set_grad_checkpointing(True)
    except (AttributeError, AssertionError) as error:
        raise ValueError(f"model.grad_checkpointing=true: {name} does not support it ({error})") from None


def compile_model(model: nn.Module, mode: bool | str, device: torch.device) -> nn.Module:
    """Wrap `model` by torch.compile in this mode, a name or True for torch's default. It is compiled in the first step.

    Checkpoints and averages read `model` itself, which shares the parameters. Raises ValueError on a CPU without a C++
    compiler, because that step would fail with a long traceback.
    """
    if not mode:
        return model
    if device.type == "cpu":
        from torch._inductor.cpp_builder import get_cpp_compiler

        try:
            get_cpp_compiler()
        except RuntimeError as error:
            raise ValueError(
                f"model.compile={yaml_text(mode)}: needs a C++ compiler on a CPU ({error}); install g++, or set it to false"
            ) from None
    compiled: Any = torch.compile(model, mode=None if mode is True else mode)
    assert isinstance(compiled, nn.Module)
    return compiled


def check_image_size(model: nn.Module, preprocessing: Preprocessing, num_classes: int, device: torch.device) -> None:
    """Run `model` on one black image, and raise ValueError if it does not accept the image size."""
    image = torch.zeros(1, *preprocessing.input_size, device=device)
    height, width = image.shape[-2:]
    was_training = model.training
    try:
        with torch.no_grad():
            outputs = model.eval()(image)
    # A subclass of RuntimeError, but not about the image size.
    except torch.OutOfMemoryError:
        raise
    except (AssertionError, RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"data.image_size={height}: the model does not accept images of {height}x{width} ({reason})"
        ) from None
    finally:
        model.train(was_training)
    if not isinstance(outputs, Tensor) or outputs.ndim != 2 or outputs.shape[1] < num_classes:
        shape = list(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
        raise ValueError(
            f"model.name: expected an output [1, {num_classes}] for one image, a score per class, got {shape}"
        )


def _takes_image_size(name: str) -> bool:
    """Return True if the timm model takes an `img_size` argument: models with a fixed input size do, ResNets do not."""
    cfg = timm.get_pretrained_cfg(name, allow_unregistered=True)
    if cfg is not None and cfg.fixed_input_size:
        return True
    return "img_size" in inspect.signature(timm.model_entrypoint(name)).parameters

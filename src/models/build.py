"""Build a model of timm or a model class of your own. This is single-device code; a strategy wraps
the model later (timm_parallel/parallel/).
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import timm
import torch
from timm.layers import convert_sync_batchnorm
from torch import nn

from src.schema import ModelConfig
from timm_parallel import (
    as_size,
    create_model_with_filter,
    import_class,
    is_own_class,
    refuse_failed_download,
    refuse_wrong_arguments,
)


def build_model(
    config: ModelConfig,
    outputs: int,
    in_chans: int,
    image_size: int | Sequence[int] | None,
    device: torch.device,
) -> nn.Module:
    """Build the model of the config, with the outputs of the task, and the channels and image size
    of the data. The caller loads the weights of model.weights. `image_size`: a value of
    data.image_size; None: that of the model.
    """
    if config.num_classes is not None and config.num_classes < outputs:
        raise ValueError(
            f"model.num_classes={config.num_classes}: the task has {outputs} outputs; use "
            f"{outputs} or more"
        )
    if config.in_chans not in (None, in_chans):
        raise ValueError(
            f"model.in_chans={config.in_chans}: the data's images have {in_chans} channels; leave "
            "it at null"
        )
    arguments: dict[str, Any] = {"num_classes": config.num_classes or outputs, "in_chans": in_chans}
    # model.kwargs may be meant for another model: model.name on the command line replaces only this
    # key of conf/model/<option>.yaml.
    fix = "; give the model.name that they are for, or remove them" if config.kwargs else ""
    receiver, is_own = f"model.name={config.name}", is_own_class(config.name)
    errors = () if is_own else (AttributeError, AssertionError)
    download: AbstractContextManager[None] = nullcontext()
    if config.pretrained:
        download = refuse_failed_download(
            "model.pretrained=true", config.name, "give a file: model.weights=<file>"
        )
    with (
        refuse_wrong_arguments(
            "model.kwargs",
            config.kwargs,
            receiver,
            *errors,
            fix=fix,
        ),
        download,
    ):
        if is_own:
            model = _own_model(config, arguments)
        else:
            model = _timm_model(config, arguments, image_size)
    if config.grad_checkpointing:
        try:
            model.set_grad_checkpointing(True)
        except (AttributeError, AssertionError) as error:
            raise ValueError(
                f"model.grad_checkpointing=true: {config.name} does not support it ({error}); use "
                "false"
            ) from None
    if config.sync_bn:
        # Convert with timm's function, because torch's would drop the activation inside timm's
        # BatchNorm.
        model = convert_sync_batchnorm(model)
    if config.channels_last == "auto":
        config.channels_last = device.type == "cuda" and is_convolutional(model)
    memory_format = torch.channels_last if config.channels_last else torch.preserve_format
    model = model.to(device=device, memory_format=memory_format)
    assert isinstance(model, nn.Module)
    return model


def is_convolutional(model: nn.Module) -> bool:
    """Return True if convolutions of images hold more than half of a model's parameters. Their
    kernels on GPUs are faster in channels-last memory format. The patch embedding of a ViT is a
    convolution too, but holds few of its parameters.
    """
    layers = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    count = sum(parameter.numel() for layer in layers for parameter in layer.parameters())
    return 2 * count > sum(parameter.numel() for parameter in model.parameters())


def _own_model(config: ModelConfig, arguments: dict[str, Any]) -> Any:
    model_class = import_class("model.name", config.name, nn.Module)
    if getattr(model_class, "has_pretrained", False):
        arguments["pretrained"] = config.pretrained
    return model_class(**arguments, **config.kwargs)


def _timm_model(
    config: ModelConfig, arguments: dict[str, Any], image_size: int | Sequence[int] | None
) -> Any:
    if image_size is not None and _takes_image_size(config.name):
        arguments["img_size"] = as_size(image_size)
    arguments |= config.kwargs
    if config.weights is not None:
        return create_model_with_filter(config.name, arguments)
    return timm.create_model(config.name, pretrained=config.pretrained, **arguments)


def _takes_image_size(name: str) -> bool:
    """Return True if a timm model takes the argument `img_size`. Models with a fixed input size do,
    ResNets do not.
    """
    cfg = timm.get_pretrained_cfg(name, allow_unregistered=True)
    if cfg is not None and cfg.fixed_input_size:
        return True
    return "img_size" in inspect.signature(timm.model_entrypoint(name)).parameters

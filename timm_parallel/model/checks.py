"""Checks before training: the hub of pretrained weights is reachable, torch can compile, the model
accepts the images, the optimizer has all parameters.
"""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlparse
from urllib.request import getproxies

import torch
from huggingface_hub import constants
from torch import nn
from torch.optim import Optimizer

from timm_parallel.machine.text import yaml_text
from timm_parallel.parallel.group import ProcessGroup
from timm_parallel.parallel.lockstep import Lockstep
from timm_parallel.parallel.strategy import HasParameters


def skip_unreachable_hub() -> None:
    """Set the Hugging Face client offline if the hub's host name does not resolve, because it would
    retry for 46 s.
    """
    # A proxy resolves names itself.
    if any(getproxies().get(scheme) for scheme in ("http", "https", "all")):
        return
    try:
        socket.getaddrinfo(urlparse(constants.ENDPOINT).hostname, 443)
    except OSError:
        constants.HF_HUB_OFFLINE = True


@contextmanager
def refuse_failed_download(setting: str, name: str, instead: str) -> Iterator[None]:
    """Raise ValueError if the pretrained weights of `name` cannot be loaded in this block.

    `setting`: what asks for them. `instead`: what else the user can do.
    """
    skip_unreachable_hub()
    try:
        yield
    # The weights are not cached and the hub cannot be reached, or no weights have this name.
    except (OSError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"{setting}: the weights of {name} could not be downloaded ({reason}); check the "
            f"network, copy a filled cache to HF_HOME, or {instead}"
        ) from None


def compile_model(model: nn.Module, mode: bool | str, device: torch.device) -> nn.Module:
    """Wrap `model` by torch.compile in this mode, a name or True for torch's default. It is
    compiled in the first step.

    Checkpoints and averages read `model` itself, which shares the parameters. Raises ValueError
    without the compiler that torch (on a CPU) or Triton (on a GPU) calls, because that step would
    fail with a long traceback.
    """
    if not mode:
        return model
    if device.type == "cpu":
        from torch._inductor.cpp_builder import get_cpp_compiler

        try:
            get_cpp_compiler()
        except RuntimeError as error:
            raise ValueError(
                f"model.compile={yaml_text(mode)}: needs a C++ compiler on a CPU ({error}); "
                "install g++, or set it to false"
            ) from None
    # As Triton looks for it.
    compilers = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]
    if device.type == "cuda" and not any(shutil.which(compiler) for compiler in compilers):
        raise ValueError(
            f"model.compile={yaml_text(mode)}: needs a C compiler on a GPU, for Triton "
            f"({' or '.join(compilers)}); install gcc and libc6-dev, or set it to false"
        )
    compiled: Any = torch.compile(model, mode=None if mode is True else mode)
    assert isinstance(compiled, nn.Module)
    return compiled


def run_on_black_image(
    model: nn.Module, input_size: tuple[int, int, int], device: torch.device
) -> Any:
    """Run `model` on one black image of `input_size` (channels, height, width). Return its outputs.

    Raises ValueError if the model does not accept the size.
    """
    image = torch.zeros(1, *input_size, device=device)
    height, width = image.shape[-2:]
    sides = height if height == width else [height, width]
    was_training, cudnn = model.training, torch.backends.cudnn
    # cuDNN would time its algorithms for a batch of one.
    benchmark, cudnn.benchmark = cudnn.benchmark, False
    try:
        with torch.no_grad():
            outputs = model.eval()(image)
    # A subclass of RuntimeError, but not about the image size.
    except torch.OutOfMemoryError:
        raise
    except (AssertionError, RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"data.image_size={sides}: the model does not accept images of {height}x{width} "
            f"({reason})"
        ) from None
    finally:
        model.train(was_training)
        cudnn.benchmark = benchmark
    return outputs


def check_sharded_model(
    model: nn.Module, input_size: tuple[int, int, int], group: ProcessGroup
) -> None:
    """Run a sharded model, as fsdp evaluates it, on one black image, which it has accepted before
    it was sharded. Does nothing for a strategy that evaluates in another way. Collective.

    Raises ValueError on all ranks if the model reads a parameter while only a part of it is there.
    """
    if not isinstance(model, Lockstep):
        return
    was_training, reason = model.training, ""
    try:
        model.eval()(torch.zeros(1, *input_size, device=model.device))
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:200]
    # A rank that has lost another one fails here with an error of the group.
    if any(group.gather(reason)):
        raise ValueError(
            "parallel=fsdp: the model uses a parameter outside of the forward pass of its block "
            f"({reason}); let a method shard_blocks() of the model return the blocks to shard ([] "
            "for none), or use parallel=ddp"
        )
    model.finish()
    model.train(was_training)


def check_is_complete(optimizer: Optimizer, model: HasParameters) -> None:
    """Raise ValueError if the optimizer lacks a parameter that is to be trained: it would keep its
    initial value.
    """
    known = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    missing = [
        name for name, p in model.named_parameters() if p.requires_grad and id(p) not in known
    ]
    if missing:
        shown = ", ".join(missing[:8]) + (
            f" and {len(missing) - 8} more" if len(missing) > 8 else ""
        )
        raise ValueError(
            f"optim: no parameter group has {shown}; add them to one in build_optimizer, or freeze "
            "them with requires_grad_(False)"
        )

"""Checks of a model that run before training starts.

They detect pretrained weights that cannot be downloaded, a missing compiler, an image size that the
model rejects, and parameters that the optimizer lacks.
"""

from __future__ import annotations

import math
import os
import shutil
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlparse
from urllib.request import getproxies

import torch
from huggingface_hub import constants
from torch import nn
from torch.optim import Optimizer

from timm_parallel.keys import ResolvedConfig
from timm_parallel.machine.text import yaml_text
from timm_parallel.model.flops import without_storage
from timm_parallel.model.freeze import frozen_modules
from timm_parallel.parallel.fully_sharded import LockstepNetworks
from timm_parallel.parallel.group import ProcessGroup
from timm_parallel.parallel.networks import Networks

if TYPE_CHECKING:
    from timm_parallel.batch import Batch
    from timm_parallel.data.loader import Loader
    from timm_parallel.task import Task


def skip_unreachable_hub() -> None:
    """Set the Hugging Face client offline if the host name of the hub does not resolve.

    Without this, the client would retry a download for 46 s before it fails.
    """
    # Skip the test behind a proxy, because the proxy resolves host names instead of this machine.
    if any(getproxies().get(scheme) for scheme in ("http", "https", "all")):
        return
    try:
        socket.getaddrinfo(urlparse(constants.ENDPOINT).hostname, 443)
    except OSError:
        constants.HF_HUB_OFFLINE = True


@contextmanager
def refuse_failed_download(setting: str, name: str, instead: str) -> Iterator[None]:
    """Raise ValueError if the pretrained weights of a model cannot be loaded in the `with` block.

    `setting`: the key and value that request the weights. `instead`: what the user can do if a
    download is impossible. Both are texts for the message.
    """
    skip_unreachable_hub()
    try:
        yield
    # These errors mean that the hub cannot be reached and the weights are not cached, or that no
    # weights have this name.
    except (OSError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"{setting}: the weights of {name} could not be downloaded ({reason}); check the "
            f"network, copy a filled cache to HF_HOME, or {instead}"
        ) from None


def compile_model(model: nn.Module, mode: bool | str, device: torch.device) -> nn.Module:
    """Wrap a model with torch.compile, which compiles it in the first training step.

    `mode`: a mode of torch.compile, or True for torch's default; with False, the model is returned
    unchanged. The original model shares its parameters with the wrapper, so checkpoints still read
    the original. Raises ValueError if the C or C++ compiler that torch needs is missing. Without
    this check, the first training step would fail with a long traceback.
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
                "install g++, or set model.compile=false"
            ) from None
    # Search for a C compiler in the same way as Triton does.
    compilers = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]
    if device.type == "cuda" and not any(shutil.which(compiler) for compiler in compilers):
        raise ValueError(
            f"model.compile={yaml_text(mode)}: needs a C compiler on a GPU, for Triton "
            f"({' or '.join(compilers)}); install gcc and libc6-dev, or set model.compile=false"
        )
    return cast(nn.Module, torch.compile(model, mode=None if mode is True else mode))


def check_networks(task: Task[Any], networks: Networks, batch: Batch) -> None:
    """Let a task check its networks on a first batch, before anything starts.

    Raises ValueError if they do not accept images of this size, or if their outputs do not fit the
    task. A batch without samples, which could not be read, is not checked.
    """
    if not len(batch):
        return
    height, width = batch.image.shape[-2:]
    sides = height if height == width else [height, width]
    was_training, cudnn = networks.training, torch.backends.cudnn
    # Disable cuDNN's benchmark mode, because it would time its algorithms for a batch of one image.
    benchmark, cudnn.benchmark = cudnn.benchmark, False
    try:
        with torch.no_grad():
            outputs = task.predict(networks.eval(), batch)
    # Do not report an out-of-memory error as a wrong image size, although it is a RuntimeError too.
    except torch.OutOfMemoryError:
        raise
    except (AssertionError, RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"data.image_size={sides}: the model does not accept images of {height}x{width} "
            f"({reason}); choose another size"
        ) from None
    finally:
        networks.train(was_training)
        cudnn.benchmark = benchmark
    task.check_outputs(outputs, batch)


def check_batch_norm(model: nn.Module, loader: Loader, config: ResolvedConfig) -> None:
    """Raise ValueError if a BatchNorm in training mode gets a single value per channel, of which
    there is no variance. A copy of the model runs on the meta device, which computes only shapes.

    `loader`: that of the training images.
    """
    # DataParallel divides a batch into chunks of this size, and the last chunk gets the rest.
    chunk = math.ceil(config.global_batch / config.parallel.devices)
    if (config.global_batch % chunk or chunk) > 1:
        return
    shape = loader.peek(1).image.shape
    # Several views of an image are several values per channel.
    if len(shape) != 4:
        return
    copied, small = without_storage(model).train(), []

    def note(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if module.training and inputs[0].numel() == inputs[0].shape[1]:
            small.append(module)

    for module in frozen_modules(copied):
        module.eval()
    for module in copied.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and not isinstance(
            module, nn.SyncBatchNorm
        ):
            module.register_forward_pre_hook(note)
    # Ignore every exception, among them that of BatchNorm itself. A model may also need what the
    # meta device lacks.
    with suppress(Exception), torch.random.fork_rng(devices=[]), torch.device("meta"):
        copied(torch.empty(shape))
    if small:
        raise ValueError(
            f"data.batch_size={config.global_batch}: one image on a device, but "
            "BatchNorm needs two or more values per channel; "
            "use a larger batch, fewer devices, larger images, or a model without BatchNorm"
        )


def check_sharded_model(
    networks: Networks, task: Task[Any], loader: Loader, group: ProcessGroup
) -> None:
    """Predict one sample with sharded networks, to test that fsdp can evaluate them. Networks that
    are not sharded are not run.

    All ranks must call this function. Raises ValueError on all ranks if the model uses a parameter
    outside of the forward pass of the module that holds it, because fsdp gathers the parameter only
    there.
    """
    if not isinstance(networks, LockstepNetworks):
        return
    was_training, reason = networks.training, ""
    try:
        task.predict(networks.eval(), loader.peek(1))
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:200]
    # If another rank has failed, gather() raises an error of the process group here.
    if any(group.gather(reason)):
        raise ValueError(
            "parallel=fsdp: the model uses a parameter outside of the forward pass of the module "
            f"that holds it ({reason}); use parallel=ddp, or add a method shard_blocks() to the "
            "model, which returns the modules that are sharded separately ([] for none)"
        )
    networks.finish()
    networks.train(was_training)


def check_is_complete(optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]) -> None:
    """Raise ValueError if a parameter that a phase trains is missing from its optimizer, because
    training would never change it.
    """
    known = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    missing = [name for name, parameter in parameters.items() if id(parameter) not in known]
    if missing:
        shown = ", ".join(missing[:8]) + (
            f" and {len(missing) - 8} more" if len(missing) > 8 else ""
        )
        raise ValueError(
            f"optim: no parameter group has {shown}; add them to a group in build_optimizer, or "
            "freeze them with requires_grad_(False)"
        )

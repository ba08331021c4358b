"""Compute what a config needs on other hardware: shards, steps, learning rates, FLOPs, and memory
per device.

The plan allocates no tensor memory. It runs a training step on fake tensors, and hooks of autograd
collect the tensors that the backward pass needs.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

from src.app import app
from src.models.build import build_model
from src.models.preprocessing import train_image_size
from src.schema import Config, ResolvedConfig
from src.train.optim import build_optimizer
from src.train.step import AUTOCAST, Autocast, TrainStep
from timm_parallel import (
    ImageDataset,
    Task,
    as_size,
    batches_per_epoch,
    check_config,
    compose,
    freeze,
    load_dataset,
    resolve,
)
from timm_parallel.lab import Plan, measure_step

# Number of images per device below which BatchNorm's noisy statistics raise the error of a model
# (Wu and He 2018, arXiv:1803.08494, figure 1).
SMALL_FOR_BATCHNORM = 16
ONE_IMAGE = "BatchNorm needs two images per device; use a larger data.batch_size or fewer devices"


class Sizes(ImageDataset):
    """A dataset without images, which gives only the number of images, classes and channels. A plan
    uses it if the data is not on this machine.
    """

    def __init__(self, num_images: int, num_classes: int, in_chans: int) -> None:
        self.target_names = [f"class_{index}" for index in range(num_classes)]
        self.in_chans = in_chans
        # Store only a range of numbers, because a plan reads only the length of the training split.
        self.train = cast(Any, range(num_images))


def plan(
    overrides: list[str], counts: list[int], sizes: tuple[int, int] | None = None
) -> list[Plan]:
    """Compute a plan for each number of devices in `counts`. `sizes`: (training images, classes);
    None: read them from the data.
    """
    # Without data, a config may lack the folder of the data too.
    without_data = [] if sizes is None else ["data.root=null"]
    config = app.own(compose(*without_data, *overrides))
    if sizes is None:
        try:
            app.call(app.check_data, config)
        except ValueError as error:
            raise ValueError(
                f"{error}; or give images=N classes=N to plan without the data"
            ) from None
    images = load_dataset(config) if sizes is None else Sizes(*sizes, config.model.in_chans or 3)
    # The values of the weights do not change a plan, so no file is read and nothing is downloaded.
    config.model.pretrained, config.model.weights = False, None
    config.train.class_weights = None
    plans = []
    for devices in counts:
        try:
            plans.append(_count(_resolved_for(config, devices), images, devices))
        except ValueError as error:
            # The class of this torch error is ValueError, and it has no code. Only its text shows
            # that BatchNorm got a single image.
            has_one_image = "1 value per channel" in str(error)
            plans.append(Plan(devices, reason=ONE_IMAGE if has_one_image else str(error)))
    smallest = min((row.batch_size for row in plans if row.batch_size), default=0)
    for row in plans:
        if row.batch_size > smallest and config.optim.lr_rule == "none":
            row.warnings.append(
                f"the global batch is {row.batch_size / smallest:g} times that of the smallest "
                "count, but the learning rate is the same; scale it with optim.lr_rule=linear or "
                "sqrt"
            )
    return plans


def _resolved_for(config: Config, devices: int) -> ResolvedConfig:
    """Resolve the config for a number of devices. The devices need not exist on this machine."""
    config = copy.deepcopy(config)
    config.parallel.devices = devices
    # With train.accumulate=auto, plan the first attempt of the run, which does not divide the
    # batch.
    if config.train.accumulate == "auto":
        config.train.accumulate = 1
    config.parallel.choose_strategy(several=devices > 1)
    check_config(config)
    sizes = (devices, 1) if config.parallel.has_ranks else ()
    resolved = app.own_resolved(resolve(config, *sizes))
    # The ranks of a run choose the precision, and a plan has none.
    if resolved.train.precision == "auto":
        resolved.train.precision = "bf16" if resolved.parallel.accelerator == "cuda" else "fp32"
    return resolved


def _count(config: ResolvedConfig, images: ImageDataset, devices: int) -> Plan:
    batch, train = config.global_batch, config.train
    size = min(len(images.train), config.data.limit_train or len(images.train))
    batches = batches_per_epoch(size, batch, train.accumulate)
    dropped = size - batches * batch
    steps_per_epoch, steps = train.count_steps(batches)
    chunk = math.ceil(batch / devices)
    sides = config.data.image_size or images.image_size
    task = Task.find(config.train.task)(config, images.target_names)
    # Build the model on the device meta. Fake tensors would not work, because timm reads values of
    # some tensors while it builds a model.
    with torch.device("meta"):
        model = build_model(
            config.model,
            task.num_outputs,
            images.in_chans,
            None if sides is None else as_size(sides),
            torch.device("meta"),
        )
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device="cpu")
        pixels = train_image_size(model, config.data, images)
        views = (task.views,) if task.views > 1 else ()
        batch_images = torch.empty(chunk, *views, images.in_chans, *pixels)
        flops, memory = _step(config, model, task, batch_images)
    return Plan(
        devices=devices,
        strategy=config.parallel.strategy,
        batch_size=batch,
        batch_size_per_device=chunk,
        images=size,
        images_per_device=batches * batch // devices,
        dropped_per_epoch=dropped,
        steps_per_epoch=steps_per_epoch,
        steps=steps,
        learning_rate=config.learning_rate,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        flops_per_step=flops * devices * train.accumulate,
        bytes_per_device=memory,
        warnings=list(_warnings(config, model, chunk, dropped, size)),
    )


def _step(
    config: ResolvedConfig, model: nn.Module, task: Task[ResolvedConfig], images: Tensor
) -> tuple[int, int]:
    """Run a training step on a fake batch of one device. Return the FLOPs of its forward and
    backward pass, and its memory.
    """
    size = (images.shape[-2], images.shape[-1])
    scores, targets = task.blank(len(images), size)
    if config.data.augment.mixes:
        # Mixed targets have an entry for each output of the model.
        targets = scores.new_zeros(len(images), config.model.num_classes or task.num_outputs)
    freeze(model, config.model.freeze)
    task.check_outputs(model(images.flatten(0, -4)[:2]))
    autocast = Autocast(model, "cpu", AUTOCAST[config.train.precision])
    # Build the loss with real tensors, because it may load a model, such as a teacher.
    with unset_fake_temporarily():
        criterion: Any = task.build_criterion(None)
    if isinstance(criterion, nn.Module):
        criterion.to_empty(device="cpu")
    step = TrainStep(autocast, criterion, task).train()
    optimizer = build_optimizer(config.optim, config.learning_rate, model, step=step)
    return measure_step(
        config.parallel,
        step,
        model,
        optimizer,
        (images, targets),
        has_ema=config.model.ema.decay is not None,
    )


def _warnings(
    config: Config, model: nn.Module, chunk: int, dropped: int, images: int
) -> Iterator[str]:
    has_batch_norm = any(
        isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()
    )
    if has_batch_norm and chunk < SMALL_FOR_BATCHNORM and not config.model.sync_bn:
        yield (
            f"per-device batch {chunk} with BatchNorm: its statistics are noisy; "
            "set model.sync_bn=true, or use a larger batch"
        )
    if dropped > 0.05 * images:
        yield (
            f"{dropped} of {images} images are dropped in every epoch; a smaller "
            "data.batch_size would drop fewer"
        )
    if config.model.grad_checkpointing:
        yield (
            "model.grad_checkpointing=true: the memory does not include the inputs of the "
            "blocks, which are kept"
        )

"""Compute what a config needs on other hardware: shards, steps, learning rates, FLOPs, and tensor
bytes per device.

Nothing is allocated: a step runs on fake tensors, and autograd's hooks collect the tensors that the
backward pass needs.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

from src.app import app
from src.data.datasets import build_dataset
from src.models.build import build_model
from src.models.preprocessing import train_image_size
from src.schema import Config, ResolvedConfig
from src.tasks import build_task, find_task
from src.train.check import check_data
from src.train.optim import build_optimizer
from src.train.step import AUTOCAST, Autocast, TrainStep
from timm_parallel.config.validate import check_combination
from timm_parallel.data.dataset import ImageDataset, as_size
from timm_parallel.data.fractions import batches_per_epoch
from timm_parallel.lab.forecast.plan import Bytes, Plan
from timm_parallel.measure.flops import flop_counter, saved_for_backward
from timm_parallel.model.freeze import freeze
from timm_parallel.parallel.blocks import blocks_of
from timm_parallel.state.parts import count_parameters
from timm_parallel.state.progress import count_steps
from timm_parallel.task import Task

SMALL_FOR_BATCHNORM = (
    16  # images per device; below, error rises (Wu & He 2018, arXiv:1803.08494, figure 1)
)
ONE_IMAGE = "BatchNorm needs two images per device; a larger data.batch_size, or fewer devices"


class Sizes(ImageDataset):
    """A dataset of which only the sizes are known, because its images are not on this machine."""

    def __init__(self, num_images: int, num_classes: int, in_chans: int) -> None:
        self.target_names = [f"class_{index}" for index in range(num_classes)]
        self.in_chans = in_chans
        # Only its length is read.
        self.train = cast(Any, range(num_images))


def plan(
    overrides: list[str], counts: list[int], sizes: tuple[int, int] | None = None
) -> list[Plan]:
    """Return a plan per device count. `sizes`: (training images, classes), instead of reading the
    data.
    """
    config = app.compose(*overrides)
    if sizes is None:
        try:
            check_data(config)
        except ValueError as error:
            raise ValueError(
                f"{error}; or give images=N classes=N to plan without the data"
            ) from None
    images = (
        build_dataset(config.data, target=find_task(config.train.task).target)
        if sizes is None
        else Sizes(*sizes, config.model.in_chans or 3)
    )
    # A plan does not depend on the values of the weights.
    config.model.pretrained, config.model.weights = False, None
    config.train.class_weights = None
    plans = []
    for devices in counts:
        try:
            plans.append(_count(_resolved_for(config, devices), images, devices))
        except ValueError as error:
            # torch has no type or code for it.
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
    """Resolve the config for `devices` devices without checking the hardware of this machine."""
    config = copy.deepcopy(config)
    config.parallel.devices = devices
    # A plan of auto is that of the first attempt, with the whole batch.
    if config.train.accumulate == "auto":
        config.train.accumulate = 1
    config.parallel.choose_strategy(several=devices > 1)
    check_combination(config)
    return app.resolve(config, devices, 1) if config.parallel.has_ranks else app.resolve(config)


def _count(config: ResolvedConfig, images: ImageDataset, devices: int) -> Plan:
    batch, train = config.global_batch, config.train
    size = min(len(images.train), config.data.limit_train or len(images.train))
    batches = batches_per_epoch(size, batch, train.accumulate)
    dropped = size - batches * batch
    steps_per_epoch, steps = count_steps(train, batches)
    chunk = math.ceil(batch / devices)
    sides = config.data.image_size or images.image_size
    task = build_task(config, images.target_names)
    # On meta, because timm reads values of some tensors while it builds a model, which fake tensors
    # lack.
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
        parameters=count_parameters(model),
        flops_per_step=flops * devices * train.accumulate,
        bytes=memory,
        warnings=list(_warnings(config, model, chunk, dropped, size)),
    )


def _step(
    config: ResolvedConfig, model: nn.Module, task: Task[ResolvedConfig], images: Tensor
) -> tuple[int, Bytes]:
    """Run a step on a fake batch of one device. Return its FLOPs (forward and backward) and its
    memory.
    """
    size = (images.shape[-2], images.shape[-1])
    scores, targets = task.blank(len(images), size)
    if config.data.augment.mixes:
        # As many as the model has outputs.
        targets = scores.new_zeros(len(images), config.model.num_classes or task.num_outputs)
    freeze(model, config.model.freeze)
    task.check_outputs(model(images.flatten(0, -4)[:2]))
    autocast = Autocast(model, "cpu", AUTOCAST[config.train.precision])
    # With real tensors, because a criterion may load a model, for example a teacher.
    with unset_fake_temporarily():
        criterion: Any = task.build_criterion(None)
    if isinstance(criterion, nn.Module):
        criterion.to_empty(device="cpu")
    step = TrainStep(autocast, criterion, task).train()
    optimizer = build_optimizer(config.optim, config.learning_rate, model, step=step)
    averaged = [*model.parameters(), *model.buffers()]
    weights = [*step.parameters(), *step.buffers()]
    with flop_counter() as counter, saved_for_backward(excluding=[*weights, images]) as saved:
        loss, _ = step(images, targets)
        loss.backward()
    optimizer.step()
    gradients = [p.grad for p in step.parameters() if p.grad is not None]
    states = (
        value
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor)
    )
    parallel = config.parallel
    parts = (parallel.shard_size or parallel.devices) if parallel.shards else 1
    memory = Bytes(
        weights=_size(weights) // parts,
        gradients=_size(gradients) // parts,
        optimizer=_size(states) // parts,
        ema=0 if config.model.ema.decay is None else _size(averaged) // parts,
        activations=sum(storage.nbytes() for storage in saved.values()),
        batch=_size([images, targets]),
        buckets=_size(gradients)
        if parallel.has_buckets and not parallel.gradient_as_bucket_view
        else 0,
        gathered=_gathered(config, model) if parts > 1 else 0,
    )
    return counter.get_total_flops(), memory


def _gathered(config: ResolvedConfig, model: nn.Module) -> int:
    """Return the most bytes of whole parameters that fsdp holds at once: those outside blocks, and
    of two blocks.

    The second block is fetched while the first computes.
    """
    dtype = AUTOCAST[config.train.precision]
    sizes = {p: p.numel() * (dtype or p.dtype).itemsize for p in model.parameters()}
    blocks = sorted(
        sum(sizes[parameter] for parameter in block.parameters()) for block in blocks_of(model)
    )
    freed = 0 if config.parallel.reshard_after_forward is False else sum(blocks[:-2])
    return sum(sizes.values()) - freed


def _size(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _warnings(
    config: Config, model: nn.Module, chunk: int, dropped: int, images: int
) -> Iterator[str]:
    has_batch_norm = any(
        isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()
    )
    if has_batch_norm and chunk < SMALL_FOR_BATCHNORM and not config.model.sync_bn:
        yield (
            f"per-device batch {chunk} with BatchNorm: its statistics are noisy; "
            "model.sync_bn=true, or a larger batch"
        )
    if dropped > 0.05 * images:
        yield (
            f"{dropped} of {images} images are dropped in every epoch; a smaller "
            "data.batch_size drops fewer"
        )
    if config.model.grad_checkpointing:
        yield (
            "model.grad_checkpointing=true: activations do not include the inputs that blocks keep"
        )

"""Compute what a config needs on other hardware: shards, steps, learning rates, FLOPs, and memory
per device.

The plan allocates no tensor memory. It runs a training step on fake tensors, and hooks of autograd
collect the tensors that the backward pass needs.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import pandas as pd
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

from src.models.build import build_model
from src.models.preprocessing import train_image_size
from src.schema import Config, ResolvedConfig
from src.tasks.images import ImageTask
from src.train.optim import build_optimizer
from timm_parallel import (
    Batch,
    ImageDataset,
    InMemory,
    Networks,
    autocast,
    batches_per_epoch,
    check_config,
    check_data,
    check_networks,
    compose,
    find_task,
    freeze,
    load_dataset,
    measure_step,
    resolve,
    stretched,
)

log = logging.getLogger(__name__)
# Number of images per device below which BatchNorm's noisy statistics raise the error of a model
# (Wu and He 2018, arXiv:1803.08494, figure 1).
SMALL_FOR_BATCHNORM = 16
UNKNOWN = (
    "FLOPs and memory are unknown, because the losses of the task do not work on tensors without "
    "values; train a few steps instead (train.max_steps=3)"
)


COLUMNS = (
    "devices",
    "batch",
    "per device",
    "images/device",
    "dropped",
    "steps",
    "lr",
    "GFLOP/step",
    "MiB/device",
)


@dataclass
class Plan:
    """Sizes and steps of a run on a number of devices. If the run is not possible, only `reason` is
    set.
    """

    devices: int
    reason: str = ""
    strategy: str = ""
    # Number of images of all devices in one batch.
    batch_size: int = 0
    # Number of images that one device gets of a batch. If the parts differ, the largest counts.
    batch_size_per_device: int = 0
    # Number of images of the training split.
    images: int = 0
    # Number of images that one device processes in an epoch.
    images_per_device: int = 0
    dropped_per_epoch: int = 0
    steps_per_epoch: int = 0
    steps: int = 0
    # Highest learning rate of the schedule.
    learning_rate: float = 0.0
    parameters: int = 0
    # Operations of the forward and backward pass on all devices. A multiply-add counts as 2. None:
    # the losses need values of tensors, which a plan does not have.
    flops_per_step: int | None = None
    # Estimated memory of the tensors on one device. None: as above.
    bytes_per_device: int | None = None
    warnings: list[str] = field(default_factory=list)


class Sizes(ImageDataset):
    """A dataset of black images of one pixel, whose targets are zeros. A plan uses it if the data
    is not on this machine.
    """

    def __init__(self, num_images: int, num_classes: int, in_chans: int, target: str) -> None:
        """`target`: kind of target, as in Task.target."""
        self.target_names = [f"class_{index}" for index in range(num_classes)]
        self.in_chans = in_chans
        image = torch.zeros(in_chans, 1, 1, dtype=torch.uint8)
        targets = {
            "labels": torch.zeros(num_classes),
            "numbers": torch.zeros(num_classes),
            "mask": torch.zeros(1, 1, dtype=torch.uint8),
        }
        label = targets.get(target, torch.tensor(0))
        # All images are views of one.
        self.train = InMemory(*(of.expand(num_images, *of.shape) for of in (image, label)))


def plan(
    overrides: list[str], counts: list[int], sizes: tuple[int, int] | None = None
) -> list[Plan]:
    """Compute a plan for each number of devices in `counts`. `sizes`: (training images, classes);
    None: read them from the data.
    """
    # Without data, a config may lack the folder of the data too.
    without_data = [] if sizes is None else ["data.root=null"]
    config = compose(*without_data, *overrides)
    assert isinstance(config, Config)
    if sizes is None:
        try:
            check_data(config)
        except ValueError as error:
            raise ValueError(
                f"{error}; or give images=N classes=N to plan without the data"
            ) from None
        images = load_dataset(config)
    else:
        target = find_task(config.train.task, ImageTask).target
        images = Sizes(*sizes, config.model.in_chans or 3, target)
    # The values of the weights do not change a plan, so no file is read and nothing is downloaded.
    config.model.pretrained, config.model.weights = False, None
    config.train.class_weights = None
    plans = []
    for devices in counts:
        try:
            plans.append(_count(_resolved_for(config, devices), images, devices))
        except ValueError as error:
            plans.append(Plan(devices, reason=str(error)))
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
    resolved = resolve(config, *sizes)
    assert isinstance(resolved, ResolvedConfig)
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
    task = find_task(config.train.task, ImageTask)(config, images.target_names)
    # Build the model on the device meta. Fake tensors would not work, because timm reads values of
    # some tensors while it builds a model.
    with torch.device("meta"):
        model = build_model(
            config.model,
            task.num_outputs,
            images.in_chans,
            sides,
            torch.device("meta"),
        )
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device="cpu")
        pixels = train_image_size(model, config.data, images)
        with unset_fake_temporarily():
            sample = _sample(config, task, images, pixels)
        measured = _step(config, model, task, stretched(sample, chunk, "cpu"))
    flops, memory = measured or (None, None)
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
        flops_per_step=None if flops is None else flops * devices * train.accumulate,
        bytes_per_device=memory,
        warnings=[
            *_warnings(config, model, chunk),
            *([UNKNOWN] if measured is None else []),
        ],
    )


def _sample(
    config: ResolvedConfig,
    task: ImageTask,
    images: ImageDataset,
    pixels: tuple[int, int],
) -> Batch:
    """Return one sample as a training step gets it."""
    image, target = images.train[0]
    mean = images.mean or (0.5,) * images.in_chans
    transform = task.train_transform(pixels, True, mean)
    if transform is not None:
        image, target = transform(image, target)
    labels = task.collate([target])
    fields = labels if isinstance(labels, dict) else {"target": labels}
    if config.data.augment.mixes:
        # Mixed targets have an entry for each output of the model.
        fields["target"] = torch.zeros(1, config.model.num_classes or task.num_outputs)
    return Batch({"image": image[None].float(), **fields})


def _step(
    config: ResolvedConfig, model: nn.Module, task: ImageTask, batch: Batch
) -> tuple[int, int] | None:
    """Run a training step on a fake batch of one device. Return the FLOPs of its forward and
    backward passes, and its memory; None if the losses need values of tensors.
    """
    freeze(model, config.model.freeze)
    # Build the networks with real tensors, because a loss may load a model, such as a teacher.
    with unset_fake_temporarily():
        networks = task.networks(model)
    # The model has fake tensors already, and torch could not replace them again.
    of_model = set(model.modules())
    for module in Networks(networks).modules():
        if module not in of_model:
            module.to_empty(device="cpu", recurse=False)
    for name, (source, _) in task.averages.items():
        networks[name] = copy.deepcopy(networks[source]).requires_grad_(False)
    check_networks(task, Networks(networks), batch)
    optimizers = []
    for phase, names in task.phases.items():
        optim = config.optim.of_phase(phase)
        trained = {name: networks[name] for name in names}
        optimizers.append(build_optimizer(optim, config.rate_of(optim), trained))
    try:
        return measure_step(
            config.parallel,
            task,
            autocast(networks, torch.device("cpu"), config.train.precision),
            optimizers,
            batch,
            averaged=[model] if config.model.ema.decay is not None else [],
        )
    # What torch raises where code needs a value of a fake tensor, as `item` and `numpy` do.
    except RuntimeError as error:
        log.debug("the step was not measured: %s: %s", type(error).__name__, error)
        return None


def _warnings(config: Config, model: nn.Module, chunk: int) -> Iterator[str]:
    has_batch_norm = any(
        isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()
    )
    if has_batch_norm and chunk < SMALL_FOR_BATCHNORM and not config.model.sync_bn:
        yield (
            f"per-device batch {chunk} with BatchNorm: its statistics are noisy; "
            "set model.sync_bn=true, or use a larger batch"
        )
    if config.model.grad_checkpointing:
        yield (
            "model.grad_checkpointing=true: the memory does not include the inputs of the "
            "blocks, which are kept"
        )


def show_plan(plans: list[Plan]) -> None:
    """Print a table with a row per number of devices: batches, steps, learning rate, FLOPs and
    memory of a run. Warnings follow below the table.
    """
    possible = [row for row in plans if not row.reason]
    if possible:
        print(pd.DataFrame(map(_cells, possible), columns=COLUMNS).to_string(index=False))
        parameters = f"{possible[0].parameters:,} parameters"
        print(f"{parameters}; memory of tensors, without libraries and caches")
    for row in plans:
        if row.reason:
            print(f"{row.devices} devices: cannot run: {row.reason}")
        for warning in row.warnings:
            print(f"{row.devices} devices: {warning}")


def _cells(row: Plan) -> list[str]:
    counts = (row.batch_size, row.batch_size_per_device, row.images_per_device)
    return [
        f"{row.devices} {row.strategy}",
        *map(str, (*counts, row.dropped_per_epoch)),
        f"{row.steps} = {row.steps / row.steps_per_epoch:g} x {row.steps_per_epoch}",
        f"{row.learning_rate:g}",
        "unknown" if row.flops_per_step is None else f"{row.flops_per_step / 1e9:.4g}",
        "unknown" if row.bytes_per_device is None else f"{row.bytes_per_device / 2**20:,.1f}",
    ]

"""What a config would be on hardware that is not here: shards, steps, learning rates, FLOPs, and tensor bytes per device.

Nothing is allocated: model, gradients and a whole optimizer step are run on fake tensors, which have shapes and no data,
and autograd says what the backward pass keeps (torch.autograd.graph.saved_tensors_hooks).
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from src.data.datasets import Images, build_images
from src.data.folders import check_data
from src.data.sampling import TrainRequests
from src.engine.config.combinations import check_combination
from src.engine.config.compose import compose_command
from src.engine.config.resolve import resolve
from src.models.build import build_model, count_parameters, train_image_size
from src.parallel.forward import AUTOCAST, ModelAndLoss
from src.schema import Config, ResolvedConfig
from src.training.objective import build_criterion
from src.training.optim import build_optimizer, build_schedule
from src.training.state import count_steps

MOST_RATES = 200  # points of the learning rate's curve
SMALL_FOR_BATCHNORM = 16  # images per device; below, error rises (Wu & He 2018, arXiv:1803.08494, figure 1)
COLUMNS = ("devices", "batch", "per device", "images/device", "dropped", "steps", "lr", "GFLOP/step", "gradients")


@dataclass(frozen=True)
class Bytes:
    """Of one device at the end of a forward pass, when most is held; `buckets` are ddp's copies of the gradients."""

    weights: int
    gradients: int
    optimizer: int
    ema: int
    activations: int
    batch: int
    buckets: int

    @property
    def total(self) -> int:
        return sum(dataclasses.astuple(self))


@dataclass
class Plan:
    """One device count. `reason`: why it cannot be run; then the rest is empty."""

    devices: int
    reason: str = ""
    strategy: str = ""
    batch_size: int = 0  # global
    batch_size_per_device: int = 0  # the largest chunk
    images: int = 0  # in the training split
    images_per_device: int = 0  # a device's share of an epoch
    dropped_per_epoch: int = 0
    steps_per_epoch: int = 0
    steps: int = 0
    learning_rate: float = 0.0  # the peak
    learning_rates: list[tuple[int, float]] = field(default_factory=list)  # (step, rate) at the steps that a run logs
    parameters: int = 0
    flops_per_step: int = 0  # forward and backward, all devices; 2 per multiply-add
    bytes: Bytes | None = None
    warnings: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        values = dataclasses.asdict(self)
        if self.bytes is not None:
            values["bytes"]["total"] = self.bytes.total
        return values


def plan(overrides: list[str], counts: list[int]) -> list[Plan]:
    """One plan per device count, of a command line without `parallel.devices`."""
    none = {"config_name": None, "config_path": None, "config_dir": None, "multirun": False}
    config = compose_command(argparse.Namespace(overrides=overrides, **none)).config
    check_data(config.data)
    images = build_images(config.data)
    config.model.pretrained, config.model.weights = False, None  # what the weights are decides nothing here
    plans = []
    for devices in counts:
        try:
            plans.append(_count(_resolved_for(config, devices), images, devices))
        except ValueError as error:
            plans.append(Plan(devices, reason=str(error)))
    smallest = min((one.batch_size for one in plans if one.batch_size), default=0)
    for one in plans:
        if one.batch_size > smallest and config.optim.lr_rule == "none":
            one.warnings.append(
                f"the global batch is {one.batch_size / smallest:g} times that of the smallest count, and the learning "
                "rate is the same: optim.lr_rule=linear or sqrt scales it"
            )
    return plans


def _resolved_for(config: Config, devices: int) -> ResolvedConfig:
    """As if `devices` ranks had been started elsewhere, so that nobody asks for their hardware here."""
    config = copy.deepcopy(config)
    config.parallel.devices = devices
    if config.parallel.strategy == "auto":
        config.parallel.strategy = "ddp" if devices > 1 else "single"
    check_combination(config)
    return resolve(config, devices, 1) if config.parallel.strategy == "ddp" else resolve(config)


def _count(config: ResolvedConfig, images: Images, devices: int) -> Plan:
    batch, train = config.global_batch, config.train
    size = min(len(images.train), config.data.limit_train or len(images.train))
    requests = TrainRequests(size, batch, 0, 1, config.seed, accumulate=train.accumulate)
    steps_per_epoch, steps = count_steps(train, requests.batches_per_epoch)
    chunk = math.ceil(batch / devices)
    side = config.data.image_size or images.image_size
    with torch.device("meta"):  # timm reads numbers out of some tensors while it builds, which fake ones have not
        model = build_model(config.model, len(images.class_names), images.in_chans, side, torch.device("meta"))
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device="cpu")
        pixels = train_image_size(model, config.data, images)
        rates = _rates(config, model, steps_per_epoch, steps)
        num_classes = config.model.num_classes or len(images.class_names)
        flops, held = _step(config, model, torch.empty(chunk, images.in_chans, pixels, pixels), num_classes)
    return Plan(
        devices=devices,
        strategy=config.parallel.strategy,
        batch_size=batch,
        batch_size_per_device=chunk,
        images=size,
        images_per_device=requests.batches_per_epoch * batch // devices,
        dropped_per_epoch=requests.dropped,
        steps_per_epoch=steps_per_epoch,
        steps=steps,
        learning_rate=config.learning_rate,
        learning_rates=rates,
        parameters=count_parameters(model),
        flops_per_step=flops * devices * train.accumulate,
        bytes=held,
        warnings=list(_warnings(config, model, chunk, requests, steps_per_epoch)),
    )


def _rates(config: ResolvedConfig, model: nn.Module, steps_per_epoch: int, steps: int) -> list[tuple[int, float]]:
    """The rate of the optimizer's first group at the steps that are logged, thinned where there are many."""
    optimizer = build_optimizer(config.optim, config.learning_rate, model)
    schedule = build_schedule(config.optim, config.train, optimizer, steps_per_epoch)
    logged = [step for step in range(1, steps + 1) if step == 1 or step % config.train.log_every == 0 or step == steps]
    found = []
    for step in logged[:: max(1, math.ceil(len(logged) / MOST_RATES))]:
        if schedule is not None and step > 1:
            schedule.step_update(step - 1)  # a function of the step, and the one after which `step` is taken
        found.append((step, float(optimizer.param_groups[0]["lr"])))
    return found


def _step(config: ResolvedConfig, model: nn.Module, images: Tensor, num_classes: int) -> tuple[int, Bytes]:
    """(FLOPs of forward and backward, bytes held) of one device's step on a fake batch."""
    mixed = config.data.augment.mixup or config.data.augment.cutmix
    targets = torch.rand(len(images), num_classes) if mixed else torch.zeros(len(images), dtype=torch.int64)
    wrapped = ModelAndLoss(
        model.train(), build_criterion(config.train, config.data.augment), "cpu", AUTOCAST[config.train.precision]
    )
    optimizer = build_optimizer(config.optim, config.learning_rate, model)
    own = [*model.parameters(), *model.buffers()]
    with FlopCounterMode(display=False) as counter, _saved(excluding=[*own, images]) as saved:
        loss = wrapped(images, targets)
        loss.backward()
    optimizer.step()
    gradients = _size(p.grad for p in model.parameters() if p.grad is not None)
    states = (value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor))
    is_ddp = config.parallel.strategy == "ddp"
    held = Bytes(
        weights=_size(own),
        gradients=gradients,
        optimizer=_size(states),
        ema=0 if config.model.ema.decay is None else _size(own),
        activations=sum(storage.nbytes() for storage in saved.values()),
        batch=_size([images, targets]),
        buckets=gradients if is_ddp and not config.parallel.gradient_as_bucket_view else 0,
    )
    return counter.get_total_flops(), held


@contextmanager
def _saved(excluding: list[Tensor]) -> Iterator[dict[int, torch.UntypedStorage]]:
    """What autograd keeps for the backward pass, without the storages of `excluding`; held, since numbers are given again."""
    known = {tensor.untyped_storage()._cdata for tensor in excluding}
    found: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in known:
            found[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield found


def _size(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _warnings(config: Config, model: nn.Module, chunk: int, requests: TrainRequests, steps: int) -> Iterator[str]:
    normalised = any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())
    if normalised and chunk < SMALL_FOR_BATCHNORM and not config.model.sync_bn:
        yield f"per-device batch {chunk} with BatchNorm: its statistics are noisy; model.sync_bn=true, or a larger batch"
    dropped, images = requests.dropped, requests.num_images
    if dropped > 0.05 * images:
        yield f"{dropped} of {images} images are dropped in every epoch; a smaller data.batch_size drops fewer"
    if steps < 10:
        yield f"{steps} steps per epoch: start and end of each epoch weigh as much as its steps"
    if config.model.grad_checkpointing:
        yield "model.grad_checkpointing=true: the inputs that its blocks keep are not counted in the activations"


def show(plans: list[Plan]) -> None:
    """For people: one row per device count, the warnings below."""
    console = Console(width=None if Console().is_terminal else 200, markup=False, emoji=False)
    table = Table(*COLUMNS, "held per device: weights + gradients + optimizer + EMA + activations + rest")
    for one in plans:
        if one.bytes is None:
            table.add_row(str(one.devices), *[""] * (len(COLUMNS) - 1), f"cannot be: {one.reason}")
            continue
        held = one.bytes
        rest = held.batch + held.buckets
        parts = (held.weights, held.gradients, held.optimizer, held.ema, held.activations, rest)
        table.add_row(
            f"{one.devices} {one.strategy}",
            *map(str, (one.batch_size, one.batch_size_per_device, one.images_per_device, one.dropped_per_epoch)),
            f"{one.steps} = {one.steps / one.steps_per_epoch:g} x {one.steps_per_epoch}",
            f"{one.learning_rate:g}",
            f"{one.flops_per_step / 1e9:.4g}",
            _mebibytes(held.gradients),
            f"{_mebibytes(held.total)} = {' + '.join(_mebibytes(part) for part in parts)}",
        )
    console.print(table)
    if made := [one for one in plans if one.bytes is not None]:
        console.print(f"{made[0].parameters:,} parameters; bytes in MiB, of tensors: libraries and caches come on top")
    for one in plans:
        for warning in one.warnings:
            console.print(f"{one.devices} devices: {warning}", highlight=False)


def _mebibytes(size: int) -> str:
    return f"{size / 2**20:.1f}" if size < 2**30 else f"{size / 2**20:.0f}"

"""Builds and wraps the parts of a run, in a stated order: data, model, optimizer, schedule, strategy's wrapper."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from src.config.resolve import global_batch, learning_rate
from src.config.schema import Config
from src.data.augment import evaluation_transform, train_transform
from src.data.datasets import Images, InMemory, build_images
from src.data.loading import DeviceFeed, Loader, Reader, TrainLoader, evaluation_requests, num_workers, train_requests
from src.model import build_ema, build_model, normalisation
from src.optim import build_optimizer, build_schedule
from src.parallel.single import Single
from src.telemetry.meters import Meter
from src.training.loop import Trainee
from src.training.objective import Mixing, build_criterion, build_mixing

AUTOCAST = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class Parts:
    """Everything a run is made of; loaders are this rank's."""

    images: Images
    train: TrainLoader
    evaluation: dict[str, Loader]  # val, and test where the data has it
    trainee: Trainee
    mixing: Mixing | None
    meter: Meter
    autocast: torch.dtype | None
    steps_per_epoch: int  # optimizer steps
    total_steps: int

    @property
    def num_classes(self) -> int:
        return len(self.images.class_names)


def build(config: Config, strategy: Single, local_world_size: int) -> Parts:
    """Build the parts of a resolved config. Errors: ValueError for arguments that data, model or optimizer refuse."""
    images, model, evaluation = build_evaluation(config, strategy, local_world_size)
    train = _build_train(config, images, strategy, model, local_world_size)
    steps_per_epoch = train.batches_per_epoch // config.train.accumulate
    if steps_per_epoch == 0:
        raise ValueError(
            f"train.accumulate={config.train.accumulate}: an epoch has only {train.batches_per_epoch} batches"
        )
    optimizer = build_optimizer(config.optim, learning_rate(config), model)
    schedule = build_schedule(config.optim, config.train, optimizer, steps_per_epoch)
    criterion = build_criterion(config.train, config.data.augment).to(strategy.device)
    autocast = AUTOCAST[config.train.precision]
    compiled: Any = torch.compile(model) if config.model.compile else model
    trainee = Trainee(
        model=model,
        wrapped=strategy.wrap(compiled, criterion, autocast),
        optimizer=optimizer,
        schedule=schedule,
        scaler=torch.amp.GradScaler(strategy.device.type) if config.train.precision == "fp16" else None,
        ema=build_ema(model, config.model.ema.decay),
    )
    return Parts(
        images=images,
        train=train,
        evaluation=evaluation,
        trainee=trainee,
        mixing=build_mixing(
            config.data.augment, config.train.smoothing, len(images.class_names), config.seed, strategy.rank
        ),
        meter=Meter(global_batch(config) * config.train.accumulate, strategy.device.type == "cpu"),
        autocast=autocast,
        steps_per_epoch=steps_per_epoch,
        total_steps=min(
            config.train.epochs * steps_per_epoch, config.train.max_steps or config.train.epochs * steps_per_epoch
        ),
    )


def build_evaluation(
    config: Config, strategy: Single, local_world_size: int = 1
) -> tuple[Images, torch.nn.Module, dict[str, Loader]]:
    """(dataset, model with fresh weights, this rank's loaders of val and test)."""
    images = build_images(config.data)
    size = config.data.image_size or images.image_size
    model = build_model(config.model, images, size, strategy.device)
    feed, crop_pct = _feed(config, images, strategy, model)
    loaders = {}
    for name, split in (("val", images.val), ("test", images.test)):
        if split is not None:
            resize_to = None if isinstance(split, InMemory) else size
            reader = Reader(split, evaluation_transform(resize_to, crop_pct), config.seed, config.data.on_error)
            requests = evaluation_requests(split, global_batch(config), strategy.rank, strategy.world_size)
            loaders[name] = Loader(reader, requests, feed, num_workers(config.data, split, local_world_size))
    return images, model, loaders


def _build_train(
    config: Config, images: Images, strategy: Single, model: torch.nn.Module, local_world_size: int
) -> TrainLoader:
    split, size = images.train, config.data.image_size or images.image_size
    feed, _ = _feed(config, images, strategy, model)
    transform = train_transform(config.data.augment, size, not isinstance(split, InMemory))
    requests = train_requests(
        split, global_batch(config), strategy.rank, strategy.world_size, config.seed, config.data.limit_train
    )
    reader = Reader(split, transform, config.seed, config.data.on_error, substitutes=requests.shard.total)
    return TrainLoader(reader, requests, feed, num_workers(config.data, split, local_world_size))


def _feed(config: Config, images: Images, strategy: Single, model: torch.nn.Module) -> tuple[DeviceFeed, float]:
    mean, std, crop_pct = normalisation(model, images)
    return DeviceFeed(strategy.device, mean, std, config.model.channels_last), crop_pct

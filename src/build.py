"""Builds and wraps the parts of a run, in a stated order: data, model, optimizer, schedule, strategy's wrapper."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from src.config.resolve import global_batch, learning_rate
from src.config.schema import Config
from src.data.augment import evaluation_transform, train_transform
from src.data.datasets import Images, InMemory, Split, build_images
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
    images = build_images(config.data)
    model = build_model(config.model, images, config.data.image_size or images.image_size, strategy.device)
    train, evaluation = _build_loaders(config, images, strategy, model, local_world_size)
    steps_per_epoch = train.batches_per_epoch // config.train.accumulate
    if steps_per_epoch == 0:
        raise ValueError(f"train.accumulate={config.train.accumulate}: an epoch has only {train.batches_per_epoch} batches")
    optimizer = build_optimizer(config.optim, learning_rate(config), model)
    schedule = build_schedule(config.optim, config.train, optimizer, steps_per_epoch)
    criterion = build_criterion(config.train, config.data.augment).to(strategy.device)
    autocast = AUTOCAST[config.train.precision]
    compiled = torch.compile(model) if config.model.compile else model
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
        total_steps=min(config.train.epochs * steps_per_epoch, config.train.max_steps or config.train.epochs * steps_per_epoch),
    )


def _build_loaders(
    config: Config, images: Images, strategy: Single, model: torch.nn.Module, local_world_size: int
) -> tuple[TrainLoader, dict[str, Loader]]:
    mean, std, crop_pct = normalisation(model, images)
    feed = DeviceFeed(strategy.device, mean, std, config.model.channels_last)
    batch, rank, world = global_batch(config), strategy.rank, strategy.world_size

    def workers(split: Split) -> int:
        return num_workers(config.data, split, local_world_size)

    def resize(split: Split) -> int | None:
        return None if isinstance(split, InMemory) else config.data.image_size or images.image_size

    train_split = images.train
    requests = train_requests(train_split, batch, rank, world, config.seed, config.data.limit_train)
    augment = train_transform(config.data.augment, config.data.image_size or images.image_size, not isinstance(train_split, InMemory))
    train = TrainLoader(Reader(train_split, augment, config.seed), requests, feed, workers(train_split))
    evaluation = {}
    for name, split in (("val", images.val), ("test", images.test)):
        if split is not None:
            reader = Reader(split, evaluation_transform(resize(split), crop_pct), config.seed)
            evaluation[name] = Loader(reader, evaluation_requests(split, batch, rank, world), feed, workers(split))
    return train, evaluation

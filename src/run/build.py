"""Builds and wraps the parts of a run, in a stated order: data, model, optimizer, schedule, strategy's wrapper."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from src.data.augment import Preprocessing, evaluation_transform, train_transform
from src.data.datasets import Images, InMemory, build_images
from src.data.feed import DeviceFeed
from src.data.loader import Loader, Reader, TrainLoader, evaluation_requests, num_workers, train_requests
from src.engine.record.meter import Meter
from src.models.build import build_ema, build_model, check_image_size, preprocessing_for
from src.parallel.forward import AUTOCAST
from src.parallel.single import Single
from src.schema import Config, global_batch, is_timms, learning_rate
from src.training.loop import Trainee
from src.training.objective import Mixing, build_criterion, build_mixing
from src.training.optim import build_optimizer, build_schedule


@dataclass
class Parts:
    """Everything a run is made of; loaders are this rank's."""

    images: Images
    preprocessing: Preprocessing
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
    images, preprocessing, model, evaluation = build_evaluation(config, strategy, local_world_size)
    train = _build_train(config, images, preprocessing, strategy, local_world_size)
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
        ema=build_ema(model, config.model.ema),
    )
    return Parts(
        images=images,
        preprocessing=preprocessing,
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
) -> tuple[Images, Preprocessing, torch.nn.Module, dict[str, Loader]]:
    """(dataset, what its images go through, model with fresh weights, this rank's loaders of val and test)."""
    may_download = config.model.pretrained or is_timms(config.data.name)
    with strategy.one_of_node_first() if may_download else nullcontext():
        images = build_images(config.data)
        size = config.data.image_size or images.image_size
        model = build_model(config.model, len(images.class_names), images.in_chans, size, strategy.device)
    preprocessing = preprocessing_for(model, config.data, images)
    check_image_size(model, preprocessing, len(images.class_names), strategy.device)
    feed = DeviceFeed(strategy.device, preprocessing, config.model.channels_last)
    loaders = {}
    for name, split in (("val", images.val), ("test", images.test)):
        if split is not None:
            transform = None if isinstance(split, InMemory) else evaluation_transform(preprocessing)
            reader = Reader(split, len(images.class_names), transform, config.seed, config.data.on_error)
            requests = evaluation_requests(split, global_batch(config), strategy.rank, strategy.world_size)
            loaders[name] = Loader(reader, requests, feed, num_workers(config.data, split, local_world_size))
    return images, preprocessing, model, loaders


def _build_train(
    config: Config, images: Images, preprocessing: Preprocessing, strategy: Single, local_world_size: int
) -> TrainLoader:
    split = images.train
    size = config.data.image_size or images.image_size or preprocessing.input_size[-1]
    transform = train_transform(config.data.augment, size, not isinstance(split, InMemory))
    requests = train_requests(
        split,
        global_batch(config),
        strategy.rank,
        strategy.world_size,
        config.seed,
        limit=config.data.limit_train,
        copies=config.data.augment.aug_repeats,
    )
    reader = Reader(
        split,
        len(images.class_names),
        transform,
        config.seed,
        config.data.on_error,
        substitutes=requests.shard.num_images,
    )
    feed = DeviceFeed(strategy.device, preprocessing, config.model.channels_last)
    return TrainLoader(reader, requests, feed, num_workers(config.data, split, local_world_size))

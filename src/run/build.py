"""Builds and wraps the parts of a run, in a stated order: data, model, optimizer, schedule, strategy's wrapper."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from src.data.augment import Preprocessing, evaluation_transform, train_transform
from src.data.datasets import Images, InMemory, build_images
from src.data.feed import DeviceFeed
from src.data.loader import Loader, Reader, TrainLoader, num_workers
from src.data.sampling import EvaluationRequests, TrainRequests
from src.engine.config.combinations import profile_rules
from src.engine.config.rules import refuse
from src.engine.record.meter import Clock, Meter
from src.models.build import build_ema, build_model, check_image_size, preprocessing_for, train_image_size
from src.parallel.forward import AUTOCAST, set_matmul_precision
from src.parallel.single import Single
from src.schema import ResolvedConfig, is_timm_dataset
from src.training.metrics import check_metric
from src.training.moments import Moments
from src.training.objective import build_criterion, build_mixing
from src.training.optim import build_optimizer, build_schedule
from src.training.profile import ProfiledMoments
from src.training.state import TrainState, count_steps


class Run:
    """The parts of a run on this rank, and the newest numbers of its evaluations."""

    def __init__(self, config: ResolvedConfig, strategy: Single) -> None:
        self.config, self.strategy = config, strategy
        self.images, self.preprocessing, model, self.evaluation = build_evaluation(config, strategy)
        self.num_classes = len(self.images.class_names)
        size = train_image_size(model, config.data, self.images)
        self.train = _build_train(config, self.images, size, self.preprocessing, strategy)
        # Optimizer steps, each of train.accumulate global batches; those before a resume are in the total.
        self.steps_per_epoch, self.total_steps = count_steps(config.train, self.train.requests.batches_per_epoch)
        refuse(profile_rules(config.train, self.total_steps))
        check_metric(config.checkpoint.metric, self.num_classes)
        self.autocast = AUTOCAST[config.train.precision]
        self.state = _build_state(config, model, strategy, self.autocast, self.steps_per_epoch)
        outputs = config.model.num_classes or self.num_classes
        self.mixing = build_mixing(config.data.augment, config.train.smoothing, outputs, config.seed, strategy.rank)
        self.moments = _build_moments(config, strategy, self.state, self.total_steps)
        self.numbers: dict[str, dict[str, Any]] = {}  # split -> those of its newest evaluation
        self.confusions: dict[str, torch.Tensor] = {}  # the same

    @property
    def epochs_done(self) -> float:
        return self.state.progress.epoch + self.state.progress.step_in_epoch / self.steps_per_epoch


def _build_moments(config: ResolvedConfig, strategy: Single, state: TrainState, total_steps: int) -> Moments:
    untimed, recorded = config.train.untimed_steps, config.train.profile_steps
    meter = Meter(
        config.global_batch * config.train.accumulate,
        total_steps,
        None if strategy.device.type == "cpu" else Clock(strategy.device),
        window_opens=partial(strategy.window_opens, state.wrapped),
        untimed=untimed,
    )
    if untimed is None or recorded is None:
        return Moments(meter, strategy.stopping)
    return ProfiledMoments(meter, strategy, state.wrapped, untimed, recorded)


def _build_state(
    config: ResolvedConfig, model: torch.nn.Module, strategy: Single, autocast: torch.dtype | None, steps_per_epoch: int
) -> TrainState:
    """The model wrapped, then what is made of its parameters: a strategy may replace them."""
    criterion = build_criterion(config.train, config.data.augment).to(strategy.device)
    ema = build_ema(model, config.model.ema, foreach=not strategy.shards)
    compiled: Any = torch.compile(model) if config.model.compile else model
    wrapped = strategy.wrap(compiled, criterion, autocast)
    if ema is not None:
        strategy.place(ema.module)
    optimizer = build_optimizer(config.optim, config.learning_rate, model)
    return TrainState(
        model=model,
        wrapped=wrapped,
        optimizer=optimizer,
        schedule=build_schedule(config.optim, config.train, optimizer, steps_per_epoch),
        scaler=torch.amp.GradScaler(strategy.device.type) if config.train.precision == "fp16" else None,
        ema=ema,
    )


def build_evaluation(
    config: ResolvedConfig, strategy: Single
) -> tuple[Images, Preprocessing, torch.nn.Module, dict[str, Loader]]:
    """(dataset, what its images go through, model with fresh weights, this rank's loaders of val and test)."""
    set_matmul_precision(config.train.precision)
    may_download = config.model.pretrained or is_timm_dataset(config.data.name)
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
            requests = EvaluationRequests(len(split), config.global_batch, strategy.rank, strategy.world_size)
            loaders[name] = Loader(reader, requests, feed, num_workers(config.data, split, strategy.local_world_size))
    return images, preprocessing, model, loaders


def _build_train(
    config: ResolvedConfig, images: Images, size: int, preprocessing: Preprocessing, strategy: Single
) -> TrainLoader:
    split = images.train
    transform = train_transform(config.data.augment, size, not isinstance(split, InMemory))
    requests = TrainRequests(
        min(len(split), config.data.limit_train or len(split)),
        config.global_batch,
        strategy.rank,
        strategy.world_size,
        config.seed,
        config.data.augment.aug_repeats,
        config.train.accumulate,
    )
    reader = Reader(
        split, len(images.class_names), transform, config.seed, config.data.on_error, substitutes=requests.num_images
    )
    feed = DeviceFeed(strategy.device, preprocessing, config.model.channels_last)
    return TrainLoader(reader, requests, feed, num_workers(config.data, split, strategy.local_world_size))

"""Build the parts of a run in this order: data, model, the strategy's wrapper,
optimizer, schedule.
"""

from __future__ import annotations

import logging
from contextlib import nullcontext
from pathlib import Path

import torch

from src.data.datasets import build_dataset
from src.data.erasing import Erasing
from src.data.transforms import batch_step, evaluation_transform, train_transform
from src.models.build import build_model
from src.models.ema import build_ema
from src.models.freeze import freeze
from src.models.preprocessing import preprocessing_for, train_image_size
from src.models.weights import load_weights
from src.schema import ResolvedConfig, is_timm_dataset
from src.train.losses import build_criterion, class_weights
from src.train.metrics import check_metric
from src.train.mixing import Mixing
from src.train.optim import build_optimizer, build_schedule, waits_for_scaler
from src.train.step import AUTOCAST, Autocast, TrainStep, set_matmul_precision
from timm_parallel.config.validate import refuse
from timm_parallel.data.dataset import rows_of, train_labels
from timm_parallel.data.loader import BatchFetcher, Loader, TrainLoader, num_workers
from timm_parallel.data.prefetch import DevicePrefetcher
from timm_parallel.data.samplers import EvalSampler, TrainSampler, class_balance, fixed_choice
from timm_parallel.parallel.lockstep import Lockstep
from timm_parallel.parallel.strategy import Strategy
from timm_parallel.runtime.flops import count_flops
from timm_parallel.runtime.interfaces import BuiltRun, TrainState
from timm_parallel.runtime.model_checks import (
    check_image_size,
    check_is_complete,
    check_sharded_model,
    compile_model,
)
from timm_parallel.runtime.progress import count_steps
from timm_parallel.runtime.replica_checks import check_same_data
from timm_parallel.runtime.step_profiler import build_hooks
from timm_parallel.runtime.weights import preprocessing_of

log = logging.getLogger(__name__)


class EvaluationParts:
    """Parts that both evaluation and training need on this rank: dataset, model, and loaders of val
    and test.
    """

    def __init__(
        self, config: ResolvedConfig, strategy: Strategy, trained_classes: list[str] | None = None
    ) -> None:
        """`trained_classes`: class names of the run to evaluate."""
        self.config, self.strategy = config, strategy
        set_matmul_precision(config.train.precision)
        may_download = config.model.pretrained or is_timm_dataset(config.data.name)
        with strategy.group.one_of_node_first() if may_download else nullcontext():
            self.dataset = build_dataset(
                config.data, trained_classes, config.train.task == "multilabel"
            )
            self.num_classes, size = (
                len(self.dataset.class_names),
                config.data.image_size or self.dataset.image_size,
            )
            # With random or timm's weights.
            self.model = build_model(
                config.model, self.num_classes, self.dataset.in_chans, size, strategy.device
            )
        of_weights = (
            None if config.model.weights is None else preprocessing_of(Path(config.model.weights))
        )
        self.preprocessing = preprocessing_for(self.model, config.data, self.dataset, of_weights)
        outputs = check_image_size(
            self.model, self.preprocessing.input_size, self.num_classes, strategy.device
        )
        if outputs > self.num_classes and strategy.is_first:
            names = f"{outputs} outputs, but the data has {self.num_classes} classes"
            log.warning(
                "the model has %s; evaluation uses the first %d outputs", names, self.num_classes
            )
        mean, std = self.preprocessing.mean, self.preprocessing.std
        self.prefetcher = DevicePrefetcher(strategy.device, mean, std, config.model.channels_last)
        self.evaluation: dict[str, Loader] = {}
        group = strategy.group
        for name, split in (("val", self.dataset.val), ("test", self.dataset.test)):
            if split is not None:
                # Resizing to the same size and cropping all of it changes no image.
                rows = rows_of(split, self.preprocessing.input_size[1:])
                is_ready = rows is split or (rows is not None and self.preprocessing.crop_pct == 1)
                transform = None if is_ready else evaluation_transform(self.preprocessing)
                fetcher = BatchFetcher(
                    split, self.num_classes, transform, config.seed, config.data.on_error
                )
                sampler = EvalSampler(len(split), config.global_batch, group.rank, group.world_size)
                workers = num_workers(config.data, fetcher, strategy.device, group.local_world_size)
                self.evaluation[name] = Loader(fetcher, sampler, self.prefetcher, workers)


class RunParts(EvaluationParts, BuiltRun):
    """Parts of a training run on this rank, built from the config."""

    def __init__(self, config: ResolvedConfig, strategy: Strategy) -> None:
        super().__init__(config, strategy)
        check_same_data(self.dataset, strategy.group)
        if config.model.weights is not None:
            path, strict = Path(config.model.weights), config.model.weights_strict
            log.info(
                "weights      %s",
                load_weights(self.model, path, self.dataset.class_names, strict=strict),
            )
        if frozen := freeze(self.model, config.model.freeze):
            log.info("frozen       %s", frozen)
        self.image_size = train_image_size(self.model, config.data, self.dataset)
        self.train = self._build_train_loader()
        # Optimizer steps, each of train.accumulate global batches. The total includes steps before
        # a resume.
        self.steps_per_epoch, self.total_steps = count_steps(
            config.train, self.train.sampler.batches_per_epoch
        )
        refuse(config.train.profile_problems(self.total_steps))
        check_metric(config.checkpoint.metric, self.num_classes)
        outputs = config.model.num_classes or self.num_classes
        weights: dict[str, torch.Tensor] = {}
        if config.train.class_weights is not None:
            labels = train_labels(self.dataset.train, self.train.fetcher.chosen)
            weights = class_weights(config.train, labels, outputs)
        # Before the strategy wraps or shards the model.
        self.flops_per_step = self._count_flops()
        self.state = self._build_state(weights)
        check_is_complete(self.state.optimizer, self.state)
        self.mixing: Mixing | None = None
        if config.data.augment.mixes:
            self.mixing = Mixing(
                config.data.augment,
                config.train.smoothing,
                outputs,
                config.seed,
                strategy.group.rank,
            )
        self.communication = strategy.communication(self.state.wrapped)
        self.hooks = build_hooks(config, strategy, self.communication, self.total_steps)
        self.numbers = {}
        self.segments = []
        # By split, and split_ema.
        self.confusions: dict[str, torch.Tensor] = {}

    def _build_train_loader(self) -> TrainLoader:
        config, split, group = self.config, self.dataset.train, self.strategy.group
        augment = config.data.augment
        size = self.image_size
        rows = rows_of(split, (size, size))
        on_pixels = batch_step(augment, rows, size)
        transform = (
            None
            if on_pixels
            else train_transform(augment, size, rows is None, self.preprocessing.mean)
        )
        chosen = fixed_choice(len(split), config.data.limit_train)
        weights = (
            class_balance(train_labels(split, chosen), config.data.balance)
            if config.data.balance
            else None
        )
        sampler = TrainSampler(
            len(split) if chosen is None else len(chosen),
            config.global_batch,
            group.rank,
            group.world_size,
            config.seed,
            augment.aug_repeats,
            config.train.accumulate,
            weights,
        )
        fetcher = BatchFetcher(
            split,
            self.num_classes,
            transform,
            config.seed,
            config.data.on_error,
            substitutes=sampler.num_images,
            chosen=chosen,
            on_pixels=on_pixels,
            on_normalized=Erasing(augment) if augment.reprob else None,
        )
        workers = num_workers(config.data, fetcher, self.strategy.device, group.local_world_size)
        return TrainLoader(fetcher, sampler, self.prefetcher, workers)

    def _count_flops(self) -> int | None:
        """Count the FLOPs of an optimizer step on rank 0, which writes result.json. Takes a tenth
        of a second.
        """
        if not self.strategy.is_first:
            return None
        config, channels = self.config, self.preprocessing.input_size[0]
        flops = count_flops(
            self.model, (config.global_batch, channels, self.image_size, self.image_size)
        )
        return None if flops is None else flops * config.train.accumulate

    def _build_state(self, weights: dict[str, torch.Tensor]) -> TrainState:
        """Wrap the model, then build optimizer, schedule and EMA. A strategy may replace parameters
        while it wraps.
        """
        config, model, strategy = self.config, self.model, self.strategy
        criterion = build_criterion(config.train, config.data.augment, weights)
        ema = build_ema(model, config.model.ema, foreach=not strategy.shards)
        compiled = compile_model(model, config.model.compile, strategy.device)
        autocast = Autocast(compiled, strategy.device.type, AUTOCAST[config.train.precision])
        # The loss, and modules that you add to the step, go to the model's device.
        step = TrainStep(autocast, criterion, config.train.task, self.num_classes).to(
            strategy.device
        )
        wrapped = strategy.wrap(step)
        sharded = strategy.for_evaluation(autocast) if strategy.shards else None
        if isinstance(sharded, Lockstep):
            check_sharded_model(sharded, self.preprocessing.input_size, strategy.group)
        if ema is not None:
            strategy.lay_out(ema.module)
        optimizer = build_optimizer(
            config.optim, config.learning_rate, model, strategy.shards, step
        )
        schedule = build_schedule(config.optim, config.train, optimizer, self.steps_per_epoch)
        scaler = (
            torch.amp.GradScaler(strategy.device.type) if config.train.precision == "fp16" else None
        )
        if scaler is not None and strategy.device.type == "cuda" and waits_for_scaler(optimizer):
            log.info(
                "fp16         optim.opt=%s waits for the GPU in every step; adamw or sgd do not",
                config.optim.opt,
            )
        return TrainState(model, step, wrapped, optimizer, schedule, scaler, ema)

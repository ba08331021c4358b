"""Build the objects of a training run in this order: data, model, the wrapper of the strategy,
optimizer, schedule.
"""

from __future__ import annotations

import logging
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from src.data.transforms import Preprocessing, ResizeAndCrop
from src.models.build import build_model
from src.models.preprocessing import preprocessing_for, train_image_size
from src.schema import ResolvedConfig
from src.tasks.images import Criterion
from src.train.optim import build_optimizer, build_schedule, waits_for_scaler
from src.train.step import AUTOCAST, Autocast, TrainStep, set_matmul_precision
from timm_parallel import (
    DevicePrefetcher,
    Erasing,
    EvalLoader,
    ImageDataset,
    InMemory,
    Mixing,
    RunParts,
    Strategy,
    Task,
    TrainLoader,
    TrainState,
    as_size,
    build_ema,
    check_same_data,
    compile_model,
    count_flops,
    freeze,
    load_dataset,
    load_weights,
    preprocessing_of,
    run_on_black_image,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DataAndModel:
    """Dataset, task, model, and loaders of val and test on this rank. Both training and evaluate.py
    need them.
    """

    dataset: ImageDataset
    task: Task[ResolvedConfig]
    # The model on the device of this rank, before a strategy wraps it. Its weights are random or
    # those of timm.
    model: nn.Module
    preprocessing: Preprocessing
    prefetcher: DevicePrefetcher
    # Evaluation loaders, as a dictionary from the name of a split to its loader.
    eval_loaders: dict[str, EvalLoader]


def build_data_and_model(
    config: ResolvedConfig, strategy: Strategy, trained_names: list[str] | None = None
) -> DataAndModel:
    """Build the dataset, task, model and evaluation loaders that training and evaluate.py need. All
    ranks must call this function. `trained_names`: class names from the checkpoint that evaluate.py
    evaluates; None in training.
    """
    strategy.choose_precision(config.train)
    set_matmul_precision(config.train.precision)
    # Let one rank of each node download weights and data first. The other ranks then read them from
    # the cache.
    may_download = config.model.pretrained or config.data.is_from_timm
    with strategy.group.one_of_node_first() if may_download else nullcontext():
        dataset = load_dataset(config, trained_names)
        task = Task.find(config.train.task)(config, dataset.target_names)
        sides = config.data.image_size or dataset.image_size
        size = None if sides is None else as_size(sides)
        is_chosen = config.model.channels_last == "auto"
        model = build_model(config.model, task.num_outputs, dataset.in_chans, size, strategy.device)
        if is_chosen:
            strategy.chosen.add("model.channels_last")
    # Use the weights of a file with the mean and std with which they were trained.
    weights = config.model.weights
    of_weights = None if weights is None else preprocessing_of(Path(weights))
    preprocessing = task.preprocessing(preprocessing_for(model, config.data, dataset, of_weights))
    outputs = run_on_black_image(model, preprocessing.input_size, strategy.device)
    task.check_outputs(outputs)
    if outputs.shape[1] > task.num_outputs > 0 and strategy.is_first:
        log.warning(
            "the model has %d outputs; evaluation uses the first %d",
            outputs.shape[1],
            task.num_outputs,
        )
    mean, std = preprocessing.mean, preprocessing.std
    channels_last = config.model.channels_last is True
    prefetcher = DevicePrefetcher(strategy.device, mean, std, channels_last)
    eval_loaders: dict[str, EvalLoader] = {}
    for name, split in (("val", dataset.val), ("test", dataset.test)):
        if split is not None:
            transform = task.evaluation_transform(preprocessing)
            # Skip resizing and cropping if images are in memory in the right size, because that
            # would not change them. A task may have another transform, which is never skipped.
            rows = InMemory.of(split, preprocessing.input_size[1:])
            is_ready = rows is split or (rows is not None and preprocessing.crop_pct == 1)
            is_ready &= isinstance(getattr(transform, "transform", None), ResizeAndCrop)
            eval_loaders[name] = EvalLoader(
                split,
                task,
                prefetcher,
                strategy.group,
                batch_size=strategy.group.world_size
                if task.evaluates_one_by_one
                else config.global_batch,
                transform=None if is_ready else transform,
                seed=config.seed,
                workers=config.data.workers,
                on_error=config.data.on_error,
            )
    return DataAndModel(dataset, task, model, preprocessing, prefetcher, eval_loaders)


def build_run(config: ResolvedConfig, strategy: Strategy) -> RunParts:
    """Build the objects of a training run on this rank. All ranks must call this function."""
    built = build_data_and_model(config, strategy)
    dataset, task, model = built.dataset, built.task, built.model
    # Compare the data of all ranks, because ranks that read different files would train on wrong
    # labels without an error.
    check_same_data(dataset, strategy.group)
    if config.model.weights is not None:
        line = load_weights(
            model,
            Path(config.model.weights),
            dataset.target_names,
            strict=config.model.weights_strict,
            sorted_names=task.target in ("label", "labels"),
        )
        log.info("weights      %s", line)
    if frozen := freeze(model, config.model.freeze):
        log.info("frozen       %s", frozen)
    image_size = train_image_size(model, config.data, dataset)
    batches = _build_train_loader(config, strategy, built, image_size)
    batches_per_epoch = batches.sampler.batches_per_epoch
    steps_per_epoch, total_steps = config.train.count_steps(batches_per_epoch)
    for problem in config.train.profile_problems(total_steps):
        raise ValueError(problem)
    task.check_metric(config.headline_metric)
    # Count FLOPs before the strategy wraps or shards the model. Only rank 0 writes them to
    # result.json.
    flops = _count_flops(config, built, image_size) if strategy.is_first else None
    criterion = task.build_criterion(batches.labels())
    state = _build_state(config, strategy, built, criterion, steps_per_epoch)
    augment, mixing = config.data.augment, None
    if augment.mixes:
        rank = strategy.group.rank
        outputs = config.model.num_classes or task.num_outputs
        mixing = Mixing(
            config.seed,
            rank,
            augment.mixup_off_epoch,
            mixup_alpha=augment.mixup,
            cutmix_alpha=augment.cutmix,
            cutmix_minmax=augment.cutmix_minmax,
            prob=augment.mixup_prob,
            switch_prob=augment.mixup_switch_prob,
            mode=augment.mixup_mode,
            label_smoothing=config.train.smoothing,
            num_classes=outputs,
        )
    return RunParts.assemble(
        config=config,
        strategy=strategy,
        dataset=dataset,
        task=task,
        preprocessing=built.preprocessing,
        image_size=image_size,
        train_loader=batches,
        eval_loaders=built.eval_loaders,
        state=state,
        mixing=mixing,
        flops_per_step=flops,
        profiled=(config.train.untimed_steps, config.train.profile_steps),
    )


def _build_train_loader(
    config: ResolvedConfig, strategy: Strategy, built: DataAndModel, size: tuple[int, int]
) -> TrainLoader:
    split, augment, task = built.dataset.train, config.data.augment, built.task
    rows = InMemory.of(split, size)
    # Augment whole batches on the device if the task can. Otherwise, each image is augmented by a
    # transform.
    on_pixels = task.batch_augmentation(rows, size)
    transform = None
    if on_pixels is None:
        transform = task.train_transform(size, rows is None, built.preprocessing.mean)
    return TrainLoader(
        split,
        task,
        built.prefetcher,
        strategy.group,
        batch_size=config.global_batch,
        seed=config.seed,
        transform=transform,
        on_pixels=on_pixels,
        on_normalized=Erasing(augment.reprob, augment.remode, augment.recount)
        if augment.reprob
        else None,
        workers=config.data.workers,
        on_error=config.data.on_error,
        accumulate=config.train.accumulate,
        copies=augment.aug_repeats,
        limit=config.data.limit_train,
        balance=config.data.balance,
        replay=config.data.replay_batches,
    )


def _count_flops(config: ResolvedConfig, built: DataAndModel, size: tuple[int, int]) -> int | None:
    """Count the FLOPs of an optimizer step. Counting takes a tenth of a second."""
    count = config.global_batch * built.task.views
    images = (count, built.preprocessing.input_size[0], *size)
    flops = count_flops(built.model, images)
    return None if flops is None else flops * config.train.accumulate


def _build_state(
    config: ResolvedConfig,
    strategy: Strategy,
    built: DataAndModel,
    criterion: Criterion,
    steps_per_epoch: int,
) -> TrainState:
    """Wrap the model, then build optimizer, schedule and averaged weights. The order matters,
    because a strategy may replace the model's parameters when it wraps the model.
    """
    model = built.model
    # Copy the averaged weights before the strategy wraps the model, because it replaces parameters
    # or adds hooks to them.
    averaging, ema = config.model.ema, None
    if averaging.decay is not None:
        ema = build_ema(model, averaging.decay, averaging.warmup, foreach=not strategy.shards)
    compiled = compile_model(model, config.model.compile, strategy.device)
    autocast = Autocast(compiled, strategy.device.type, AUTOCAST[config.train.precision])
    # Move the whole step to the device of the model: a loss or another module of the step may have
    # parameters.
    step = TrainStep(autocast, criterion, built.task).to(strategy.device)
    wrapped = strategy.wrap(step)
    if ema is not None:
        strategy.lay_out(ema.module)
    # Build the optimizer after wrapping, because fsdp replaces the model's parameters.
    optimizer = build_optimizer(config.optim, config.learning_rate, model, strategy.shards, step)
    schedule = build_schedule(config.optim, config.train, optimizer, steps_per_epoch)
    scaler = (
        torch.amp.GradScaler(strategy.device.type) if config.train.precision == "fp16" else None
    )
    if scaler is not None and strategy.device.type == "cuda" and waits_for_scaler(optimizer):
        log.info(
            "fp16         optim.opt=%s waits for the GPU in every step; adamw or sgd do not",
            config.optim.opt,
        )
    return TrainState(model, step, wrapped, optimizer, schedule, scaler, ema)

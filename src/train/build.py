"""Build the objects of a training run in this order: data, model, the wrapper of the strategy,
optimizer, schedule.
"""

from __future__ import annotations

import logging
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from src.data.transforms import Preprocessing, ResizeAndCrop
from src.models.build import build_model
from src.models.preprocessing import preprocessing_for, train_image_size
from src.schema import ResolvedConfig
from src.tasks.images import ImageTask
from src.train.optim import build_learning
from timm_parallel import (
    Erasing,
    ImageDataset,
    Mixing,
    Strategy,
    build_eval_loaders,
    build_parts,
    find_task,
    freeze,
    in_memory,
    is_timm_dataset,
    load_dataset,
    load_weights,
    preprocessing_of,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DataAndModel:
    """Dataset, task, model, and loaders of val and test on this rank. Both training and evaluate.py
    need them.
    """

    dataset: ImageDataset
    task: ImageTask
    # The model on the device of this rank, before a strategy wraps it. Its weights are random or
    # those of timm.
    model: nn.Module
    preprocessing: Preprocessing
    # Evaluation loaders, as a dictionary from the name of a split to its loader.
    eval_loaders: dict[str, Any]


def build_data_and_model(
    config: ResolvedConfig, strategy: Strategy, trained_names: list[str] | None = None
) -> DataAndModel:
    """Build the dataset, task, model and evaluation loaders that training and evaluate.py need. All
    ranks must call this function. `trained_names`: class names from the checkpoint that evaluate.py
    evaluates; None in training.
    """
    # With tf32, GPUs round the inputs of float32 matrix products to 10 bits of mantissa, as they do
    # by default in convolutions.
    tf32 = config.train.precision == "tf32"
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    # Let one rank of each node download weights and data first. The other ranks then read them from
    # the cache.
    may_download = config.model.pretrained or is_timm_dataset(config.data.name)
    with strategy.group.one_of_node_first() if may_download else nullcontext():
        dataset = load_dataset(config, trained_names)
        task = find_task(config.train.task, ImageTask)(config, dataset.target_names)
        sides = config.data.image_size or dataset.image_size
        model = build_model(
            config.model, task.num_outputs, dataset.in_chans, sides, strategy.device
        )
    outputs = config.model.num_classes or task.num_outputs
    if outputs > task.num_outputs and strategy.group.is_first:
        log.warning(
            "the model has %d outputs; evaluation uses the first %d", outputs, task.num_outputs
        )
    # Use the weights of a file with the mean and std with which they were trained.
    weights = config.model.weights
    of_weights = None if weights is None else preprocessing_of(Path(weights))
    preprocessing = task.preprocessing(preprocessing_for(model, config.data, dataset, of_weights))
    splits: dict[str, Any] = {}
    transform = task.evaluation_transform(preprocessing)
    for name, split in (("val", dataset.val), ("test", dataset.test)):
        if split is not None:
            # Skip resizing and cropping if images are in memory in the right size, because that
            # would not change them. A task may have another transform, which is never skipped.
            rows = in_memory(split, preprocessing.input_size[1:])
            is_ready = rows is split or (rows is not None and preprocessing.crop_pct == 1)
            is_ready &= isinstance(getattr(transform, "transform", None), ResizeAndCrop)
            splits[name] = split, None if is_ready else transform
    loaders = build_eval_loaders(
        splits,
        task,
        strategy,
        preprocessing,
        batch_size=strategy.group.world_size if transform is None else config.global_batch,
        seed=config.seed,
        workers=config.data.workers,
        on_error=config.data.on_error,
        channels_last=config.model.channels_last is True,
    )
    return DataAndModel(dataset, task, model, preprocessing, loaders)


def build_run(config: ResolvedConfig, strategy: Strategy) -> Any:
    """Build the parts of a training run on this rank. All ranks must call this function."""
    built = build_data_and_model(config, strategy)
    dataset, task, model = built.dataset, built.task, built.model
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
    augment, size = config.data.augment, train_image_size(model, config.data, dataset)
    rows = in_memory(dataset.train, size)
    # Augment whole batches on the device if the task can. Otherwise, each image is augmented by a
    # transform.
    on_pixels = task.batch_augmentation(rows, size)
    transform = None
    if on_pixels is None:
        transform = task.train_transform(size, rows is None, built.preprocessing.mean)
    return build_parts(
        config,
        strategy,
        dataset,
        task,
        model,
        built.preprocessing,
        built.eval_loaders,
        image_size=size,
        learning=partial(build_learning, config, strategy),
        transform=transform,
        on_pixels=on_pixels,
        on_normalized=Erasing(augment.reprob, augment.remode, augment.recount)
        if augment.reprob
        else None,
        mixing=_build_mixing(config, strategy, task),
        workers=config.data.workers,
        on_error=config.data.on_error,
        copies=augment.aug_repeats,
        balance=config.data.balance,
        replay=config.data.replay_batches,
        compile_network=partial(compile_network, mode=config.model.compile),
    )


def compile_network(network: nn.Module, mode: bool | str) -> nn.Module:
    """Wrap a network with torch.compile, which compiles it in the first training step.

    `mode`: a mode of torch.compile, or True for torch's default; with False, the network is
    returned unchanged. The original network shares its parameters with the wrapper, so checkpoints
    still read the original.
    """
    if not mode:
        return network
    return cast(nn.Module, torch.compile(network, mode=None if mode is True else mode))


def _build_mixing(config: ResolvedConfig, strategy: Strategy, task: ImageTask) -> Mixing | None:
    augment = config.data.augment
    if not augment.mixes:
        return None
    return Mixing(
        config.seed,
        strategy.group.rank,
        augment.mixup_off_epoch,
        mixup_alpha=augment.mixup,
        cutmix_alpha=augment.cutmix,
        cutmix_minmax=augment.cutmix_minmax,
        prob=augment.mixup_prob,
        switch_prob=augment.mixup_switch_prob,
        mode=augment.mixup_mode,
        label_smoothing=config.train.smoothing,
        num_classes=config.model.num_classes or task.num_outputs,
    )

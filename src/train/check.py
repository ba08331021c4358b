"""Check the data before any process starts. Does not import torch."""

from __future__ import annotations

from src.data.datasets import built_in
from src.schema import Config, DataConfig, ResolvedConfig
from src.tasks import find_task
from timm_parallel.data.fractions import batches_per_epoch


def check_data(config: Config, evaluated: str | None = None) -> None:
    """Raise ValueError if data.root does not fit the dataset. `evaluated`: split to evaluate on, or
    all.
    """
    if (dataset_class := built_in(config.data.name)) is not None:
        dataset_class.check(config.data, evaluated, find_task(config.train.task).target)


def check_batch(config: ResolvedConfig) -> None:
    """Raise ValueError if the images are too few for an optimizer step. Where the number is
    unknown, the ranks check it.
    """
    batch, accumulate = config.global_batch, config.train.accumulate
    images = training_size(config.data, enough=batch * accumulate)
    if images is not None:
        batches_per_epoch(images, batch, accumulate)


def training_size(data: DataConfig, enough: int | None = None) -> int | None:
    """Count the training images without reading them; None for timm's datasets and your own.

    `enough`: a number at which counting may end.
    """
    dataset_class = built_in(data.name)
    size = None if dataset_class is None else dataset_class.size(data, enough)
    return size if size is None or data.limit_train is None else min(size, data.limit_train)

"""Build the dataset of a config, and check it before any process starts. Imports torch only where a
dataset is built.
"""

from __future__ import annotations

from typing import Any, cast

from timm_parallel.data.dataset import ImageDataset
from timm_parallel.data.fractions import batches_per_epoch
from timm_parallel.errors import refuse_wrong_arguments
from timm_parallel.keys import TIMM_DATASETS, Config, DataConfig, ResolvedConfig
from timm_parallel.machine.process import import_class, import_name
from timm_parallel.project import current
from timm_parallel.task import Task


def built_in(name: str) -> type[ImageDataset] | None:
    """Import the class of a dataset of the app, without torch; None for timm's datasets and those
    of a class.
    """
    dotted = current().datasets.get(name.partition("/")[0])
    return None if dotted is None else cast(type[ImageDataset], import_name(dotted))


def build_dataset(
    config: DataConfig, trained_names: list[str] | None = None, target: str = "label"
) -> ImageDataset:
    """Build the dataset `data.name`. `trained_names`: the names of the outputs of a run that will
    be evaluated on it. `target`: the kind that the task needs.
    """
    dataset_class: Any = built_in(config.name)
    if dataset_class is None:
        dotted = TIMM_DATASETS if config.is_from_timm else config.name
        dataset_class = import_class("data.name", dotted, ImageDataset)
    context = {"trained_names": trained_names, "target": target}
    more = {name: context[name] for name in dataset_class.takes}
    with refuse_wrong_arguments("data.kwargs", config.kwargs, config.name):
        return cast(ImageDataset, dataset_class(config, **more, **config.kwargs))


def check_data(config: Config, evaluated: str | None = None) -> None:
    """Raise ValueError if data.root does not fit the dataset. `evaluated`: split to evaluate on, or
    all.
    """
    if (dataset_class := built_in(config.data.name)) is not None:
        dataset_class.check(config.data, evaluated, Task.find(config.train.task).target)


def check_batch(config: ResolvedConfig) -> None:
    """Raise ValueError if the images are too few for an optimizer step. Where the number is
    unknown, the ranks check it.
    """
    batch, accumulate = config.global_batch, config.train.accumulate
    images = training_size(config.data, enough=batch * accumulate)
    if images is not None:
        batches_per_epoch(images, batch, accumulate)


def training_size(data: DataConfig, enough: int | None = None) -> int | None:
    """Count the training images without reading them. Returns None for timm's datasets and for
    classes of a project.

    `enough`: counting may stop at this number.
    """
    dataset_class = built_in(data.name)
    size = None if dataset_class is None else dataset_class.size(data, enough)
    return size if size is None or data.limit_train is None else min(size, data.limit_train)

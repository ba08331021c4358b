"""Build the dataset that a config names, and check the data before train.py starts any process.

This module imports torch only when it builds a dataset, so that checks stay fast.
"""

from __future__ import annotations

import inspect
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

from timm_parallel.app import current
from timm_parallel.data.dataset import ImageDataset
from timm_parallel.data.file_list import batches_per_epoch
from timm_parallel.errors import refuse_wrong_arguments
from timm_parallel.keys import TIMM_DATASETS, Config, DataConfig, ResolvedConfig, is_timm_dataset
from timm_parallel.machine.imports import import_class, import_name
from timm_parallel.machine.process import start_clock
from timm_parallel.machine.seeds import seed_all
from timm_parallel.machine.text import first


def built_in(name: str) -> type[ImageDataset] | None:
    """Import the class of a built-in dataset such as `folder` or `csv`, without importing torch.

    Returns None if data.name is a dataset of timm or the path of a Python class.
    """
    dotted = current().datasets.get(name.partition("/")[0])
    return None if dotted is None else cast(type[ImageDataset], import_name(dotted))


def build_dataset(
    config: DataConfig, trained_names: list[str] | None = None, target: str = "label"
) -> ImageDataset:
    """Build the dataset that `data.name` selects.

    `trained_names`: class names of the trained run, if this dataset is to evaluate that run.
    `target`: the kind of target that the task learns, such as label or mask.
    """
    dataset_class: Any = built_in(config.name)
    if dataset_class is None:
        dotted = TIMM_DATASETS if is_timm_dataset(config.name) else config.name
        dataset_class = import_class("data.name", dotted, ImageDataset)
    context = {"trained_names": trained_names, "target": target}
    accepted = _parameters(dataset_class)
    more = {name: value for name, value in context.items() if name in accepted}
    with refuse_wrong_arguments("data.kwargs", config.kwargs, config.name):
        dataset = cast(ImageDataset, dataset_class(config, **more, **config.kwargs))
    # A dataset of the project may have its names in a tuple, which equals no list of a checkpoint.
    if not isinstance(dataset.target_names, list):
        dataset.target_names = list(dataset.target_names)
    if others := [repr(name) for name in dataset.target_names if not isinstance(name, str)]:
        raise ValueError(
            f"data.name={config.name}: target_names has {first(others)}; expected text: convert "
            "each name with str()"
        )
    start_clock.end("data")
    return dataset


def _parameters(dataset_class: type) -> set[str]:
    """Return the names of the arguments that a class takes, with those that its `**kwargs` pass on
    to the class that it extends.
    """
    names: set[str] = set()
    for base in dataset_class.__mro__:
        if (init := vars(base).get("__init__")) is not None:
            parameters = inspect.signature(init).parameters.values()
            names.update(parameter.name for parameter in parameters)
            if all(parameter.kind != inspect.Parameter.VAR_KEYWORD for parameter in parameters):
                break
    return names


def load_dataset(config: Config, trained_names: list[str] | None = None) -> ImageDataset:
    """Build the dataset that a config names, with the targets that the task of the config needs.

    `trained_names`: the names of a trained model's outputs (e.g. its classes), if the dataset will
    evaluate that model; None for training. All generators are seeded first, so that a dataset that
    divides its images at random does so equally in each command.
    """
    seed_all(config.seed)
    return build_dataset(config.data, trained_names, _target_of(config))


def _target_of(config: Config) -> str:
    """Return the kind of target that the task of a config learns."""
    # Import the task here, because its import takes seconds.
    from timm_parallel.task import Task, find_task

    return find_task(config.train.task, Task).target


def check_root(config: Config) -> None:
    """Raise ValueError with the message of the dataset if data.root does not exist. Unlike
    `check_data`, this check does not import the task, which takes seconds.
    """
    root = config.data.root
    if root is None or Path(root).exists():
        return
    if (dataset_class := built_in(config.data.name)) is not None:
        dataset_class.check(config.data)
    elif is_timm_dataset(config.data.name):
        _check_timm_dataset(config.data)


def check_data(config: Config, evaluated: str | None = None) -> None:
    """Raise ValueError if the files below data.root do not fit the dataset.

    `evaluated`: the split on which a trained run will be evaluated, or `all`; None for training.
    """
    if (dataset_class := built_in(config.data.name)) is not None:
        dataset_class.check(config.data, evaluated, _target_of(config))
    elif is_timm_dataset(config.data.name):
        _check_timm_dataset(config.data)


def _check_timm_dataset(data: DataConfig) -> None:
    """Raise ValueError if a dataset of timm lacks its package or its folder. Neither is imported or
    read.
    """
    source = data.name.partition("/")[0]
    if source == "hfds" and find_spec("datasets") is None:
        raise ValueError(
            f"data.name={data.name}: needs a package that is not installed: pip install datasets"
        )
    # A Hugging Face dataset is read from the cache of the hub. torchvision makes the folder for a
    # download.
    may_be_missing = source == "hfds" or (data.root and data.kwargs.get("download"))
    if not may_be_missing and not (data.root and Path(data.root).is_dir()):
        download = "; add +data.kwargs.download=true to fill it" if source == "torch" else ""
        raise ValueError(
            f"data.root={data.root or 'null'}: no such folder; data.name={data.name} needs "
            f"data.root=<folder>{download}"
        )


def check_batch(config: ResolvedConfig) -> None:
    """Raise ValueError if the training images do not fill one optimizer step.

    If the number of images is unknown before the dataset is built, this function does nothing. The
    ranks check the number later.
    """
    batch, accumulate = config.global_batch, config.train.accumulate
    images = training_size(config.data, enough=batch * accumulate)
    if images is not None:
        batches_per_epoch(images, batch, accumulate)


def training_size(data: DataConfig, enough: int | None = None) -> int | None:
    """Count the training images without reading them.

    Returns None for datasets of timm and for a dataset class of the user, whose sizes are unknown
    until the dataset is built. `enough`: the count may stop when it reaches this number.
    """
    dataset_class = built_in(data.name)
    size = None if dataset_class is None else dataset_class.size(data, enough)
    return size if size is None or data.limit_train is None else min(size, data.limit_train)

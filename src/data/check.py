"""Check the data before any process starts. Does not import torch."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

from src.schema import MADE_IN_MEMORY, Config, DataConfig, ResolvedConfig
from timm_parallel.data.csv_listing import check_csv, count_training
from timm_parallel.data.folder import check_folder, training_files
from timm_parallel.data.fractions import batches_per_epoch


def check_data(config: Config, evaluated: str | None = None) -> None:
    """Raise ValueError if data.root does not fit the dataset. `evaluated`: split to evaluate on, or
    all.
    """
    data = config.data
    if data.root is not None and data.name in MADE_IN_MEMORY:
        raise ValueError(
            f"data.root={data.root}: data.name={data.name} reads no folder; give data=folder too, "
            "or data.root=null"
        )
    if data.name == "folder":
        check_folder(data, evaluated)
    elif data.name == "csv":
        check_csv(data, config.train.task == "multilabel", is_trained=evaluated is None)
    elif data.name.partition("/")[0] in ("tar", "wds") and not (
        data.root and Path(data.root).is_dir()
    ):
        raise ValueError(
            f"data.root={data.root}: no such folder; give the one that contains the tars"
        )


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
    size = {"digits": 1257, "synthetic": int(data.kwargs.get("num_samples", 2048))}.get(data.name)
    if data.name == "folder" and data.root is not None:
        size = sum(1 for _ in islice(training_files(data), enough))
    if data.name == "csv":
        size = count_training(data)
    return size if size is None or data.limit_train is None else min(size, data.limit_train)

"""Check the data before any process starts. Does not import torch."""

from __future__ import annotations

from pathlib import Path

from src.engine.data.csv_listing import check_csv, list_csv
from src.engine.data.folder import check_folder, list_folder
from src.schema import MADE_IN_MEMORY, DataConfig


def check_data(data: DataConfig, evaluated: str | None = None) -> None:
    """Raise ValueError if data.root does not fit the dataset. `evaluated`: split to evaluate on, or all."""
    if data.root is not None and data.name in MADE_IN_MEMORY:
        raise ValueError(
            f"data.root={data.root}: data.name={data.name} reads no folder; give data=folder too, or data.root=null"
        )
    if data.name == "folder":
        check_folder(data, evaluated)
    elif data.name == "csv":
        check_csv(data)
    elif data.name.partition("/")[0] in ("tar", "wds") and not (data.root and Path(data.root).is_dir()):
        raise ValueError(f"data.root={data.root}: no such folder; give the one that contains the tars")


def training_size(data: DataConfig) -> int | None:
    """Count the training images without reading them; None for timm's datasets and your own."""
    size = {"digits": 1257, "synthetic": int(data.kwargs.get("num_samples", 2048))}.get(data.name)
    if data.name == "folder" and data.root is not None:
        size = len(list_folder(data)[1]["train"])
    if data.name == "csv":
        size = len(list_csv(data)[1]["train"])
    return size if size is None or data.limit_train is None else min(size, data.limit_train)

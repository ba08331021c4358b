"""Checks of the config and data of the small project. They run before the ranks start and must not
import torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

IMAGES = 64


def check_data(config: Any) -> None:
    """Raise an error if data.name is not `line`, the only dataset of the small project."""
    if config.data.name != "line":
        raise ValueError(f"data.name={config.data.name}: expected line")


def check_batch(config: Any) -> None:
    """Raise an error if the batch is larger than the dataset."""
    if config.global_batch > IMAGES:
        raise ValueError(f"data.batch_size={config.global_batch}: expected at most {IMAGES}")


def training_size(data: Any) -> int:
    """Return the number of training samples."""
    return IMAGES


def rules(config: Any) -> Iterator[str]:
    """Yield no error messages, because no key of the small project restricts the value of another
    key.
    """
    yield from ()

"""Checks of the data, which need no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

IMAGES = 64


def check_data(config: Any) -> None:
    """Refuse data that do not exist."""
    if config.data.name != "line":
        raise ValueError(f"data.name={config.data.name}: expected line")


def check_batch(config: Any) -> None:
    """Refuse a batch that is larger than the data."""
    if config.global_batch > IMAGES:
        raise ValueError(f"data.batch_size={config.global_batch}: expected at most {IMAGES}")


def training_size(data: Any) -> int:
    """Return the number of points."""
    return IMAGES


def rules(config: Any) -> Iterator[str]:
    """Yield nothing: the keys of this project do not depend on each other."""
    yield from ()

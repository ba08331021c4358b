"""One run, by one rank. lifecycle.py tells it; the engine is handed `run` and knows nothing else of this room."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from src.engine.machine.process import imports_without_collector
from src.engine.machine.ranks import Ranks
from src.schema import ResolvedConfig

if TYPE_CHECKING:
    from torch.distributed import Store


def run(config: ResolvedConfig, folder: Path, ranks: Ranks, store: Store | None) -> None:
    """`lifecycle.run`, imported when it is called: torch and timm take seconds, and a fault in a fork's own code
    belongs into the record of the rank that meets it."""
    with imports_without_collector():
        from src.run import lifecycle

    lifecycle.run(config, folder, ranks, store)

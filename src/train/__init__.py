"""Training. Read run.py first: it shows one run, top to bottom."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from src.schema import ResolvedConfig
from timm_parallel.machine.process import imports_without_gc
from timm_parallel.machine.ranks import Ranks

if TYPE_CHECKING:
    from torch.distributed import Store


def run_training(config: ResolvedConfig, folder: Path, ranks: Ranks, store: Store | None) -> None:
    """Train as one rank of a run. Torch and your code are imported here, so that the rank records
    import errors.
    """
    with imports_without_gc():
        from src.train.run import run

    run(config, folder, ranks, store)


def preload() -> None:
    """Import the modules of a run with one rank, for the server process that forks such runs."""
    with imports_without_gc():
        for module in ("src.train.run", "src.parallel.data_parallel", "torch.utils.tensorboard"):
            import_module(module)

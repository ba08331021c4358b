"""Build the strategy of a run, which distributes the training over devices.

Each strategy is one class. To add a strategy, write a class that extends Single (one process) or
Distributed (a process per device), and a YAML file in conf/parallel/ with the line `strategy:
src.parallel.<module>.<Class>`.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from timm_parallel.keys import STRATEGIES, ResolvedParallel
from timm_parallel.machine.imports import import_class
from timm_parallel.machine.start_clock import start_clock

if TYPE_CHECKING:
    from torch.distributed import Store

    from timm_parallel.machine.ranks import Ranks
    from timm_parallel.parallel.strategy import Strategy


def build_strategy(
    config: ResolvedParallel, ranks: Ranks, store: Store | None, deterministic: bool = False
) -> Strategy:
    """Build the strategy of a resolved config, set up its devices and join the process group.

    All ranks must call this function. `deterministic`: the value of train.deterministic, which must
    take effect before a device is used.
    """
    start_clock.end("imports")
    if deterministic:
        use_deterministic_algorithms()
    from timm_parallel.parallel.strategy import Strategy

    built_in = {name: strategy.name for name, strategy in STRATEGIES.items()}
    strategy = import_class("parallel.strategy", config.strategy, Strategy, built_in)
    built = strategy(config, ranks, store)
    start_clock.end("devices")
    return built


def use_deterministic_algorithms() -> None:
    """Make torch raise RuntimeError for nondeterministic operations.

    This function must be called before a GPU is used for the first time.
    """
    import torch

    # cuBLAS reads CUBLAS_WORKSPACE_CONFIG only once. Without this environment variable, torch would
    # raise RuntimeError for each matrix product.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # Disable cuDNN's benchmark mode, which chooses algorithms by timing and so may choose
    # differently in each run.
    torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(True)

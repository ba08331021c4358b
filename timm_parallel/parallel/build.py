"""Build the strategy of a run. Strategies spread a model over devices, one class each.

To add one, write a class that extends Single (one process) or Distributed (a process per device),
and a YAML in conf/parallel/ that names it: `strategy: src.parallel.<module>.<Class>`.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from timm_parallel.keys import ResolvedParallel
from timm_parallel.machine.process import import_class
from timm_parallel.project import current

if TYPE_CHECKING:
    from torch.distributed import Store

    from timm_parallel.machine.ranks import Ranks
    from timm_parallel.parallel.strategy import Strategy


def build_strategy(
    config: ResolvedParallel, ranks: Ranks, store: Store | None, deterministic: bool = False
) -> Strategy:
    """Build the strategy of a resolved config: set up its devices and join its process group.

    `deterministic`: train.deterministic, which must be set before the devices are used.
    """
    if deterministic:
        use_deterministic_algorithms()
    from timm_parallel.parallel.strategy import Strategy

    known = current().strategies
    strategy = import_class("parallel.strategy", config.strategy, Strategy, known)
    return strategy(config, ranks, store)


def use_deterministic_algorithms() -> None:
    """Make torch raise RuntimeError for nondeterministic operations. Call this before the first use
    of a GPU.
    """
    import torch

    # cuBLAS reads the variable once. Without it, torch raises RuntimeError for each matrix product.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # cuDNN's benchmark mode chooses algorithms by timing them, so its choice may vary.
    torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(True)

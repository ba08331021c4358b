"""Strategies spread a model over devices, one class each. Importing this package does not import
torch.

To add one, put a class next to these that extends Single (one process) or Distributed (a process
per device), and a YAML in conf/parallel/ that names it: `strategy: src.parallel.<module>.<Class>`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from src.schema import STRATEGIES, ResolvedParallel
from timm_parallel.machine.process import import_name

if TYPE_CHECKING:
    from torch.distributed import Store

    from timm_parallel.machine.ranks import Ranks
    from timm_parallel.parallel.strategy import Strategy


def build_strategy(config: ResolvedParallel, ranks: Ranks, store: Store | None) -> Strategy:
    """Build the strategy of a resolved config: set up its devices and join its process group."""
    from timm_parallel.parallel.strategy import Strategy

    strategy = import_name(STRATEGIES.get(config.strategy, config.strategy))
    if not issubclass(strategy, Strategy):
        raise ValueError(
            f"parallel.strategy={config.strategy}: expected a class that extends Single or "
            "Distributed of src/parallel/"
        )
    built: Strategy = strategy(config, ranks, store)
    return built

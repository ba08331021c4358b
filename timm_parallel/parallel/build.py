"""Build the strategy of a run. Strategies spread a model over devices, one class each.

To add one, write a class that extends Single (one process) or Distributed (a process per device),
and a YAML in conf/parallel/ that names it: `strategy: src.parallel.<module>.<Class>`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from timm_parallel.keys import ResolvedParallel
from timm_parallel.machine.process import import_name
from timm_parallel.project import current

if TYPE_CHECKING:
    from torch.distributed import Store

    from timm_parallel.machine.ranks import Ranks
    from timm_parallel.parallel.strategy import Strategy


def build_strategy(config: ResolvedParallel, ranks: Ranks, store: Store | None) -> Strategy:
    """Build the strategy of a resolved config: set up its devices and join its process group."""
    from timm_parallel.parallel.strategy import Strategy

    strategy = import_name(current().strategies.get(config.strategy, config.strategy))
    if not issubclass(strategy, Strategy):
        raise ValueError(
            f"parallel.strategy={config.strategy}: expected a class that extends Single or "
            "Distributed"
        )
    built: Strategy = strategy(config, ranks, store)
    return built

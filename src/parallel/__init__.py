"""How a model is spread over devices: one class per strategy. Callers get an object of one and never ask which.

A strategy of your own is a class beside these, which extends Single (one process) or Distributed (a process per device),
and a YAML in conf/parallel/ that names it: `strategy: src.parallel.<module>.<Class>`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from src.parallel.single import Single

if TYPE_CHECKING:
    from torch.distributed import Store

    from src.engine.machine.ranks import Ranks
    from src.schema import ResolvedParallel

STRATEGIES = {
    "single": "src.parallel.single.Single",
    "dp": "src.parallel.data_parallel.DataParallelStrategy",
    "ddp": "src.parallel.distributed.Distributed",
}


def build_strategy(config: ResolvedParallel, ranks: Ranks, store: Store | None) -> Single:
    """The strategy of a resolved config, its devices ready and its process group joined.

    Errors: ValueError for a class that is no strategy.
    """
    module, _, name = STRATEGIES.get(config.strategy, config.strategy).rpartition(".")
    strategy = getattr(import_module(module), name)
    if not issubclass(strategy, Single):
        raise ValueError(f"parallel.strategy={config.strategy}: must extend Single of src/parallel/single.py")
    return strategy(config, ranks, store)

"""How a model is spread over devices. Callers get one of three strategies and never ask which."""

from __future__ import annotations

from typing import TYPE_CHECKING

from src.parallel.single import Single

if TYPE_CHECKING:
    from torch.distributed import Store

    from src.engine.machine.ranks import Ranks
    from src.schema import ResolvedParallel


def build_strategy(config: ResolvedParallel, ranks: Ranks, store: Store | None) -> Single:
    """The strategy of a resolved config, its devices ready and its process group joined."""
    if config.strategy == "ddp":
        from src.parallel.distributed import Distributed

        assert store is not None
        return Distributed(config, ranks, store)
    if config.strategy == "dp":
        from src.parallel.data_parallel import DataParallelStrategy

        return DataParallelStrategy(config, ranks)
    return Single(config, ranks)

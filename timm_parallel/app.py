"""The app of a project, which src/app.py makes: names and classes for the library, and configs for
Python code.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from timm_parallel.config.arguments import parse_command_line
from timm_parallel.config.compose import compose_command, load_config
from timm_parallel.config.evaluation import evaluation_config
from timm_parallel.config.resolve import resolve
from timm_parallel.config.validate import check_combination
from timm_parallel.data.build import build_dataset
from timm_parallel.data.dataset import ImageDataset
from timm_parallel.data.fractions import batches_per_epoch
from timm_parallel.keys import ResolvedParallel, leaves
from timm_parallel.machine.ranks import Ranks, ranks_from_environment
from timm_parallel.project import C, Project, R
from timm_parallel.task import Task

if TYPE_CHECKING:
    from torch.distributed import Store

    from timm_parallel.parallel.strategy import Strategy


class App(Project[C, R]):
    """A project that the library trains. Making one makes it that of this process."""

    def compose(self, *overrides: str) -> C:
        """Compose and check the config of a command line of train.py, e.g. `model=tiny`."""
        return self.own(compose_command(parse_command_line([*overrides])).config)

    def declared_keys(self) -> list[tuple[str, Any, Any]]:
        """Return (dotted key, default, dataclass field) of each key, in the order of the schema."""
        return list(leaves(self.config()))

    def batches_per_epoch(self, config: R, images: int) -> int:
        """Return the number of global batches in an epoch of `images` images. Raises ValueError if
        there are too few images for an optimizer step.
        """
        return batches_per_epoch(images, config.global_batch, config.train.accumulate)

    def build_dataset(self, config: C | R, trained_names: list[str] | None = None) -> ImageDataset:
        """Build the dataset of a config, for its task. `trained_names`: the names of the outputs of
        a run that will be evaluated on it.
        """
        return build_dataset(config.data, trained_names, Task.find(config.train.task).target)

    def build_strategy(
        self,
        parallel: ResolvedParallel,
        ranks: Ranks,
        store: Store | None,
        deterministic: bool = False,
    ) -> Strategy:
        """Build the strategy of a run: set up its devices and join its process group.

        `store`: through which the ranks find each other; None for one process. `deterministic`:
        train.deterministic, which must be set before the devices are used.
        """
        from timm_parallel.parallel.build import build_strategy

        return build_strategy(parallel, ranks, store, deterministic)

    def check(self, config: C) -> None:
        """Raise ValueError for keys of a config that cannot work together."""
        check_combination(config)

    def resolve(self, config: C, *sizes: int) -> R:
        """Replace each `auto` of a config by its value on this machine.

        `sizes`: the number of ranks in all and on this node, if torchrun or srun starts them.
        """
        return self.own_resolved(resolve(config, *sizes))

    def resolve_for_ranks(self, config: C) -> R:
        """Replace each `auto` by its value for the ranks that torchrun or srun started, if they
        did, else on this machine.
        """
        ranks = ranks_from_environment(os.environ) if config.parallel.has_ranks else None
        return self.resolve(config, *((ranks.world_size, ranks.local_world_size) if ranks else ()))

    def resolve_parallel(
        self, strategy: str, devices: int | str, batch_size_per_device: int
    ) -> ResolvedParallel:
        """Resolve a strategy and a number of devices for this machine, or for the ranks that
        torchrun or srun started. Raises ValueError if they do not fit.
        """
        config = self.config()
        config.parallel.strategy, config.parallel.devices = strategy, devices
        config.data.batch_size, config.data.batch_size_per_device = None, batch_size_per_device
        # Every task has it.
        config.checkpoint.metric = "val/loss"
        self.check(config)
        return self.resolve_for_ranks(config).parallel

    def load_config(self, folder: Path) -> R:
        """Read the config of a run from its folder."""
        return self.own_resolved(load_config(folder))

    def evaluation_config(self, run: Path | None, overrides: list[str]) -> R:
        """Return the config to evaluate `run`, or the model that the overrides choose.

        `overrides`: as for train.py.
        """
        ranks = ranks_from_environment(os.environ)
        return self.own_resolved(evaluation_config(run, overrides, ranks))

"""Class `App`, from which src/app.py builds the app of a project. The app tells the library the
project's names and classes, and composes configs for Python code.
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
from timm_parallel.task_rules import check_task

if TYPE_CHECKING:
    from torch.distributed import Store

    from timm_parallel.parallel.strategy import Strategy


class App(Project[C, R]):
    """A project that the library trains. Building an App makes that project the current one of this
    process.
    """

    def compose(self, *overrides: str) -> C:
        """Compose and check the config that train.py would use with these overrides, e.g.
        `model=tiny`.
        """
        config = compose_command(parse_command_line([*overrides])).config
        check_task(config)
        return self.own(config)

    def declared_keys(self) -> list[tuple[str, Any, Any]]:
        """Return (dotted key, default value, dataclass field) of each config key, in the order of
        src/schema.py.
        """
        return list(leaves(self.config()))

    def batches_per_epoch(self, config: R, images: int) -> int:
        """Compute the number of global batches in an epoch of `images` training images. Raises
        ValueError if the images do not fill a single optimizer step.
        """
        return batches_per_epoch(images, config.global_batch, config.train.accumulate)

    def build_dataset(self, config: C | R, trained_names: list[str] | None = None) -> ImageDataset:
        """Build the dataset that a config names, with the targets that the task of the config
        needs.

        `trained_names`: the names of a trained model's outputs (e.g. its classes), if the dataset
        will evaluate that model; None for training. All generators are seeded first, so that a
        dataset that divides its images at random does so equally in each command.
        """
        from timm_parallel.runtime.determinism import seed_all

        seed_all(config.seed)
        return build_dataset(config.data, trained_names, Task.find(config.train.task).target)

    def build_strategy(
        self,
        parallel: ResolvedParallel,
        ranks: Ranks,
        store: Store | None,
        deterministic: bool = False,
    ) -> Strategy:
        """Build the parallel strategy of a run: set up its devices and join its process group.

        `parallel`: the config group. `ranks`: the identity of this rank. `store`: the key-value
        store through which the ranks find each other, None for a run of one process.
        `deterministic`: the key train.deterministic, which must be set before a device is used.
        """
        from timm_parallel.parallel.build import build_strategy

        return build_strategy(parallel, ranks, store, deterministic)

    def check(self, config: C) -> None:
        """Raise ValueError if keys of a config cannot work together."""
        check_combination(config)
        check_task(config)

    def resolve(self, config: C, *sizes: int) -> R:
        """Replace each `auto` value of a config by its value on this machine.

        `sizes`: world size and local world size, if torchrun or srun started this process.
        """
        return self.own_resolved(resolve(config, *sizes))

    def resolve_for_ranks(self, config: C) -> R:
        """Replace each `auto` value of a config. If torchrun or srun started this process, the
        values fit the number of ranks. Otherwise they fit this machine.
        """
        ranks = ranks_from_environment(os.environ) if config.parallel.has_ranks else None
        return self.resolve(config, *((ranks.world_size, ranks.local_world_size) if ranks else ()))

    def resolve_parallel(
        self, strategy: str, devices: int | str, batch_size_per_device: int
    ) -> ResolvedParallel:
        """Build the resolved `parallel` config group for a strategy, a number of devices (or
        `auto`) and a batch size per device.

        The numbers fit the ranks that torchrun or srun started, otherwise this machine. Raises
        ValueError if strategy and devices do not fit.
        """
        config = self.config()
        config.parallel.strategy, config.parallel.devices = strategy, devices
        config.data.batch_size, config.data.batch_size_per_device = None, batch_size_per_device
        # Select checkpoints by val/loss, which every task has. The check would reject a default
        # metric that the task does not have.
        config.checkpoint.metric = "val/loss"
        self.check(config)
        return self.resolve_for_ranks(config).parallel

    def load_config(self, folder: Path) -> R:
        """Read the resolved config of a run from config.yaml in the run folder."""
        return self.own_resolved(load_config(folder))

    def evaluation_config(self, run: Path | None, overrides: list[str]) -> R:
        """Build the resolved config for an evaluation.

        `run`: the folder of the run to evaluate. None: evaluate the model that the overrides name.
        `overrides`: `key=value` arguments, as on the command line of train.py.
        """
        config = evaluation_config(run, overrides, ranks_from_environment(os.environ))
        check_task(config)
        return self.own_resolved(config)

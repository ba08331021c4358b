"""The app of a project, which src/app.py makes: names and classes for the library, and configs for
Python code.
"""

from __future__ import annotations

import os
from pathlib import Path

from timm_parallel.config.arguments import parse_command_line
from timm_parallel.config.compose import compose_command, load_config
from timm_parallel.config.evaluation import evaluation_config
from timm_parallel.config.resolve import resolve
from timm_parallel.machine.ranks import ranks_from_environment
from timm_parallel.project import C, Project, R


class App(Project[C, R]):
    """A project that the library trains. Making one makes it that of this process."""

    def compose(self, *overrides: str) -> C:
        """Compose and check the config of a command line of train.py, e.g. `model=tiny`."""
        return self.own(compose_command(parse_command_line([*overrides])).config)

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

    def load_config(self, folder: Path) -> R:
        """Read the config of a run from its folder."""
        return self.own_resolved(load_config(folder))

    def evaluation_config(self, run: Path | None, overrides: list[str]) -> R:
        """Return the config to evaluate `run`, or the model that the overrides choose.

        `overrides`: as for train.py.
        """
        ranks = ranks_from_environment(os.environ)
        return self.own_resolved(evaluation_config(run, overrides, ranks))

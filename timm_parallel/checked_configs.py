"""Compose and check configs in Python, as train.py and evaluate.py do. For the project, scripts
and notebooks.
"""

from __future__ import annotations

import os
from pathlib import Path

from timm_parallel.app import current
from timm_parallel.config.arguments import parse_command_line
from timm_parallel.config.compose import compose_command
from timm_parallel.config.evaluation import compose_evaluation
from timm_parallel.config.resolve import resolve
from timm_parallel.config.validate import check_combination
from timm_parallel.keys import Config, ResolvedConfig, ResolvedParallel
from timm_parallel.machine.ranks import ranks_from_environment
from timm_parallel.task_rules import check_task


def compose(*overrides: str) -> Config:
    """Compose and check the config that train.py would use with these overrides, e.g. `model=tiny`.
    The class of the config is that of the project (`App.config`).
    """
    config = compose_command(parse_command_line([*overrides])).config
    check_task(config)
    return config


def check_config(config: Config) -> None:
    """Raise ValueError if keys of a config cannot work together."""
    check_combination(config)
    check_task(config)


def resolve_parallel(
    strategy: str, devices: int | str, batch_size_per_device: int
) -> ResolvedParallel:
    """Build the resolved `parallel` config group for a strategy, a number of devices (or `auto`)
    and a batch size per device.

    The numbers fit the ranks that torchrun or srun started, otherwise this machine. Raises
    ValueError if strategy and devices do not fit.
    """
    config = current().config()
    config.parallel.strategy, config.parallel.devices = strategy, devices
    config.data.batch_size, config.data.batch_size_per_device = None, batch_size_per_device
    check_combination(config)
    ranks = ranks_from_environment(os.environ) if config.parallel.has_ranks else None
    sizes = () if ranks is None else (ranks.world_size, ranks.local_world_size)
    return resolve(config, *sizes).parallel


def evaluation_config(run: Path | None, overrides: list[str]) -> ResolvedConfig:
    """Build the resolved config for an evaluation.

    `run`: the folder of the run to evaluate. None: evaluate the model that the overrides name.
    `overrides`: `key=value` arguments, as on the command line of train.py.
    """
    config = compose_evaluation(run, overrides, ranks_from_environment(os.environ))
    check_task(config)
    return config

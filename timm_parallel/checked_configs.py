"""Compose and check configs in Python, as train.py and evaluate.py do. For the project, scripts
and notebooks.
"""

from __future__ import annotations

import os
from pathlib import Path

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from timm_parallel.app import current
from timm_parallel.config.arguments import parse_command_line
from timm_parallel.config.compose import compose_command, load_config, typed_and_checked
from timm_parallel.config.explain import explain
from timm_parallel.config.resolve import resolve
from timm_parallel.config.suggest import is_known, key_hint
from timm_parallel.config.validate import check_combination
from timm_parallel.keys import (
    ClusterConfig,
    Config,
    ParallelConfig,
    ResolvedConfig,
    ResolvedParallel,
    TrackerConfig,
    is_below,
)
from timm_parallel.machine.ranks import Ranks, ranks_from_environment
from timm_parallel.task_rules import check_task

# Config keys that evaluate.py accepts with run=<folder>, and config keys that it accepts without
# run.
KEYS_WITH_RUN = ("data", "parallel", "train.precision", "train.task_kwargs", "paths")
KEYS_WITHOUT_RUN = (*KEYS_WITH_RUN, "model", "experiment", "seed")
OPTIONS = ("run", "split", "checkpoint", "weights", "predictions")
# Config group -> the key that the group's name sets. A saved config has no groups, so
# `parallel=ddp` sets parallel.strategy.
GROUPS = {"parallel": "parallel.strategy", "data": "data.name"}


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


def compose_evaluation(
    run: Path | None, overrides: list[str], ranks: Ranks | None
) -> ResolvedConfig:
    """Build the resolved config for an evaluation.

    `run`: the folder of the run to evaluate. None: evaluate the model that the overrides name.
    `overrides`: `key=value` arguments, as on the command line of train.py. `ranks`: identity of
    this rank, if torchrun or srun started it.
    """
    for override in overrides:
        _check_key(override, KEYS_WITHOUT_RUN if run is None else KEYS_WITH_RUN)
    if run is not None:
        config = _saved_config(run, overrides)
    else:
        # Put the default strategy first, because a later parallel=… replaces it.
        config = compose_command(parse_command_line(["parallel=single", *overrides])).config
        if not config.model.pretrained and config.model.weights is None:
            raise ValueError(
                "nothing to evaluate: give run=<run folder>, model.pretrained=true or "
                "model.weights=<file>"
            )
    # Reset config keys that only training uses.
    config.model.for_evaluation()
    config.tracker, config.train.accumulate = TrackerConfig(), 1
    check_combination(config)
    return resolve(config, *((ranks.world_size, ranks.local_world_size) if ranks else ()))


def _check_key(override: str, allowed: tuple[str, ...]) -> None:
    key, equals, value = override.lstrip("+").partition("=")
    if not equals and not key.startswith("-"):
        raise ValueError(f"{override}: expected key=value; for a run folder write run={override}")
    if not (equals and (is_known(key) or key == "experiment")):
        hint = key_hint(key.lstrip("-"), OPTIONS, value, "evaluate")
        raise ValueError(f"{override}: unknown option{hint}")
    if not is_below(key, allowed):
        raise ValueError(
            f"{override}: not an evaluation option; evaluate.py allows keys that start with "
            f"{', '.join(allowed)}"
        )


def _saved_config(run: Path, overrides: list[str]) -> Config:
    saved = load_config(run)
    config = current().config(**vars(saved))
    per_device = max(1, saved.global_batch // saved.parallel.devices)
    # Choose the devices again, because the run may have been on another machine.
    config.parallel, config.cluster = ParallelConfig(), ClusterConfig()
    config.parallel.choose_strategy(several=False)
    # Do not load pretrained weights, because the checkpoint of the run has all weights.
    config.model.pretrained, config.model.weights, config.model.weights_strict = False, None, True
    given = dict(override.lstrip("+").split("=", 1) for override in overrides)
    dotted = [f"{GROUPS.get(key, key)}={value}" for key, value in given.items()]
    config.data.batch_size = None
    config.data.batch_size_per_device = None if "data.batch_size" in given else per_device
    try:
        merged = OmegaConf.merge(OmegaConf.structured(config), OmegaConf.from_dotlist(dotted))
    except OmegaConfBaseException as error:
        raise ValueError(explain(error, dotted)) from error
    return typed_and_checked(merged)  # type: ignore[arg-type]

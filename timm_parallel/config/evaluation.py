"""Config of an evaluation: the config of a run with other data or devices, or a config that is
composed from the command line.
"""

from __future__ import annotations

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
    TrackerConfig,
    is_below,
)
from timm_parallel.machine.ranks import Ranks

# Config keys that evaluate.py accepts with run=<folder>, and config keys that it accepts without
# run.
KEYS_WITH_RUN = ("data", "parallel", "train.precision", "train.task_kwargs", "paths")
KEYS_WITHOUT_RUN = (*KEYS_WITH_RUN, "model", "experiment", "seed")
OPTIONS = ("run", "split", "checkpoint", "weights", "predictions")
# Config group -> the key that the group's name sets. A saved config has no groups, so
# `parallel=ddp` sets parallel.strategy.
GROUPS = {"parallel": "parallel.strategy", "data": "data.name"}


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
        config = _load(run, overrides)
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


def _load(run: Path, overrides: list[str]) -> Config:
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

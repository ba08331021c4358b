"""The config of an evaluation: a run's frozen one with other data or devices, or one composed from the command line."""

from __future__ import annotations

from pathlib import Path

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from src.engine.config.combinations import check_combination
from src.engine.config.compose import compose_command, read_frozen, to_config
from src.engine.config.confidential import check_overrides
from src.engine.config.names import explain, is_known, key_hint
from src.engine.config.resolve import resolve
from src.engine.machine.ranks import Ranks
from src.schema import ClusterConfig, Config, ParallelConfig, ResolvedConfig

OF_A_RUN = ("data", "parallel", "train.precision", "paths")  # what may differ from how it was trained
OF_A_MODEL = (*OF_A_RUN, "model", "experiment", "seed")
GROUPS = {"parallel": "parallel.strategy", "data": "data.name"}  # a frozen config has no groups left


def evaluation_config(run: Path | None, overrides: list[str], ranks: Ranks | None) -> ResolvedConfig:
    """The resolved config of an evaluation of `run`, or of a model that the `overrides` name, which are as for train.py.

    `ranks` are given where they were started from outside.
    """
    for override in overrides:
        _check_part(override, OF_A_MODEL if run is None else OF_A_RUN)
    config = _composed(overrides) if run is None else _frozen(run, overrides)
    config.model.sync_bn, config.model.compile = False, False  # of training
    check_combination(config)
    if run is None and not config.model.pretrained and config.model.weights is None:
        raise ValueError("nothing to evaluate: give run=<run folder>, model.pretrained=true or model.weights=<file>")
    return resolve(config, *((ranks.world_size, ranks.local_world_size) if ranks else ()))


def _check_part(override: str, allowed: tuple[str, ...]) -> None:
    key = override.lstrip("+").partition("=")[0]
    if "=" not in override or not (is_known(key) or key == "experiment"):
        raise ValueError(f"{override}: unknown option{key_hint(key, ('run', 'split', 'checkpoint'))}")
    if not any(key == part or key.startswith(f"{part}.") for part in allowed):
        raise ValueError(f"{override}: has no part in an evaluation; give {', '.join(f'{part}…' for part in allowed)}")


def _composed(overrides: list[str]) -> Config:
    from hydra._internal.utils import get_args_parser

    if not any(override.startswith(("parallel=", "parallel.strategy=")) for override in overrides):
        overrides = ["parallel=single", *overrides]
    return compose_command(get_args_parser().parse_args(overrides)).config


def _frozen(run: Path, overrides: list[str]) -> Config:
    frozen = read_frozen(run)
    config = Config(**vars(frozen))
    per_device = max(1, frozen.global_batch // frozen.parallel.devices)
    config.parallel, config.cluster = ParallelConfig(strategy="single"), ClusterConfig()  # here, wherever trained
    config.model.pretrained, config.model.weights = False, None
    check_overrides(overrides)
    given = dict(override.lstrip("+").split("=", 1) for override in overrides)
    dotted = [f"{GROUPS.get(key, key)}={value}" for key, value in given.items()]
    config.data.batch_size = None
    config.data.batch_size_per_device = None if "data.batch_size" in given else per_device
    try:
        merged = OmegaConf.merge(OmegaConf.structured(config), OmegaConf.from_dotlist(dotted))
    except OmegaConfBaseException as error:
        raise ValueError(explain(error, dotted)) from error
    return to_config(merged)  # type: ignore[arg-type]

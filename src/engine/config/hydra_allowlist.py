"""Allow a few keys of the `hydra` block; the others decide which code Hydra imports and where it writes."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from src.engine.config.suggest import ROOT, explain, plain_values

SETTABLE = ("run", "sweep", "sweeper.params", "job.name", "job.chdir", "verbose")
# Hydra itself fills these in while it composes.
FILLED_IN = ("mode", "runtime", "overrides", "job.id", "job.num", "job.config_name", "job.override_dirname")


def check_hydra_key(key: str, given: str) -> None:
    """Refuse an override of a `hydra` key that is not allowed, before Hydra imports packages of `hydra.searchpath`."""
    if not _is_below(re.sub("^hydra[./]?", "", key), SETTABLE):
        raise ValueError(f"{given}: fixed; below hydra set only {', '.join(SETTABLE)}")


def check_search_path(loader: Any, config_name: str) -> None:
    """Refuse `hydra.searchpath` in the main config, the only file that can set it."""
    main = loader.repository.load_config(config_name)
    if main is not None and OmegaConf.is_dict(main.config):
        folders = OmegaConf.select(main.config, "hydra.searchpath")
        if folders:
            raise ValueError(f"hydra.searchpath={folders}: fixed; give a folder of configs with --config-dir")


def check_hydra_types(block: dict[str, Any]) -> None:
    """Refuse values of wrong types in a composed `hydra` block: OmegaConf checks plain values, but not typed ones."""
    # Hydra's schema lacks its own group `env`.
    given = {key: value for key, value in block.items() if key != "env"}
    try:
        OmegaConf.merge({"hydra": _schema()}, {"hydra": given})
    except OmegaConfBaseException as error:
        raise ValueError(explain(error)) from error


def check_hydra_block(tree: DictConfig) -> None:
    """Refuse a composed config in which a `hydra` key that is not allowed differs from its default."""
    given = {pair for pair in _pairs(tree) if not _is_below(pair[0], (*SETTABLE, *FILLED_IN))}
    # A main config without conf/hydra/default.yaml, such as a run's config.yaml, has Hydra's own defaults.
    changed = given - _defaults("+hydra=default")
    if changed:
        changed -= _defaults()
    if changed:
        key, value = min(changed)
        raise ValueError(f"hydra.{key}={value}: fixed; below hydra set only {', '.join(SETTABLE)}")
    # Hydra has only an assertion for these values.
    names = tree.hydra.verbose if OmegaConf.is_list(tree.hydra.verbose) else [tree.hydra.verbose]
    if not isinstance(tree.hydra.verbose, bool) and not all(isinstance(name, str) for name in names):
        raise ValueError(f"hydra.verbose={tree.hydra.verbose}: expected true, false or names of loggers")
    # Hydra's default logging uses it as a file name in the run folder.
    if not re.fullmatch(r"[\w.-]+", str(tree.hydra.job.name)):
        raise ValueError(f"hydra.job.name={tree.hydra.job.name}: expected letters, digits, dots and dashes")


@cache
def _schema() -> DictConfig:
    """Return Hydra's schema as a tree. Cached, because building it takes a quarter of the time of composing."""
    from hydra.conf import HydraConf

    return OmegaConf.structured(HydraConf)


@cache
def _defaults(*overrides: str) -> set[tuple[str, str]]:
    """Compose the `hydra` block without a main config: Hydra's defaults, with `+hydra=default` the project's."""
    from hydra._internal.config_loader_impl import ConfigLoaderImpl
    from hydra._internal.utils import create_automatic_config_search_path
    from hydra.types import RunMode

    search = create_automatic_config_search_path(None, None, str(ROOT / "conf"))
    return _pairs(ConfigLoaderImpl(search).load_configuration(None, list(overrides), RunMode.RUN))


def _pairs(tree: DictConfig) -> set[tuple[str, str]]:
    return {(key, str(value)) for key, value in plain_values(OmegaConf.to_container(tree.hydra))}


def _is_below(key: str, sections: tuple[str, ...]) -> bool:
    return any(f"{key}.".startswith(f"{section}.") for section in sections)

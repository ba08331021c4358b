"""Refuse unknown keys and group options, and keys of the `hydra` block that choose imported code or
folders.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from timm_parallel.config.suggest import (
    check_option,
    explain,
    is_declared,
    is_known,
    key_hint,
    plain_values,
)
from timm_parallel.project import root

SETTABLE = ("run", "sweep", "sweeper.params", "job.name", "job.chdir", "verbose")
FIXED = f"cannot be changed; the keys of hydra that can are {', '.join(SETTABLE)}"
# Hydra itself fills these in while it composes.
FILLED_IN = (
    "mode",
    "runtime",
    "overrides",
    "job.id",
    "job.num",
    "job.config_name",
    "job.override_dirname",
)


def check_before_composing(loader: Any, config_name: str, overrides: list[Any]) -> None:
    """Refuse unknown keys, unknown options of groups and fixed keys of Hydra, before Hydra imports
    what they name.

    `overrides`: parsed by Hydra. `config_name`: the main config, the only file that can set
    `hydra.searchpath`.
    """
    groups = {
        group
        for group in loader.list_groups("")
        if loader.get_group_options(group) and group != "hydra"
    }
    for override in overrides:
        key, given = override.key_or_group, override.input_line
        if re.match(r"hydra([./]|$)", key):
            if not _is_below(re.sub("^hydra[./]?", "", key), SETTABLE):
                raise ValueError(f"{given}: {FIXED}")
        elif key in groups:
            options = loader.get_group_options(key)
            if override.is_delete():
                raise ValueError(
                    f"{given}: a group cannot be left out; choose "
                    f"{' or '.join(f'{key}={o}' for o in options)}"
                )
            for choice in (
                override.sweep_string_iterator()
                if override.is_sweep_override()
                else [override.value()]
            ):
                if choice in (None, "null"):
                    raise ValueError(f"{key}=null: allowed: {', '.join(options)}")
                check_option(key, choice, options)
        elif not is_known(key):
            value = "" if override.is_delete() or override.is_sweep_override() else override.value()
            raise ValueError(f"{given}: unknown key {key}{key_hint(key, groups, value)}")
        elif override.is_delete() and is_declared(key):
            raise ValueError(
                f"{given}: a key cannot be deleted; leave it out for its default, or set another "
                f"value: {key}=…"
            )
    main = loader.repository.load_config(config_name)
    is_dict = main is not None and OmegaConf.is_dict(main.config)
    if is_dict and (folders := OmegaConf.select(main.config, "hydra.searchpath")):
        raise ValueError(
            f"hydra.searchpath={folders}: cannot be changed; give a folder of configs with "
            "--config-dir"
        )


def check_hydra_types(tree: DictConfig) -> None:
    """Refuse values of wrong types in a composed `hydra` block, by merging a plain copy of it into
    Hydra's schema.
    """
    block: Any = OmegaConf.to_container(tree.hydra)
    # Hydra's schema lacks its own group `env`.
    block.pop("env", None)
    try:
        OmegaConf.merge({"hydra": _schema()}, {"hydra": block})
    except OmegaConfBaseException as error:
        raise ValueError(explain(error)) from error


def check_hydra_block(tree: DictConfig) -> None:
    """Refuse a composed config in which a `hydra` key that is not allowed differs
    from its default.
    """
    given = {pair for pair in _pairs(tree) if not _is_below(pair[0], (*SETTABLE, *FILLED_IN))}
    # A main config without conf/hydra/default.yaml, such as a run's config.yaml, has Hydra's own
    # defaults.
    unusual = given - _defaults("+hydra=default")
    if unusual and (changed := unusual - _defaults()):
        key, value = min(changed)
        raise ValueError(f"hydra.{key}={value}: {FIXED}")
    # Hydra has only an assertion for these values.
    names = tree.hydra.verbose if OmegaConf.is_list(tree.hydra.verbose) else [tree.hydra.verbose]
    if not isinstance(tree.hydra.verbose, bool) and not all(
        isinstance(name, str) for name in names
    ):
        raise ValueError(
            f"hydra.verbose={tree.hydra.verbose}: expected true, false or names of loggers"
        )
    # Hydra's default logging uses it as a file name in the run folder.
    if not re.fullmatch(r"[\w.-]+", str(tree.hydra.job.name)):
        raise ValueError(
            f"hydra.job.name={tree.hydra.job.name}: expected letters, digits, dots and dashes"
        )


@cache
def _schema() -> DictConfig:
    """Return Hydra's schema as a tree. Cached, because building it takes a quarter of the time of
    composing.
    """
    from hydra.conf import HydraConf

    return OmegaConf.structured(HydraConf)


@cache
def _defaults(*overrides: str) -> set[tuple[str, str]]:
    """Compose the `hydra` block without a main config: Hydra's defaults, with `+hydra=default` the
    project's.
    """
    from hydra._internal.config_loader_impl import ConfigLoaderImpl
    from hydra._internal.utils import create_automatic_config_search_path
    from hydra.types import RunMode

    search = create_automatic_config_search_path(None, None, str(root() / "conf"))
    return _pairs(ConfigLoaderImpl(search).load_configuration(None, list(overrides), RunMode.RUN))


def _pairs(tree: DictConfig) -> set[tuple[str, str]]:
    return {(key, str(value)) for key, value in plain_values(OmegaConf.to_container(tree.hydra))}


def _is_below(key: str, sections: tuple[str, ...]) -> bool:
    return any(f"{key}.".startswith(f"{section}.") for section in sections)

"""Reject unknown keys and unknown options of config groups. Also reject keys of the `hydra` section
that choose which code Hydra imports or which folders it reads.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from omegaconf import DictConfig, OmegaConf

from timm_parallel.app import root
from timm_parallel.config.explain import check_option, is_declared, is_known, key_hint, required
from timm_parallel.keys import is_below, plain_values

SETTABLE = (
    *("run.dir", "sweep.dir", "sweep.subdir", "sweeper.params"),
    *("job.name", "job.chdir", "verbose"),
)
FIXED = (
    "this key of Hydra cannot be changed; keys that can are "
    f"{', '.join(f'hydra.{key}' for key in SETTABLE)}"
)
# Keys of the `hydra` section that Hydra itself sets while it composes a config.
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
    """Raise ValueError for an override that names an unknown key, an unknown option of a config
    group, or a key of Hydra that is not allowed. This check comes before composing, because Hydra
    imports classes that overrides name.

    `loader`: Hydra's config loader. `config_name`: name of the main config, the only file that can
    set `hydra.searchpath`. `overrides`: overrides that Hydra has parsed.
    """
    groups = {
        group: options
        for group in loader.list_groups("")
        if group != "hydra" and (options := _options_of(loader, group))
    }
    for override in overrides:
        key, given = override.key_or_group, override.input_line
        if re.match(r"hydra([./]|$)", key):
            if not is_below(re.sub("^hydra[./]?", "", key), SETTABLE):
                raise ValueError(f"{given}: {FIXED}")
        elif key in groups:
            options = groups[key]
            if override.is_delete():
                raise ValueError(
                    f"{given}: a config group cannot be removed; choose "
                    f"{' or '.join(f'{key}={o}' for o in options)}"
                )
            for choice in (
                override.sweep_string_iterator()
                if override.is_sweep_override()
                else [override.value()]
            ):
                if choice in (None, "null"):
                    raise ValueError(f"{key}=null: expected one of: {', '.join(options)}")
                check_option(key, choice, options)
        elif not is_known(key):
            value = "" if override.is_delete() or override.is_sweep_override() else override.value()
            raise ValueError(f"{given}: unknown key {key}{key_hint(key, groups, value)}")
        elif override.is_delete() and is_declared(key):
            raise ValueError(
                f"{given}: a config key cannot be deleted; leave it out of the command for its "
                f"default, or set another value: {key}=…"
            )
    main = loader.repository.load_config(config_name)
    is_dict = main is not None and OmegaConf.is_dict(main.config)
    if is_dict and (folders := OmegaConf.select(main.config, "hydra.searchpath")):
        raise ValueError(
            f"hydra.searchpath={folders}: cannot be changed; give a folder of configs with "
            "--config-dir"
        )


def _options_of(loader: Any, group: str) -> list[str]:
    """List the options of a config group, with those in subfolders, e.g. `small/mine`."""
    options: list[str] = loader.get_group_options(group)
    for folder in loader.list_groups(group):
        options += [f"{folder}/{option}" for option in _options_of(loader, f"{group}/{folder}")]
    return options


def check_hydra_block(tree: DictConfig) -> None:
    """Raise ValueError if a key of the `hydra` section that users may not change differs from its
    default, or if one that they may change is `???`.
    """
    pairs = _pairs(tree)
    for key in SETTABLE:
        if (key, "???") in pairs:
            raise ValueError(required(f"hydra.{key}"))
    given = {pair for pair in pairs if not is_below(pair[0], (*SETTABLE, *FILLED_IN))}
    # Compare with the project's defaults (conf/hydra/default.yaml) first, then with Hydra's own. A
    # config that does not include the project's file, such as config.yaml of a run, has Hydra's own
    # defaults.
    conf = str(root() / "conf")
    unusual = given - _defaults(conf, "+hydra=default")
    if unusual and (changed := unusual - _defaults(conf)):
        key, value = min(changed)
        raise ValueError(f"hydra.{key}={value}: {FIXED}")
    # hydra.job.name becomes a file name in the run folder, so it may contain no slash.
    if not re.fullmatch(r"[\w.-]+", str(tree.hydra.job.name)):
        raise ValueError(
            f"hydra.job.name={tree.hydra.job.name}: expected letters, digits, dots and dashes"
        )


@cache
def _defaults(conf: str, *overrides: str) -> set[tuple[str, str]]:
    """Compose the `hydra` section without a main config, as a set of (dotted key, value). Without
    overrides it has Hydra's defaults. With `+hydra=default` it has the defaults of the project,
    whose config folder is `conf`.
    """
    from hydra._internal.config_loader_impl import ConfigLoaderImpl
    from hydra._internal.utils import create_automatic_config_search_path
    from hydra.types import RunMode

    search = create_automatic_config_search_path(None, None, conf)
    return _pairs(ConfigLoaderImpl(search).load_configuration(None, list(overrides), RunMode.RUN))


def _pairs(tree: DictConfig) -> set[tuple[str, str]]:
    return {(key, str(value)) for key, value in plain_values(OmegaConf.to_container(tree.hydra))}

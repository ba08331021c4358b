"""Compose the configurations of a sweep faster than Hydra does. Hydra composes each combination of
config files only once. The other overrides are then applied to copies of the composed config.

Hydra alone needs a tenth of a second per configuration, because it reads the list of defaults again
each time.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from functools import cache
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from timm_parallel.config.compose import Command, merge_into_schema
from timm_parallel.keys import Config, leaves


@dataclass
class _Base:
    """Config that Hydra composed from config files, without overrides of single values. It is
    stored as pickled bytes, because unpickling takes half the time of `copy.deepcopy`.
    """

    tree: bytes
    # The same config merged into the schema. None if the merge needs the overrides of single
    # values, or if the main config does not use the schema.
    merged: bytes | None


class Composer:
    """Composer of the configurations of a sweep. Results and errors are those of Hydra, but most of
    the work is done once and cached.
    """

    def __init__(self, command: Command) -> None:
        self._command = command
        self._bases: dict[tuple[str, ...], _Base] = {}

    def compose(self, overrides: list[str]) -> tuple[DictConfig, DictConfig | None]:
        """Compose the config for a list of overrides. Return (the config as Hydra composes it, the
        same config merged into the schema).

        The merged config is None if it cannot be built from a cached config, for example after the
        override `~key`. The caller then has to merge the first config.
        """
        from hydra._internal.config_loader_impl import ConfigLoaderImpl, get_overrides_dirname
        from hydra.core.override_parser.overrides_parser import OverridesParser

        parsed = OverridesParser.create().parse_overrides(overrides)
        values = [override for override in parsed if not self._selects_files(override)]
        base = self._base(
            [str(override.input_line) for override in parsed if override not in values]
        )
        tree: DictConfig = pickle.loads(base.tree)
        # Do the second half of Hydra's function load_configuration: apply the overrides of single
        # values.
        ConfigLoaderImpl._apply_overrides_to_config(values, tree)
        job, own = (
            tree.hydra.job,
            [override for override in parsed if not override.is_hydra_override()],
        )
        style = job.config.override_dirname
        tree.hydra.overrides.task = [override.input_line for override in own]
        job.override_dirname = get_overrides_dirname(
            own, style.exclude_keys, style.item_sep, style.kv_sep
        )
        if base.merged is None or not all(_sets_a_value(override) for override in values):
            return tree, None
        merged: DictConfig = pickle.loads(base.merged)
        ConfigLoaderImpl._apply_overrides_to_config(values, merged)
        return tree, merged

    def _selects_files(self, override: Any) -> bool:
        """Return True if an override may change the config files that Hydra loads. Such overrides
        set a config group or a key of `hydra`.
        """
        is_group = self._command.loader.repository.group_exists(override.key_or_group)
        return override.is_hydra_override() or (is_group and not isinstance(override.value(), dict))

    def _base(self, overrides: list[str]) -> _Base:
        """Compose the config for overrides of config groups, such as `model=tiny`. The result is
        cached, because many configurations of a sweep use the same files.
        """
        if tuple(overrides) not in self._bases:
            tree = self._command.loader.load_sweep_config(self._command.tree, overrides)
            self._bases[tuple(overrides)] = _Base(pickle.dumps(tree), _merged(tree))
        return self._bases[tuple(overrides)]


def _merged(tree: DictConfig) -> bytes | None:
    try:
        return pickle.dumps(merge_into_schema(tree)) if OmegaConf.get_type(tree) is Config else None
    except OmegaConfBaseException:
        return None


def _sets_a_value(override: Any) -> bool:
    """Return True if an override gives the same config whether it is applied before or after the
    merge into the schema.
    """
    # The merge gives a deleted key, or a key with the value `???`, the default of the schema.
    if override.is_delete() or "???" in str(override.value()):
        return False
    key, (single, free) = override.key_or_group, _keys()
    return key in single or key.startswith(free)


@cache
def _keys() -> tuple[frozenset[str], tuple[str, ...]]:
    """Return (dotted keys of the schema, prefixes of its free dictionaries). A prefix is for
    example `model.kwargs.`.
    """
    keys = {key: value for key, value, _ in leaves(Config())}
    return frozenset(keys), tuple(
        f"{key}." for key, value in keys.items() if isinstance(value, dict)
    )

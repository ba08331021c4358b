"""Read configs that an older version saved: drop keys that no longer exist, if they have their old default."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig, OmegaConf

# Keys of older versions -> their last default. A saved config may still hold such a key with this value, because the project
# now always behaves as this value did.
REMOVED: dict[str, Any] = {
    "train.on_nonfinite": "stop",
    "train.max_skipped": 10,
    "cluster.setup": None,
    "cluster.extra": [],
}


def is_obsolete(key: str, value: Any) -> bool:
    """Return True if `key` no longer exists and `value` was its default, so that a saved config can do without it."""
    return key in REMOVED and REMOVED[key] == value


def drop_removed_keys(saved: DictConfig) -> None:
    """Delete removed keys from a saved config, in place. Raises ValueError if one differs from its old default."""
    for key, default in REMOVED.items():
        section_name, _, name = key.rpartition(".")
        section: Any = OmegaConf.select(saved, section_name)
        if not OmegaConf.is_dict(section) or name not in section:
            continue
        values: Any = OmegaConf.to_container(section)
        value = values[name]
        if not is_obsolete(key, value):
            raise ValueError(f"{key}={value}: removed; delete the key from the file to continue with {default}")
        del section[name]


def drop_removed_keys_of(repository: Any, name: str) -> None:
    """Patch Hydra's config repository: its `load_config` drops removed keys from the main config `name`, a saved one."""
    load = repository.load_config

    def load_config(config_path: str) -> Any:
        loaded = load(config_path)
        if config_path == name and loaded is not None and OmegaConf.is_dict(loaded.config):
            drop_removed_keys(loaded.config)
        return loaded

    repository.load_config = load_config

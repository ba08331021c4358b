"""A saved config with a removed key is read if the key has its old default. Otherwise the error names the key."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from commands import Refuse
from configs import parse
from src.engine.config.compose import compose_command, load_config, save_config
from src.engine.config.removed import REMOVED
from src.engine.config.resolve import resolve
from src.engine.search.space import FROZEN, read_search
from src.schema import Config

OTHER = "another value"


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    save_config(resolve(Config()), tmp_path / "run")
    return tmp_path / "run"


def add_to(path: Path, key: str, value: Any) -> None:
    """Write `key` into a YAML file, as an older version of this project did."""
    tree = OmegaConf.load(path)
    OmegaConf.update(tree, key, value, force_add=True)
    path.write_text(OmegaConf.to_yaml(tree), encoding="utf-8")


@pytest.mark.parametrize(("key", "default"), REMOVED.items())
def test_saved_config_drops_a_removed_key_that_has_its_old_default(run_folder: Path, key: str, default: Any) -> None:
    expected = load_config(run_folder)
    add_to(run_folder / "config.yaml", key, default)
    assert load_config(run_folder) == expected
    again = compose_command(parse("--config-path", str(run_folder), "--config-name", "config")).config
    assert dataclasses.asdict(again) == dataclasses.asdict(expected)


@pytest.mark.parametrize("key", REMOVED)
def test_saved_config_is_refused_when_a_removed_key_has_a_different_value(
    run_folder: Path, refuse: Refuse, key: str
) -> None:
    add_to(run_folder / "config.yaml", key, OTHER)
    with pytest.raises(ValueError, match=f"^{key}={OTHER}: ") as refused:
        load_config(run_folder)
    assert "\n" not in str(refused.value) and str(REMOVED[key]) in str(refused.value)
    assert f"{key}={OTHER}" in refuse("--config-path", str(run_folder), "--config-name", "config")


def test_saved_search_drops_a_removed_key_only_when_it_has_its_old_default(tmp_path: Path) -> None:
    tree = compose_command(parse("-m", "search=optuna", "+search.params.optim.lr=interval(0.1,1)")).tree
    (tmp_path / FROZEN).write_text(OmegaConf.to_yaml(tree), encoding="utf-8")
    expected = read_search(tmp_path)[0]
    add_to(tmp_path / FROZEN, "train.on_nonfinite", "stop")
    assert read_search(tmp_path)[0] == expected
    add_to(tmp_path / FROZEN, "train.on_nonfinite", "skip")
    with pytest.raises(ValueError, match=r"^train\.on_nonfinite=skip: "):
        read_search(tmp_path)


@pytest.mark.parametrize("key", REMOVED)
def test_command_line_is_refused_when_it_sets_a_removed_key(refuse: Refuse, key: str) -> None:
    line = refuse(f"{key}=1")
    assert f"{key}=1" in line and "removed" in line and str(REMOVED[key]) in line

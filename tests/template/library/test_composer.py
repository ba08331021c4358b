"""The Composer of sweeps gives the same configs as a full composition by Hydra."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from tests.template.runs import tiny
from timm_parallel.config.compose import Command, compose_command
from timm_parallel.config.explain import explain
from timm_parallel.lab.sweep.composer import Composer
from timm_parallel.lab.sweep.points import expand, make_point
from timm_parallel.testing.configs import conf, parse


@cache
def command() -> Command:
    return compose_command(parse("-m", "model=resnet18"))


def composed(overrides: list[str], command: Command, composer: Composer | None) -> Any:
    """Compose with the given Composer, or with Hydra if it is None."""
    try:
        if composer is None:
            tree, merged = command.loader.load_sweep_config(command.tree, overrides), None
        else:
            tree, merged = composer.compose(overrides)
        point = make_point(tree, overrides, 3, merged)
    except HydraException as error:
        return explain(error, overrides)
    except (ValueError, AssertionError) as error:
        return str(error)
    return (
        OmegaConf.to_yaml(tree),
        flags(tree),
        vars(tree._metadata)["resolver_cache"],
        point.config,
        point.subdir,
    )


def flags(tree: DictConfig) -> list[Any]:
    names = ("hydra", "optim", "model.kwargs", "tags")
    parts = [tree, *(part for name in names if (part := OmegaConf.select(tree, name)) is not None)]
    return [
        (OmegaConf.is_struct(part), OmegaConf.is_readonly(part), OmegaConf.get_type(part))
        for part in parts
    ]


@pytest.mark.parametrize(
    "word", ["optim.lr=0.5", "seed=7", "optim.unknown=1", "tags=[1,x]", "parallel=ddp"]
)
def test_sweep_composer_matches_full_hydra_composition_without_schema_in_defaults(
    tmp_path: Path, word: str
) -> None:
    main = "defaults: [_self_, {parallel: single}]\noptim: {lr: '0.1'}\nseed: 1\ntags: [1]\n"
    folder = conf(
        tmp_path, main=main, parallel__single="strategy: single\n", parallel__ddp="strategy: ddp\n"
    )
    command = compose_command(parse("-m", "--config-path", str(folder), "--config-name", "main"))
    assert composed([word], command, Composer(command)) == composed([word], command, None)


@pytest.mark.slow(seconds=1)
def test_sweep_composer_runs_full_hydra_composition_once_per_choice_of_config_groups(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    full: list[list[str]] = []
    load = ConfigLoaderImpl.load_sweep_config

    def counted(loader: Any, tree: DictConfig, overrides: list[str]) -> DictConfig:
        full.append(overrides)
        return load(loader, tree, overrides)

    monkeypatch.setattr(ConfigLoaderImpl, "load_sweep_config", counted)
    words = (
        "optim.lr=1e-3,1e-4",
        "model=tiny,vit_tiny",
        "seed=1,2",
        "parallel=single",
        "+optim.kwargs.eps=1e-6",
    )
    _, points = expand(parse("-m", *words))
    assert len(points) == 8
    assert full == [["model=tiny", "parallel=single"], ["model=vit_tiny", "parallel=single"]]


def test_sweep_of_data_image_size_accepts_height_width_pairs_next_to_single_numbers() -> None:
    words = tiny(
        "parallel=single", "parallel.accelerator=cpu", "data.image_size=[16,24],[24,16],32"
    )
    _, points = expand(parse("-m", *words))
    sizes = [vars(point.config.data)["image_size"] for point in points]
    assert sizes == [[16, 24], [24, 16], 32]

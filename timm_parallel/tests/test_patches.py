"""Each run-time patch of a foreign library must work. If a test shows that the library no longer
needs the patch, delete the patch.
"""

from __future__ import annotations

import argparse
import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import timm
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository, ConfigRepository
from hydra._internal.config_search_path_impl import ConfigSearchPathImpl
from hydra._internal.utils import get_args_parser
from hydra.core.config_store import ConfigStore
from hydra.core.default_element import ResultDefault
from hydra.core.plugins import Plugins
from omegaconf import OmegaConf
from PIL import Image, ImageOps
from timm.data import auto_augment
from timm.models import _builder

from timm_parallel.app import current
from timm_parallel.entry import run_command
from timm_parallel.patches import (
    create_model_with_filter,
    keep_missing_values,
    posterize_to_black,
    share_config_store,
)


def search_path(**places: str) -> ConfigSearchPathImpl:
    # The first use of the plugins registers the sources that Hydra can read configs from.
    Plugins.instance()
    search = ConfigSearchPathImpl()
    for provider, place in places.items():
        search.append(provider, place)
    return search


def test_help_of_train_is_printed_although_argparse_checks_help_texts_as_in_python_3_14(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    add = argparse.ArgumentParser.add_argument

    def check(parser: argparse.ArgumentParser, action: argparse.Action) -> None:
        assert isinstance(action.help, str), "argument of type 'LazyCompletionHelp'"

    def add_argument(parser: Any, *names: str, **options: Any) -> Any:
        action = add(parser, *names, **options)
        if isinstance(parser, argparse.ArgumentParser):
            parser._check_help(action)  # type: ignore[attr-defined]
        return action

    monkeypatch.setattr(argparse.ArgumentParser, "_check_help", check, raising=False)
    monkeypatch.setattr(argparse.ArgumentParser, "add_argument", add_argument)
    with pytest.raises(AssertionError, match="LazyCompletionHelp"):
        get_args_parser()
    monkeypatch.setattr(sys, "argv", ["train.py", "--help"])
    # Hydra ends the process after it has printed the help.
    with pytest.raises(SystemExit) as ended:
        run_command(current())
    assert ended.value.code in (None, 0)
    assert "python train.py" in capsys.readouterr().out
    # The check is on again for other parsers.
    with pytest.raises(AssertionError):
        argparse.ArgumentParser(add_help=False).add_argument("--seed")


def test_patch_makes_hydra_share_the_config_store_instead_of_copying_the_store(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, copied = ConfigStore.instance(), []

    def record(store: ConfigStore, memo: Any) -> ConfigStore:
        copied.append(store)
        return store

    monkeypatch.setattr(ConfigStore, "__deepcopy__", record, raising=False)
    CachingConfigRepository(ConfigRepository(search_path(main="structured://")))
    assert copied == [store]
    share_config_store()
    assert copy.deepcopy(store) is store


def test_patched_hydra_loader_keeps_a_missing_value_over_that_of_an_earlier_file(
    tmp_path: Path,
) -> None:
    for name, text in (("first", "a: 1\nb: 2"), ("second", "a: ???\nc: ???"), ("third", "c: 3")):
        (tmp_path / f"{name}.yaml").write_text(text)
    composed = []
    for patched in (False, True):
        loader = ConfigLoaderImpl(search_path(main=f"file://{tmp_path}", schema="structured://"))
        if patched:
            keep_missing_values(loader)
        tree = loader._compose_config_from_defaults_list(
            [ResultDefault(config_path=name, package="") for name in ("first", "second", "third")],
            loader.repository,
        )
        composed.append(OmegaConf.to_container(tree))
    assert composed == [{"a": 1, "b": 2, "c": 3}, {"a": "???", "b": 2, "c": 3}]


def test_create_model_with_filter_stores_the_checkpoint_filter_of_timm_in_the_model() -> None:
    load = _builder.load_pretrained
    model = create_model_with_filter("test_vit", {"num_classes": 3})
    assert callable(model.checkpoint_filter)
    assert model.head.out_features == 3
    assert _builder.load_pretrained is load
    assert not hasattr(timm.create_model("test_vit"), "checkpoint_filter")


def test_posterize_to_0_bits_fails_in_pillow_and_returns_black_after_the_patch() -> None:
    image = Image.new("RGB", (2, 2), (200, 100, 50))
    with pytest.raises(ValueError, match="bits"):
        ImageOps.posterize(image, 0)
    posterize_to_black()
    names = [name for name in auto_augment.NAME_TO_OP if "Posterize" in name]
    assert len(names) == 3
    for name in names:
        operation: Any = auto_augment.NAME_TO_OP[name]
        assert operation(image, 0).getextrema() == ((0, 0),) * 3
        assert operation(image, 2).tobytes() == ImageOps.posterize(image, 2).tobytes()
        assert operation(image, 8).tobytes() == image.tobytes()

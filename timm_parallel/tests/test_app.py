"""Tests of the class App with two projects in one process: the current one of the tests, and
small_project/.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from timm_parallel import App, class_source, project
from timm_parallel.entry import run_command
from timm_parallel.keys import STRATEGIES, ParallelConfig

SMALL = Path(__file__).with_name("small_project")


def build_small_app(monkeypatch: pytest.MonkeyPatch) -> App[Any, Any]:
    """Make the small project the current project of this process until the end of the test."""
    monkeypatch.syspath_prepend(str(SMALL))
    for module, name in ((project, "_current"), (class_source, "_package")):
        monkeypatch.setattr(module, name, getattr(module, name))
    monkeypatch.setattr(class_source, "_named", class_source._named.copy())
    for name in [name for name in sys.modules if name.partition(".")[0] == "small"]:
        monkeypatch.delitem(sys.modules, name)
    return import_module("small.app").app  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def fresh_class_attributes() -> Iterator[None]:
    yield
    class_source.class_attributes.cache_clear()


def test_app_adds_the_strategies_of_a_project_to_the_built_in_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    app = build_small_app(monkeypatch)
    assert STRATEGIES.items() < app.strategies.items()
    assert app.strategies["each"] == "small.strategies.Each"
    # A strategy that `auto` chooses must be one of the app.
    for several in (False, True):
        config = ParallelConfig()
        config.choose_strategy(several)
        assert config.strategy in app.strategies


def test_compose_uses_the_config_classes_and_files_of_the_current_app(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first: Any = project.current()
    assert type(first.compose()) is first.config
    small = build_small_app(monkeypatch)
    assert type(small.compose()) is small.config
    monkeypatch.undo()
    assert type(first.compose()) is first.config


def test_error_starts_with_the_name_of_the_script_that_was_called(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["/projects/fork/fit.py", "seed=-1"])
    assert run_command(project.current()) == 2  # type: ignore[arg-type]
    assert capsys.readouterr().err.startswith("fit.py: seed=-1: ")

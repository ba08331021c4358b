"""Tests of the class App with two projects in one process: the current one of the tests, and
small_project/.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from timm_parallel import App, app, compose
from timm_parallel.entry import run_command

SMALL = Path(__file__).with_name("small_project")


def build_small_app(monkeypatch: pytest.MonkeyPatch) -> App[Any, Any]:
    """Make the small project the current project of this process until the end of the test."""
    monkeypatch.syspath_prepend(str(SMALL))
    monkeypatch.setattr(app, "_current", app._current)
    for name in [name for name in sys.modules if name.partition(".")[0] == "small"]:
        monkeypatch.delitem(sys.modules, name)
    return import_module("small.app").app  # type: ignore[no-any-return]


def test_compose_uses_the_config_classes_and_files_of_the_current_app(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = app.current()
    assert type(compose()) is first.config
    small = build_small_app(monkeypatch)
    assert type(compose()) is small.config
    monkeypatch.undo()
    assert type(compose()) is first.config


def test_error_starts_with_the_name_of_the_script_that_was_called(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["/projects/fork/fit.py", "seed=-1"])
    assert run_command(app.current()) == 2
    assert capsys.readouterr().err.startswith("fit.py: seed=-1: ")

"""Tests of the class App with two projects in one process: small_project/ and a copy of it."""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from small.config import Config

from timm_parallel import app, compose
from timm_parallel.entry import run_command


@dataclass
class OtherConfig(Config):
    """Config class of the copy."""


def test_compose_uses_the_config_classes_and_files_of_the_current_app(tmp_path: Path) -> None:
    first = app.current()
    composed = compose()
    assert (type(composed), composed.train.epochs) == (first.config, 3)
    shutil.copytree(first.root / "conf", tmp_path / "conf")
    main = tmp_path / "conf" / "train.yaml"
    main.write_text(main.read_text().replace("epochs: 3", "epochs: 5"))
    # Building an app makes it the current one.
    replace(first, root=tmp_path, config=OtherConfig)
    copied = compose()
    assert (type(copied), copied.train.epochs) == (OtherConfig, 5)


def test_error_starts_with_the_name_of_the_script_that_was_called(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["/projects/fork/fit.py", "seed=-1"])
    assert run_command(app.current()) == 2
    assert capsys.readouterr().err.startswith("fit.py: seed=-1: ")

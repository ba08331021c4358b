"""Fixtures of all tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from src import app as project
from timm_parallel import App, compose, resolve


@pytest.fixture(scope="session")
def app() -> App:
    """Return the project that the fixtures of timm_parallel.testing train."""
    return project.app


@pytest.fixture
def mine(tmp_path: Path) -> Iterator[Any]:
    """Build data, model, task and optimizer of conf/experiment/mine.yaml on the CPU."""
    from timm_parallel import start_run

    overrides = ("experiment=mine", "parallel=single", "parallel.accelerator=cpu", "data.workers=0")
    parts = start_run(resolve(compose(*overrides)), tmp_path).parts
    yield parts
    parts.strategy.group.close()

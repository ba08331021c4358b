"""Fixtures of all tests: the project that the fixtures of timm_parallel.testing train."""

from __future__ import annotations

import pytest

from src import app as project
from src.schema import Config, ResolvedConfig
from timm_parallel import App


@pytest.fixture(scope="session")
def app() -> App[Config, ResolvedConfig]:
    return project.app

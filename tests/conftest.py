"""Fixtures of all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from src import app as project
from src.schema import Config, ResolvedConfig
from timm_parallel import App, RunParts


@pytest.fixture(scope="session")
def app() -> App[Config, ResolvedConfig]:
    """Return the project that the fixtures of timm_parallel.testing train."""
    return project.app


@pytest.fixture
def mine() -> Iterator[RunParts]:
    """Build data, model, task and optimizer of conf/experiment/mine.yaml on the CPU."""
    from src.train.build import build_run
    from timm_parallel import Ranks, build_strategy, compose, resolve

    overrides = ("experiment=mine", "parallel=single", "parallel.accelerator=cpu", "data.workers=0")
    config = project.app.own_resolved(resolve(compose(*overrides)))
    strategy = build_strategy(config.parallel, Ranks(), None, config.train.deterministic)
    yield build_run(config, strategy)
    strategy.close()

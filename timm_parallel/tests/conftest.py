"""Tests of the library run with the small project, also if another project is the current one."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from timm_parallel import App
from timm_parallel import app as apps

# A shared machine may be ten times slower than a quiet one.
settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")
sys.path.insert(0, str(Path(__file__).with_name("small_project")))

# Importing the small project makes it the current one. Undo this for the tests outside this folder.
with pytest.MonkeyPatch.context() as patch:
    patch.setattr(apps, "_current", None)
    from small import app as project


@pytest.fixture(scope="session")
def app() -> App:
    return project.app


# Of each module, so that also its fixtures train the small project.
@pytest.fixture(scope="module", autouse=True)
def small_project_is_current(app: App) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(apps, "_current", app)
        yield

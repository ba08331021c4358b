"""Pytest fixtures for tests of the library. Fixtures for all tests of the project are in
timm_parallel/testing/fixtures.py.
"""

from __future__ import annotations

import pytest


@pytest.fixture
def without_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the drawing of plots in reports by a function that draws nothing, because plots take
    most of the time of a report.
    """
    monkeypatch.setattr("timm_parallel.lab.report.plots.draw", lambda group: [])

"""Fixtures of the library's tests. tests/conftest.py has those that all tests share."""

from __future__ import annotations

import pytest


@pytest.fixture
def without_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the plots of reports, which take most of their time."""
    monkeypatch.setattr("src.engine.report.plots.draw", lambda group: [])
    monkeypatch.setattr("src.engine.report.report.draw_settings", lambda group: [])

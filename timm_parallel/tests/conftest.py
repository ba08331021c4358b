"""Fixtures of the library's tests. timm_parallel/testing/fixtures.py has those that all tests
share.
"""

from __future__ import annotations

import pytest


@pytest.fixture
def without_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the plots of reports, which take most of their time."""
    monkeypatch.setattr("timm_parallel.lab.report.plots.draw", lambda group: [])

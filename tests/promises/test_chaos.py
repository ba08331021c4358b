"""A short run of scripts/maintain/chaos.py: whatever happens to a run, resumed it ends equal to one that nothing happened to."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from conftest import Train


@pytest.mark.slow(seconds=60)
@pytest.mark.processes
def test_some_faults_change_nothing(train: Train, tmp_path: Path) -> None:
    words = ["--minutes", "0", "--faults", "3", "--seed", "5", "--epochs", "15", "--out", str(tmp_path / "chaos")]
    done = train.start_command([sys.executable, "scripts/maintain/chaos.py", *words], tmp_path).finish()
    assert done.returncode == 0, done.output
    books = json.loads((tmp_path / "chaos" / "faults.json").read_text())
    assert books["complaints"] == []
    assert books["runs"] >= 1
    assert len(books["faults"]) >= 3, done.output
    assert "equal to the undisturbed one" in done.stdout

"""A short version of scripts/maintain/chaos.py."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from timm_parallel.testing.commands import Train


@pytest.mark.nightly
@pytest.mark.slow(seconds=60)
def test_run_with_injected_faults_matches_run_without_faults(train: Train, tmp_path: Path) -> None:
    arguments = [
        "--minutes",
        "0",
        "--faults",
        "3",
        "--seed",
        "5",
        "--epochs",
        "15",
        "--out",
        str(tmp_path / "chaos"),
    ]
    done = train.start_command(
        [sys.executable, "scripts/maintain/chaos.py", *arguments], tmp_path
    ).finish()
    assert done.returncode == 0, done.output
    report = json.loads((tmp_path / "chaos" / "faults.json").read_text())
    assert report["complaints"] == []
    assert report["runs"] >= 1
    assert len(report["faults"]) >= 3, done.output
    assert "equal to the undisturbed one" in done.stdout

"""Goodput: the share of the wall time of all segments of a run in training steps that were kept."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from timm_parallel.record.environment import run_seconds
from timm_parallel.record.result import read_result
from timm_parallel.testing.ranks import train_warm
from timm_parallel.tests.small_runs import resolved

HOUR = 3600.0


def age(folder: Path, seconds: float) -> None:
    """Make all files of a run older."""
    for path in folder.rglob("*"):
        changed = path.stat().st_mtime - seconds
        os.utime(path, (changed, changed))


def test_seconds_of_a_run_end_with_its_last_file_and_include_those_before(tmp_path: Path) -> None:
    assert run_seconds(tmp_path) == 0
    (tmp_path / "logs").mkdir()
    written = {"environment.json": 1000, "metrics.jsonl": 1030, "logs/rank_1.log": 1060}
    # Neither belongs to the attempt: Slurm and Hydra write them before the next one starts.
    written |= {"logs/slurm.log": 9000, "config.yaml": 9000}
    for name, changed in written.items():
        (tmp_path / name).write_text(json.dumps({"seconds_before": 7}))
        os.utime(tmp_path / name, (changed, changed))
    assert run_seconds(tmp_path) == 67
    assert run_seconds(tmp_path, until=1100) == 107


@pytest.mark.slow(seconds=3)
@pytest.mark.processes
def test_goodput_counts_kept_steps_of_all_segments_but_not_the_time_between_them(
    tmp_path: Path,
) -> None:
    words = ("parallel=ddp", "parallel.devices=2", "train.epochs=4")
    run = train_warm(resolved(*words, "train.max_steps=9"), tmp_path / "run")
    first = read_result(run)
    assert first.goodput is not None and 0 < first.goodput < 1
    # The checkpoint says that the segment has trained for 1,000 seconds, of 2,000 in all.
    set_trained_seconds(run, 1000.0)
    age(run, HOUR)
    path, before = run / "environment.json", run_seconds(run)
    changed = path.stat().st_mtime
    path.write_text(json.dumps(json.loads(path.read_text()) | {"seconds_before": 2000}))
    os.utime(path, (changed, changed))
    second = read_result(train_warm(resolved(*words), run))
    assert second.steps == 20 and len(second.segments) == 2
    trained, total = second.seconds["training"], second.seconds["total"]
    assert 1000 < trained < 1000 + total
    # All seconds of the first attempt count, and those of the command that started the second; the
    # hour between the two does not.
    seconds = json.loads(path.read_text())["seconds_before"]
    assert 2000 + before < seconds < 2000 + HOUR
    assert second.goodput == pytest.approx(trained / (seconds + total), rel=0.02)
    assert "goodput" in (run / "console.txt").read_text()


def set_trained_seconds(run: Path, seconds: float) -> None:
    """Change the seconds of training steps in the checkpoint of a run."""
    from timm_parallel.run import checkpoint

    newest = checkpoint.load_newest(run)
    assert newest is not None
    contents = torch.load(newest[0], weights_only=True)
    contents["progress"]["seconds"] = seconds
    del contents["format"]
    step = contents["progress"]["step"]
    checkpoint.save(run / "checkpoints", contents, step, 1, False)

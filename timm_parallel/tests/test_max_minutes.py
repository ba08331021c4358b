"""train.max_minutes ends a run by the clock of rank 0, at the same step on all ranks. All segments
count.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from timm_parallel.launch.job import prepare
from timm_parallel.record.result import Result, read_result
from timm_parallel.testing.configs import read_lines
from timm_parallel.testing.ranks import warm_ranks
from timm_parallel.tests.small_runs import resolved

# Each reading of the clock adds the pace of the rank, and a step reads the clock twice.
CLOCK = """
import itertools, os, time, types
from timm_parallel.run import run

pace = 6.0 if os.environ.get("RANK", "0") == "0" else 0.001
readings = itertools.count()
run.time = types.SimpleNamespace(
    monotonic=time.monotonic, perf_counter=lambda: pace * next(readings)
)
"""
DDP = ("parallel=ddp", "parallel.devices=2")


def train_for(minutes: float, folder: Path) -> Result:
    """Train, or resume, a run whose steps take six seconds each on rank 0."""
    clock = folder.parent / "clock.py"
    clock.write_text(CLOCK)
    folder.mkdir(exist_ok=True)
    words = (*DDP, "train.epochs=9", "train.log_every=2", "train.evaluate_every=0")
    config = resolved(*words, f"train.max_minutes={minutes}")
    prepare(config, folder)
    ended = warm_ranks(config, folder, first=clock, timeout=60)
    assert not ended.exit_codes, (folder / "console.txt").read_text()
    return read_result(folder)


@pytest.mark.slow(seconds=2)
@pytest.mark.processes
def test_run_ends_at_the_first_logged_step_after_max_minutes_and_a_resume_adds_minutes(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "run"
    # 0.3 minutes are over in step 3, and step 4 is the next logged one.
    result = train_for(0.3, folder)
    assert (result.status, result.steps, result.seconds["training"]) == ("done", 4, 24)
    # The run ends with an evaluation and a checkpoint, in the middle of an epoch.
    assert [line["step"] for line in read_lines(folder / "metrics.jsonl") if "val/loss" in line]
    saved = torch.load(folder / "checkpoints" / "last.pt", weights_only=True)["progress"]
    assert (saved["step"], saved["evaluated_at"], saved["seconds"]) == (4, 4, 24)
    # 0.8 minutes are eight steps in all, not eight more.
    result = train_for(0.8, folder)
    assert (result.steps, result.seconds["training"]) == (8, 48)

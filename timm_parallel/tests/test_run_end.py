"""Tests of evaluations within an epoch, which must not change the training, and of what ends a run
and counts its seconds: train.early_stop, train.max_minutes and goodput.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from timm_parallel.launch.job import prepare
from timm_parallel.record.environment import run_seconds
from timm_parallel.record.result import Result, read_result
from timm_parallel.run import checkpoint
from timm_parallel.testing.configs import read_lines
from timm_parallel.testing.ranks import train_warm, warm_ranks
from timm_parallel.tests.small_runs import contents_of, resolved, weights_of

EVERY_TWO = ("train.epochs=2", "train.evaluate_every=0", "train.evaluate_every_steps=2")
WHOLE_EPOCHS = ("train.epochs=9", "train.evaluate_every=1", "train.evaluate_every_steps=null")


def evaluated_losses(folder: Path) -> dict[int, float]:
    lines = read_lines(folder / "metrics.jsonl")
    return {line["step"]: line["val/loss"] for line in lines if "val/loss" in line}


def run_warm(folder: Path, *overrides: str) -> Path:
    return train_warm(resolved(*EVERY_TWO, *overrides), folder)


@pytest.mark.slow(seconds=6)
def test_evaluations_within_an_epoch_and_an_end_between_them_do_not_change_the_training(
    tmp_path: Path,
) -> None:
    dropout = "+model.kwargs.dropout=0.2"
    never = run_warm(tmp_path / "never", dropout, "train.evaluate_every_steps=null")
    whole = run_warm(tmp_path / "whole", dropout)
    run_warm(tmp_path / "parts", dropout, "train.max_steps=3")
    parts = run_warm(tmp_path / "parts", dropout)
    expected = weights_of(never)
    for weights in (weights_of(whole), weights_of(parts)):
        assert all(torch.equal(tensor, expected[name]) for name, tensor in weights.items())
    assert evaluated_losses(parts).items() >= evaluated_losses(whole).items()
    means = [contents_of(folder)["progress"]["epoch_means"] for folder in (whole, parts)]
    assert means[0] == means[1]


@pytest.mark.slow(seconds=2)
def test_run_that_was_killed_after_an_evaluation_within_an_epoch_may_end_there(
    tmp_path: Path,
) -> None:
    run = run_warm(tmp_path / "run", "train.max_steps=4", "checkpoint.keep=2")
    for path in (run / "checkpoints").iterdir():
        if path.stem != "step_2":
            path.unlink()
    result = read_result(run_warm(run, "train.max_steps=2"))
    assert (result.status, result.steps, len(result.segments)) == ("done", 2, 2)
    assert result.val["loss"] == evaluated_losses(run)[2]


@pytest.mark.slow(seconds=2)
@pytest.mark.processes
@pytest.mark.parametrize(
    ("overrides", "steps"),
    [
        (("train.early_stop=1",), 4),
        # Both ranks stop after three of nine epochs.
        (("train.early_stop=2", *WHOLE_EPOCHS, "parallel=ddp", "parallel.devices=2"), 15),
    ],
    ids=["single", "ddp"],
)
def test_early_stop_ends_a_run_after_evaluations_that_are_not_better(
    tmp_path: Path, overrides: tuple[str, ...], steps: int
) -> None:
    # The weights hardly move, so no evaluation after the first is better.
    result = read_result(run_warm(tmp_path / "run", "optim.lr=1e-12", *overrides))
    assert (result.status, result.steps) == ("done", steps)


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
    saved = contents_of(folder)["progress"]
    assert (saved["step"], saved["evaluated_at"], saved["seconds"]) == (4, 4, 24)
    # 0.8 minutes are eight steps in all, not eight more.
    result = train_for(0.8, folder)
    assert (result.steps, result.seconds["training"]) == (8, 48)


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
    contents = contents_of(run)
    contents["progress"]["seconds"] = 1000.0
    del contents["format"]
    checkpoint.save(run / "checkpoints", contents, contents["progress"]["step"], 1, False)
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

"""Tests of train.evaluate_every_steps, which evaluates within an epoch and must not change the
training.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from timm_parallel.record.result import read_result
from timm_parallel.testing.configs import read_lines
from timm_parallel.testing.ranks import train_warm
from timm_parallel.tests.small_runs import contents_of, resolved, weights_of

EVERY_TWO = (*("train.epochs=2", "train.evaluate_every=0", "train.evaluate_every_steps=2"),)
WHOLE_EPOCHS = ("train.epochs=9", "train.evaluate_every=1", "train.evaluate_every_steps=null")


def evaluated_losses(folder: Path) -> dict[int, float]:
    """Read the validation losses that a run has logged, and return a dictionary from
    step to loss.
    """
    lines = read_lines(folder / "metrics.jsonl")
    return {line["step"]: line["val/loss"] for line in lines if "val/loss" in line}


def run_warm(folder: Path, *overrides: str) -> Path:
    return train_warm(resolved(*EVERY_TWO, *overrides), folder)


@pytest.mark.slow(seconds=3)
def test_evaluations_within_an_epoch_do_not_change_the_training(tmp_path: Path) -> None:
    dropout = "+model.kwargs.dropout=0.2"
    often = weights_of(run_warm(tmp_path / "often", dropout))
    never = weights_of(run_warm(tmp_path / "never", dropout, "train.evaluate_every_steps=null"))
    assert all(torch.equal(tensor, never[name]) for name, tensor in often.items())


@pytest.mark.slow(seconds=4)
def test_run_that_max_steps_ends_between_two_evaluations_resumes_bit_for_bit(
    tmp_path: Path,
) -> None:
    dropout = "+model.kwargs.dropout=0.2"
    whole = run_warm(tmp_path / "whole", dropout)
    run_warm(tmp_path / "parts", dropout, "train.max_steps=3")
    parts = run_warm(tmp_path / "parts", dropout)
    one, other = weights_of(whole), weights_of(parts)
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
    assert evaluated_losses(parts).items() >= evaluated_losses(whole).items()
    means = [contents_of(folder)["progress"]["epoch_means"] for folder in (whole, parts)]
    assert means[0] == means[1]


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

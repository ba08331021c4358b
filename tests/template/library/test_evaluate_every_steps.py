"""Tests of train.evaluate_every_steps, which evaluates within an epoch and must not change the
training.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.template.runs import run_warm
from timm_parallel.record.result import read_result
from timm_parallel.testing.configs import read_lines

EVERY_TWO = (
    *("model=tiny", "data.limit_train=60", "data.batch_size=12", "train.epochs=2"),
    *("train.evaluate_every=0", "train.evaluate_every_steps=2", "parallel.accelerator=cpu"),
)


def evaluated_losses(folder: Path) -> dict[int, float]:
    """Read the validation losses that a run has logged, and return a dictionary from
    step to loss.
    """
    lines = read_lines(folder / "metrics.jsonl")
    return {line["step"]: line["val/loss"] for line in lines if "val/loss" in line}


def last_weights(folder: Path) -> dict[str, torch.Tensor]:
    contents = torch.load(folder / "checkpoints/last.pt", weights_only=True)
    weights: dict[str, torch.Tensor] = contents["model"]
    return weights


@pytest.mark.slow(seconds=3)
def test_evaluations_within_an_epoch_do_not_change_the_training(tmp_path: Path) -> None:
    words = (*EVERY_TWO, "parallel=single", "+model.kwargs.drop_rate=0.2", "data.augment.hflip=0.5")
    often = last_weights(run_warm(tmp_path / "often", *words))
    never = last_weights(run_warm(tmp_path / "never", *words, "train.evaluate_every_steps=null"))
    assert all(torch.equal(tensor, never[name]) for name, tensor in often.items())


@pytest.mark.nightly
@pytest.mark.slow(seconds=4)
def test_run_that_stops_between_two_evaluations_resumes_bit_for_bit(tmp_path: Path) -> None:
    words = (*EVERY_TWO, "parallel=single")
    whole = run_warm(tmp_path / "whole", *words)
    run_warm(tmp_path / "parts", *words, "train.max_steps=3")
    parts = run_warm(tmp_path / "parts", *words)
    one, other = last_weights(whole), last_weights(parts)
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
    assert evaluated_losses(parts).items() >= evaluated_losses(whole).items()


@pytest.mark.slow(seconds=1)
def test_early_stop_ends_a_run_within_an_epoch(tmp_path: Path) -> None:
    words = ("train.early_stop=1", "optim.lr=1e-12", "optim.warmup_lr=0", "optim.warmup_epochs=0")
    folder = run_warm(tmp_path / "run", *EVERY_TWO, "parallel=single", *words)
    assert read_result(folder).steps == 4

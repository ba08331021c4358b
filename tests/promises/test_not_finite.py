"""A loss that is not finite on one rank: all ranks decide the same at the same step, and such weights are never saved."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import in_ranks, resolved
from torch import nn

from src.engine.machine.ranks import Ranks
from src.engine.record.result import read_metrics, read_result
from src.run.lifecycle import Training
from src.training import checkpoint
from src.training.finite import NotFiniteError

SETTINGS = (
    "print_config=false",
    "model=tiny",
    "data.batch_size=16",
    "data.limit_train=96",
    "train.epochs=2",
    "optim.warmup_epochs=0",
    "parallel.threads_per_device=1",
    "train.log_every=3",
    "checkpoint.every_steps=1",
)


class Poison(nn.Module):
    """NaN in the outputs of one rank's training steps."""

    def __init__(self, head: nn.Module, steps: set[int]) -> None:
        super().__init__()
        self.head, self.steps, self.count = head, steps, 0
        self.register_buffer("average", torch.zeros(1))  # as BatchNorm keeps one

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        outputs = self.head(features)
        if self.training:
            self.count += 1
            outputs = outputs * (math.nan if self.count in self.steps else 1.0)
            self.average += outputs.detach().mean()
        return outputs


def train(
    ranks: Ranks, store: Any, folder: str, overrides: tuple[str, ...], steps: set[int], bad_rank: int
) -> dict[str, Any]:
    config = resolved(*SETTINGS, f"parallel={'ddp' if ranks.world_size > 1 else 'single'}", *overrides)
    torch.set_num_threads(1)
    training = Training(config, Path(folder), ranks, store)
    model = training.state.model
    poison = Poison(model.head, steps if ranks.rank == bad_rank else set())  # type: ignore[arg-type]
    model.head = poison
    said = ""
    try:
        training.train()
    except NotFiniteError as error:
        said = str(error)
        training.strategy.close()
    weights = {name: tensor.numpy().copy() for name, tensor in model.state_dict().items()}
    return {"said": said, "step": training.progress.step, "skipped": training.progress.skipped, "weights": weights}


@pytest.mark.processes
@pytest.mark.parametrize("world_size", [1, 2])
def test_all_ranks_stop_and_say_step_rank_images_and_checkpoint(tmp_path: Path, world_size: int) -> None:
    bad = world_size - 1
    overrides = (f"parallel.devices={world_size}", "checkpoint.every_steps=3")
    ended = in_ranks(train, world_size, str(tmp_path), overrides, {5}, bad)
    for rank in ended:
        assert f"the loss is nan at step 5 (rank {bad})" in rank["said"]
        assert rank["step"] == 6, "noticed at the boundary"
    assert "it read the training images" in ended[0]["said"]
    assert f"the last good checkpoint is {tmp_path}/checkpoints/last.pt" in ended[0]["said"]
    last = checkpoint.load(tmp_path / "checkpoints" / "last.pt")
    assert last["progress"]["step"] == 3
    assert all(tensor.isfinite().all() for tensor in last["model"].values())


@pytest.mark.processes
@pytest.mark.sample(2)
@pytest.mark.parametrize("world_size", [2, 1])
def test_skipped_steps_leave_weights_and_averages_alone_on_all_ranks(tmp_path: Path, world_size: int) -> None:
    overrides = (f"parallel.devices={world_size}", "train.on_nonfinite=skip")
    ended = in_ranks(train, world_size, str(tmp_path), overrides, {2, 5, 6}, world_size - 1)
    assert [rank["said"] for rank in ended] == [""] * world_size
    assert [rank["skipped"] for rank in ended] == [3] * world_size
    for name, tensor in ended[0]["weights"].items():
        assert np.isfinite(tensor).all(), name
        if name != "head.average":
            assert np.array_equal(tensor, ended[-1]["weights"][name]), name
    lines = [line for line in read_metrics(tmp_path / "metrics.jsonl") if "train/loss" in line]
    assert {line["step"] for line in lines if line["train/loss"] is None} == {2, 5, 6}, "each step is a boundary here"
    assert checkpoint.load(tmp_path / "checkpoints" / "last.pt")["progress"]["skipped"] == 3


@pytest.mark.processes
def test_too_many_skipped_steps_end_the_run(tmp_path: Path) -> None:
    overrides = ("parallel.devices=2", "train.on_nonfinite=skip", "train.max_skipped=2")
    ended = in_ranks(train, 2, str(tmp_path), overrides, {2, 4, 5, 6}, 0)
    for rank in ended:
        assert "not finite in 3 steps, more than train.max_skipped=2; the last was step 5" in rank["said"]
    assert checkpoint.load(tmp_path / "checkpoints" / "last.pt")["progress"]["step"] == 4


@pytest.mark.processes
def test_weights_that_are_not_finite_are_not_saved_though_the_loss_was(tmp_path: Path) -> None:
    """The update itself overflows: the loss of that step was still finite."""
    overrides = ("optim=sgd", "optim.lr=1e38", "optim.momentum=0", "train.log_every=1")
    ended = in_ranks(train, 1, str(tmp_path), overrides, set(), 0)
    assert "not finite" in ended[0]["said"] or "the loss is" in ended[0]["said"]
    for path in (tmp_path / "checkpoints").glob("*.pt"):
        assert all(tensor.isfinite().all() for tensor in checkpoint.load(path)["model"].values())


@pytest.mark.processes
def test_an_overflow_in_fp16_is_the_scalers_business(tmp_path: Path) -> None:
    """A scale that overflows is halved until it fits; no step counts as not finite."""
    overrides = ("train.precision=fp16", "train.on_nonfinite=skip", "train.max_skipped=0")
    ended = in_ranks(train, 1, str(tmp_path), overrides, set(), 0)
    assert ended[0]["said"] == ""
    assert ended[0]["skipped"] == 0


@pytest.mark.processes
def test_an_epoch_of_skipped_steps_has_no_loss(tmp_path: Path) -> None:
    overrides = ("parallel.devices=1", "train.on_nonfinite=skip", "train.target_loss=0.1")
    assert in_ranks(train, 1, str(tmp_path), overrides, set(range(7, 13)), 0)[0]["skipped"] == 6
    assert read_result(tmp_path).train == {"loss": None}, "0 would have reached the target"


def breaks_at(ranks: Ranks, store: Any, folder: str, step: int) -> str:
    training = Training(resolved(*SETTINGS, "parallel=single"), Path(folder), ranks, store)
    weight = next(training.state.model.parameters())

    def overflow(*_: Any) -> None:
        if training.progress.step + 1 == step:
            weight.data.fill_(math.inf)

    training.state.optimizer.register_step_post_hook(overflow)
    with pytest.raises(NotFiniteError) as stopped:
        training.train()
    return str(stopped.value)


@pytest.mark.processes
@pytest.mark.parametrize("step", [3, 6], ids=["inside", "the epoch's last"])
def test_weights_that_break_name_the_images_of_their_step(tmp_path: Path, step: int) -> None:
    said = in_ranks(breaks_at, 1, str(tmp_path), step)[0]
    assert f"the weights are not finite after step {step}, though its loss was" in said
    assert re.search(r"it read the training images \d+(, \d+){7} …", said), said

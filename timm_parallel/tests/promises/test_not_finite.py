"""A non-finite loss stops all ranks at one step; non-finite weights are never saved."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from timm_parallel.errors import NotFiniteError
from timm_parallel.machine.ranks import Ranks
from timm_parallel.run import checkpoint
from timm_parallel.testing.ranks import in_ranks
from timm_parallel.tests.small_runs import resolved, start_run, take_steps

# An epoch has six steps.
SETTINGS = ("data.batch_size=10", "train.epochs=2", "train.log_every=3", "checkpoint.every_steps=1")


class Poison(nn.Module):
    """Classifier head that outputs NaN in given training steps. Tests use it on one rank."""

    def __init__(self, head: nn.Module, steps: set[int]) -> None:
        super().__init__()
        self.head, self.steps, self.count = head, steps, 0
        # This buffer becomes NaN together with the outputs, as the running mean of BatchNorm would.
        self.register_buffer("average", torch.zeros(1))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        outputs = self.head(features)
        if self.training:
            self.count += 1
            outputs = outputs * (math.nan if self.count in self.steps else 1.0)
            self.average += outputs.detach().mean()
        return outputs


def train(
    ranks: Ranks,
    store: Any,
    folder: str,
    overrides: tuple[str, ...],
    steps: set[int],
    bad_rank: int,
    strategy: str = "single",
) -> dict[str, Any]:
    config = resolved(*SETTINGS, f"parallel={strategy}", *overrides)
    run = start_run(config, Path(folder), ranks, store)
    model = run.parts.state.model
    poison = Poison(model.head, steps if ranks.rank == bad_rank else set())  # type: ignore[arg-type]
    model.head = poison
    message = ""
    try:
        list(take_steps(run))
    except NotFiniteError as error:
        message = str(error)
        run.parts.strategy.close()
    return {"message": message, "step": run.parts.progress.step}


@pytest.mark.slow(seconds=1)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_non_finite_loss_stops_all_ranks_and_error_names_step_rank_and_images(
    tmp_path: Path, strategy: str
) -> None:
    overrides = ("parallel.devices=2", "checkpoint.every_steps=3")
    ended = in_ranks(train, 2, str(tmp_path), overrides, {5}, 1, strategy)
    for rank in ended:
        assert "the loss is nan at step 5 (rank 1)" in rank["message"]
        assert rank["step"] == 6, "expected all ranks to stop at the sync step"
    assert "it read the training images" in ended[0]["message"]
    assert f"{tmp_path}/checkpoints/last.pt" in ended[0]["message"]
    last = checkpoint.load(tmp_path / "checkpoints" / "last.pt")
    assert last["progress"]["step"] == 3
    assert all(tensor.isfinite().all() for tensor in last["model"].values())


@pytest.mark.processes
def test_non_finite_weights_are_not_saved_when_loss_is_finite(tmp_path: Path) -> None:
    """The optimizer step overflows, although the loss of the same step is finite."""
    overrides = ("optim.opt=momentum", "optim.lr=1e38", "train.log_every=1")
    ended = in_ranks(train, 1, str(tmp_path), overrides, set(), 0)
    assert "not finite" in ended[0]["message"] or "the loss is" in ended[0]["message"]
    for path in (tmp_path / "checkpoints").glob("*.pt"):
        assert all(tensor.isfinite().all() for tensor in checkpoint.load(path)["model"].values())


class OverflowingHead(nn.Module):
    """Classifier head whose weight gradient has one infinite row in one training batch. Under fsdp,
    only one rank holds this row.
    """

    def __init__(self, head: nn.Module, batch: int | None) -> None:
        super().__init__()
        self.head, self.batch, self.count = head, batch, 0

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.head(features)
        self.count += self.training
        if self.training and self.count == self.batch:
            # Detach the features, so that only the gradients of the head are infinite, and not
            # those of earlier layers.
            again = self.head(features.detach())
            again.register_hook(
                lambda gradient: gradient.index_fill(1, torch.tensor([0]), math.inf)
            )
            outputs = outputs + again - again.detach()
        return outputs


def steps_with_overflow_on_rank_1(
    ranks: Ranks, store: Any, folder: str, overrides: tuple[str, ...]
) -> list[tuple[float, bool]]:
    """Train four fp16 steps on all ranks. In the second step, a gradient on rank 1 overflows.
    Return (loss scale, whether the weights have changed) for each step.
    """
    config = resolved(
        *SETTINGS, *overrides, "train.precision=fp16", "train.max_steps=4", "train.epochs=9"
    )
    run = start_run(config, Path(folder), ranks, store)
    state, steps = run.parts.state, []
    # Start with a low loss scale, so that gradients overflow only in the step that the test
    # chooses.
    state.phases[0].scaler = scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    bad_batch = config.train.accumulate + 1 if ranks.rank == 1 else None
    state.model.head = OverflowingHead(state.model.head, bad_batch)  # type: ignore[arg-type]
    own = [
        getattr(weight, "to_local", lambda weight=weight: weight)()
        for weight in state.model.parameters()
    ]
    before, update = [weight.detach().clone() for weight in own], scaler.update

    def update_and_record() -> None:
        update()
        now = [weight.detach().clone() for weight in own]
        steps.append((scaler.get_scale(), not all(map(torch.equal, before, now))))
        before[:] = now

    scaler.update = update_and_record  # type: ignore[method-assign, assignment]
    list(take_steps(run))
    return steps


@pytest.mark.parametrize(
    "overrides",
    [
        # The overflow happens in the first of two accumulated batches. Its gradients are not
        # synchronized between ranks.
        ("parallel=ddp", "train.accumulate=2"),
        # At a logged step, gradients are unscaled before the step of the optimizer.
        ("parallel=fsdp", "train.log_every=1"),
    ],
    ids=lambda overrides: " ".join(overrides),
)
@pytest.mark.slow(seconds=4)
def test_all_ranks_skip_the_same_fp16_step_when_gradients_of_one_rank_overflow(
    tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    words = (*overrides, "parallel.devices=2", "data.batch_size=4")
    of_ranks = in_ranks(steps_with_overflow_on_rank_1, 2, str(tmp_path), words)
    assert of_ranks == [[(8.0, True), (4.0, False), (4.0, True), (4.0, True)]] * 2


def overflow_at(ranks: Ranks, store: Any, folder: str, step: int) -> str:
    run = start_run(resolved(*SETTINGS), Path(folder), ranks, store)
    weight = next(run.parts.state.model.parameters())

    def overflow(*_: Any) -> None:
        if run.parts.progress.step + 1 == step:
            weight.data.fill_(math.inf)

    run.parts.state.phases[0].optimizer.register_step_post_hook(overflow)
    with pytest.raises(NotFiniteError) as stopped:
        list(take_steps(run))
    return str(stopped.value)


@pytest.mark.parametrize("step", [3, 6], ids=["inside", "the epoch's last"])
@pytest.mark.slow(seconds=3)
def test_error_names_the_images_of_the_step_when_weights_are_not_finite(
    tmp_path: Path, step: int
) -> None:
    message = in_ranks(overflow_at, 1, str(tmp_path), step)[0]
    assert f"the weights are not finite after step {step}" in message
    assert re.search(r"it read the training images \d+(, \d+){7} …", message), message

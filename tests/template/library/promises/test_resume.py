"""A run that is stopped at any step and resumed equals an uninterrupted run."""

from __future__ import annotations

import multiprocessing
import shutil
import signal
import time
from collections import Counter
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.amp import GradScaler

from src.schema import ResolvedConfig
from src.train.run import train as train_all_steps
from tests.template.runs import assert_equal_trees, resolved, start_run, training_of
from timm_parallel.machine.ranks import Ranks
from timm_parallel.machine.signals import Stopped
from timm_parallel.record.result import read_metrics, read_result
from timm_parallel.run import checkpoint
from timm_parallel.run.parts import RunParts
from timm_parallel.run.run import Training
from timm_parallel.testing.configs import without_times
from timm_parallel.testing.ranks import in_ranks

pytestmark = pytest.mark.processes
# Optimizer steps of one epoch and of the whole run.
EPOCH, STEPS = 6, 18
SETTINGS = (
    # The model `tiny` of `resolved` has LayerNorm, so that results do not depend on the ranks.
    "data.batch_size=24",
    # 150 images are 6 batches of 24. The remaining 6 images are dropped.
    "data.limit_train=150",
    "train.epochs=3",
    "train.log_every=4",
    "checkpoint.keep=50",
    "optim.warmup_epochs=0.5",
    "parallel.accelerator=cpu",
    "data.augment.scale=[0.5,1]",
    "data.augment.hflip=0.5",
)
RANDOM = (
    "+model.kwargs.drop_rate=0.1",
    "data.augment.mixup=0.2",
    "data.augment.mixup_off_epoch=2",
    "data.augment.reprob=0.5",
    "data.augment.aa=rand-m9-mstd0.5",
    "model.ema.decay=0.9",
)
STOPS = (1, 3, EPOCH, EPOCH + 1, 11, STEPS - 1)


class StopsAt(nn.Module):
    """Layer that requests a stop of the run in the forward pass of one step, as a signal would."""

    def __init__(self, head: nn.Module, parts: RunParts, step: int) -> None:
        super().__init__()
        self.head, self.step = head, step
        self.parts = parts

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        if self.training and self.parts.progress.step + 1 == self.step:
            stop = self.parts.strategy.group.stop
            stop.request(signal.SIGTERM)
            # On a busy machine, steps could pass before the ranks have agreed on their last step.
            while not stop.stop_requested():
                time.sleep(0.01)
        return self.head(features)  # type: ignore[no-any-return]


@cache
def config_of(overrides: tuple[str, ...]) -> ResolvedConfig:
    """Build each config once, because composing takes as long as the training."""
    return resolved(*SETTINGS, *overrides)


def train(
    ranks: Ranks, store: Any, folder: str, config: ResolvedConfig, stop_at: int | None
) -> list[tuple[int, int]]:
    """Continue from the newest checkpoint in `folder`, and train to the end or to step `stop_at`.
    Return the (epoch, image index) pairs that this rank has read.
    """
    torch.set_num_threads(1)
    # Fork loader workers, as a rank of train.py does.
    multiprocessing.set_start_method("fork", force=True)
    run = start_run(config, Path(folder), ranks, store)
    parts = run.parts
    model, reader = parts.state.model, parts.train_loader.fetcher
    read: list[tuple[int, int]] = []
    if stop_at is not None:
        head = model.get_classifier()  # type: ignore[operator]
        inner = head.forward
        stops = StopsAt(nn.Identity(), parts, stop_at)
        head.forward = lambda features: inner(stops.train(model.training)(features))
    fetch = type(reader).read

    def spy(request: Any) -> Any:
        read.extend((request.epoch, index) for index in request.indices.tolist())
        return fetch(reader, request)

    # With two loader workers, do not record the images that are read, because a local function
    # cannot be pickled for the workers.
    if config.data.workers != 2:
        reader.read = spy  # type: ignore[assignment, method-assign]
    # Do not log example images. This would read the first batch once more and change the record of
    # images that are read.
    Training._show_images = lambda self: None  # type: ignore[method-assign]
    try:
        with run.training() as training:
            train_all_steps(training)
        assert stop_at is None, "the run did not stop"
    except Stopped:
        assert parts.progress.step in (stop_at, (stop_at or 0) + 1)
        parts.strategy.close()
    return read


def curves(folder: Path) -> list[dict[str, Any]]:
    return without_times(list(read_metrics(folder / "metrics.jsonl")))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function (world size, overrides) -> run folder of an uninterrupted run."""
    made: dict[tuple[int, tuple[str, ...]], Path] = {}

    def run(world_size: int, overrides: tuple[str, ...]) -> Path:
        if (world_size, overrides) not in made:
            folder = tmp_path_factory.mktemp("undisturbed")
            in_ranks(train, world_size, str(folder), config_of(overrides), None)
            made[world_size, overrides] = folder
        return made[world_size, overrides]

    return run


def spread(world_size: int, strategy: str = "") -> tuple[str, ...]:
    return (
        f"parallel={strategy or ('ddp' if world_size > 1 else 'single')}",
        f"parallel.devices={max(world_size, 1)}",
    )


def slow(*row: Any) -> Any:
    return pytest.param(*row, marks=pytest.mark.slow(seconds=3))


@pytest.mark.slow(seconds=3)
@pytest.mark.sample(12)
@pytest.mark.parametrize(
    ("world_size", "workers", "stop_at"),
    [
        (2, 0, 3),
        # Stop after the last step, before the evaluation of the last epoch.
        slow(1, 0, STEPS),
        *(slow(1, 0, step) for step in STOPS),
        *(slow(2, 0, step) for step in STOPS if step != 3),
        slow(2, 2, EPOCH),
    ],
)
def test_resumed_run_has_weights_and_curves_of_an_uninterrupted_run(
    undisturbed: Any, tmp_path: Path, world_size: int, workers: int, stop_at: int
) -> None:
    assert_resume_changes_nothing(
        undisturbed, tmp_path, world_size, (*RANDOM, f"data.workers={workers}"), stop_at
    )


@pytest.mark.nightly
@pytest.mark.slow(seconds=8)
@pytest.mark.parametrize("stop_at", [EPOCH, 3])
@pytest.mark.sample(2)
def test_resumed_run_with_dist_bn_reduce_has_weights_and_curves_of_an_uninterrupted_run(
    undisturbed: Any, tmp_path: Path, stop_at: int
) -> None:
    """The run stops while BatchNorm statistics still differ between ranks, because they are
    averaged only at the end of an epoch.
    """
    overrides = (
        "model=resnet18",
        "model.name=resnet10t",
        "parallel.dist_bn=reduce",
        "model.ema.decay=0.9",
        "train.epochs=2",
    )
    assert_resume_changes_nothing(undisturbed, tmp_path, 2, overrides, stop_at)


def assert_resume_changes_nothing(
    undisturbed: Any,
    tmp_path: Path,
    world_size: int,
    more: tuple[str, ...],
    stop_at: int,
) -> None:
    """Train a run that stops at step `stop_at`, and resume it. Check that its checkpoint, metrics
    and curves equal those of an uninterrupted run.
    """
    overrides = (*more, *spread(world_size))
    whole = undisturbed(world_size, overrides)
    for until in (stop_at, None):
        in_ranks(train, world_size, str(tmp_path), config_of(overrides), until)
    one, other = (
        checkpoint.load(folder / "checkpoints" / "last.pt") for folder in (whole, tmp_path)
    )
    assert_equal_trees(training_of(one), training_of(other))
    assert curves(tmp_path) == curves(whole)
    assert any("train/acc" in line for line in curves(whole)), (
        "sums over images since the last logged step"
    )
    resumed, expected = read_result(tmp_path), read_result(whole)
    assert (resumed.train, resumed.val, resumed.test) == (
        expected.train,
        expected.val,
        expected.test,
    )
    events = EventAccumulator(str(tmp_path / "tensorboard"), {"scalars": 0}).Reload()
    for tag in ("train/loss", "val/acc"):
        steps = [event.step for event in events.Scalars(tag)]
        assert steps == sorted(set(steps)), f"{tag} has duplicate steps"


@pytest.mark.sample(16)
@pytest.mark.parametrize(
    ("before", "after"),
    [
        slow(spread(2), spread(1)),
        slow(spread(1), spread(2)),
        slow(spread(2), spread(3)),
        slow(spread(2, "dp"), spread(2)),
        slow(spread(1), spread(2, "fsdp")),
        slow(spread(2, "fsdp"), spread(1)),
        slow(spread(2, "fsdp"), spread(3, "fsdp")),
    ],
    ids=lambda overrides: "x".join(text.split("=")[1] for text in overrides),
)
def test_resume_under_another_strategy_reads_each_sample_once_and_gives_equal_losses(
    undisturbed: Any, tmp_path: Path, before: tuple[str, ...], after: tuple[str, ...]
) -> None:
    def processes(overrides: tuple[str, ...]) -> int:
        return int(overrides[1].split("=")[1]) if overrides[0].endswith(("ddp", "fsdp")) else 1

    whole = undisturbed(1, ("optim=sgd", "optim.lr=0.01", *spread(1)))
    more = ("optim=sgd", "optim.lr=0.01")
    first = in_ranks(train, processes(before), str(tmp_path), config_of((*more, *before)), 9)
    reached = int(checkpoint.load(tmp_path / "checkpoints" / "last.pt")["progress"]["step"])
    second = in_ranks(train, processes(after), str(tmp_path), config_of((*more, *after)), None)
    read = Counter(pair for ranks in (first, second) for rank in ranks for pair in rank)
    assert set(read.values()) == {1}, "a sample was read twice"
    assert len(read) == STEPS * 24
    assert 9 <= reached <= 10
    for one, other in zip(curves(whole), curves(tmp_path), strict=True):
        assert one["step"] == other["step"]
        for key in ("train/loss", "val/loss"):
            if key in one:
                assert np.isclose(one[key], other[key], rtol=0, atol=1e-5), (one["step"], key)


def train_with_growing_scale(
    ranks: Ranks, store: Any, folder: str, config: ResolvedConfig, stop_at: int | None
) -> None:
    """Train with a gradient scaler that doubles a low scale after 4 good steps."""
    torch.amp.GradScaler = partial(GradScaler, init_scale=8.0, growth_interval=4)  # type: ignore[misc, assignment]
    train(ranks, store, folder, config, stop_at)


@pytest.mark.nightly
@pytest.mark.slow(seconds=4)
def test_resumed_fp16_run_continues_with_the_saved_loss_scale(tmp_path: Path) -> None:
    """The run stops between two changes of the loss scale. So both the scale and its count of good
    steps must be restored.
    """
    config = config_of((*spread(2), "train.precision=fp16", "train.epochs=2"))
    last = {}
    for name, stops in {"whole": (None,), "resumed": (6, None)}.items():
        (tmp_path / name).mkdir()
        for until in stops:
            in_ranks(train_with_growing_scale, 2, str(tmp_path / name), config, until)
        last[name] = checkpoint.load(tmp_path / name / "checkpoints" / "last.pt")
    scaler = last["whole"]["phases"]["train"]["scaler"]
    assert (scaler["scale"], scaler["_growth_tracker"]) == (64.0, 0)
    for part in ("phases", "model"):
        assert_equal_trees(last["whole"][part], last["resumed"][part], part)


@pytest.mark.slow(seconds=2)
def test_resume_from_the_final_checkpoint_writes_train_metrics_of_the_original_run(
    undisturbed: Any, tmp_path: Path
) -> None:
    overrides = (*spread(1), *RANDOM, "data.workers=0")
    whole = undisturbed(1, overrides)
    shutil.copytree(whole / "checkpoints", tmp_path / "checkpoints")
    in_ranks(train, 1, str(tmp_path), config_of(overrides), None)
    assert read_result(tmp_path).train == read_result(whole).train

"""The library must be able to run a project that is not this template. The folder small_project/
has another package, with its own config classes, data, tasks, model, strategy and training
function. Any number of devices trains its tasks alike: one network, two networks with an optimizer
each, and targets of unequal length.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from small import training
from small.app import app
from small.config import Config, DataConfig, ResolvedConfig
from small.data import Scattered, Spots
from small.model import Tiny
from torch import distributed
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten

from timm_parallel import Run, Training, compose, resolve
from timm_parallel.machine.ranks import Ranks
from timm_parallel.machine.signals import Stopped
from timm_parallel.run.step import Step
from timm_parallel.testing.commands import Refuse
from timm_parallel.testing.configs import read_lines
from timm_parallel.testing.ranks import in_ranks
from timm_parallel.tests.small_runs import TASKS, contents_of, weights_of

# Steps of a run, and a step in the middle of its second epoch at which no metrics are logged.
STEPS, MIDDLE = 15, 7
# Strategy of the small project.
EACH = "small.strategies.Each"
# Strategy and number of devices of each run that the fixture also stops and resumes.
RESUMED = [("single", 1), ("ddp", 2), ("fsdp", 2)]
# Largest norm of the difference of a tensor between two strategies, relative to its norm.
TOLERANCE = {"position": 1e-5, "pair": 1e-6, "points": 1e-6}
# Strategy, number of devices and batches per step of each run that the fixture `runs` trains. All
# runs of a task train the same images in a step.
TRAINED = {
    "position": [
        ("single", 1, 1),
        ("dp", 2, 1),
        *((strategy, 2, 1) for strategy in ("ddp", "fsdp", EACH)),
        *((strategy, 3, 1) for strategy in ("ddp", "fsdp")),
    ],
    "pair": [(*spread, 1) for spread in RESUMED] + [(*spread, 2) for spread in RESUMED],
    # Five replicas get unequal parts of a batch.
    "points": [("single", 1, 1), ("dp", 5, 2), ("single", 1, 2), ("ddp", 2, 2), ("fsdp", 2, 1)],
}

pytestmark = pytest.mark.processes


@dataclass(frozen=True)
class Job:
    """A training in forked ranks. With `stop_at`, a signal stops the training after that step."""

    folder: Path
    config: ResolvedConfig
    stop_at: int | None = None

    @property
    def processes(self) -> int:
        return self.config.parallel.devices if self.config.parallel.has_ranks else 1


def train_jobs(ranks: Ranks, store: Any, jobs: list[Job]) -> None:
    """Train jobs one after the other on this rank."""

    class StoppingRun(Run):
        """Run that a signal stops in the step `stop_at`."""

        @contextmanager
        def training(self) -> Iterator[Training]:
            strategy, modules = self.parts.strategy, self.parts.state.modules.values()
            # fsdp shards each network and each average.
            parameters = [parameter for module in modules for parameter in module.parameters()]
            assert {isinstance(of, DTensor) for of in parameters} == {strategy.shards}
            stop = strategy.group.stop
            with super().training() as started:
                steps = started.steps

                def stopping_steps() -> Iterator[Step]:
                    for step in steps():
                        if step.number == job.stop_at:
                            stop.request(signal.SIGTERM)
                            # Wait until all ranks have agreed on their last step, because the steps
                            # are so fast that the run could end before.
                            while not stop.stop_requested():
                                time.sleep(0.01)
                        yield step

                started.steps = stopping_steps  # type: ignore[method-assign]
                yield started

    training.Run = StoppingRun  # type: ignore[misc]
    for number, job in enumerate(jobs):
        has_ranks = job.config.parallel.has_ranks
        own_store = distributed.PrefixStore(str(number), store) if has_ranks else None
        job.folder.mkdir(exist_ok=True)
        try:
            training.train(job.config, job.folder, ranks, own_store)
            assert job.stop_at is None, "the run did not stop"
        except Stopped:
            if has_ranks:
                distributed.destroy_process_group()


def name_of(task: str, strategy: str, devices: int, accumulate: int = 1) -> str:
    return f"{task}_{strategy}_{devices}_{accumulate}"


def config_of(task: str, strategy: str, devices: int, accumulate: int = 1) -> ResolvedConfig:
    """Build the config of a run with 12 images per step."""
    composed = _composed(task)
    composed.parallel.strategy, composed.parallel.devices = strategy, devices
    composed.data.batch_size, composed.train.accumulate = 12 // accumulate, accumulate
    return app.own_resolved(resolve(composed))


@cache
def _composed(task: str) -> Config:
    """Compose the config of a task once, because this takes longer than some of the runs."""
    return compose("parallel.threads_per_device=1", *TASKS[task])


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train the runs in TRAINED, and stop and resume those in RESUMED. Return their parent folder.

    `name_of` returns the name of a run, and a resumed run has the suffix `_resumed`.
    """
    base = tmp_path_factory.mktemp("runs")
    jobs = []
    for task, spreads in TRAINED.items():
        for spread in spreads:
            folder, config = base / name_of(task, *spread), config_of(task, *spread)
            jobs.append(Job(folder, config))
            if task != "points" and spread in [(*resumed, 1) for resumed in RESUMED]:
                resumed = folder.with_name(f"{folder.name}_resumed")
                jobs += [Job(resumed, config, MIDDLE), Job(resumed, config)]
    jobs.sort(key=lambda job: job.processes)
    for processes, of_size in groupby(jobs, lambda job: job.processes):
        in_ranks(train_jobs, processes, list(of_size), timeout=120)
    return base


def result_of(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "result.json").read_text(encoding="utf-8")))


def curve_of(folder: Path) -> list[tuple[int, str, float]]:
    """Return (step, metric, value) of all metrics of a run that are not times or sizes."""
    timed = ("train/images_per_sec", "train/data_wait", "memory/")
    return [
        (line["step"], name, value)
        for line in read_lines(folder / "metrics.jsonl")
        for name, value in line.items()
        if "/" in name and not name.startswith(timed)
    ]


def assert_equally_trained(folders: list[Path], tolerance: float) -> None:
    """Compare the losses and the final weights of runs with those of the first run."""
    expected, curve = weights_of(folders[0]), curve_of(folders[0])
    for folder in folders:
        assert result_of(folder)["steps"] == STEPS
        weights = weights_of(folder)
        assert weights.keys() == expected.keys()
        for name, tensor in weights.items():
            difference = (tensor.double() - expected[name].double()).norm()
            assert difference <= tolerance * expected[name].double().norm(), (folder.name, name)
        assert [point[:2] for point in curve_of(folder)] == [point[:2] for point in curve]
        values = [point[2] for point in curve_of(folder)]
        assert values == pytest.approx([point[2] for point in curve], rel=1e-5)


def assert_equal_bits(folder: Path, expected: Path) -> None:
    """Compare weights, optimizer state and progress of two runs bit for bit, without times."""
    one, other = contents_of(folder), contents_of(expected)
    # The seconds of training differ.
    assert one["progress"].pop("seconds") > 0 < other["progress"].pop("seconds")
    for part in ("model", "networks", "averages", "phases", "progress", "trained_on"):
        leaves, structure = tree_flatten(one[part])
        expected_leaves, expected_structure = tree_flatten(other[part])
        assert structure == expected_structure
        for leaf, expected_leaf in zip(leaves, expected_leaves, strict=True):
            is_tensor = isinstance(leaf, torch.Tensor)
            assert torch.equal(leaf, expected_leaf) if is_tensor else leaf == expected_leaf


@pytest.mark.slow(seconds=6)
@pytest.mark.parametrize("task", TASKS)
def test_task_trains_equally_under_every_strategy_and_accumulation(runs: Path, task: str) -> None:
    folders = [runs / name_of(task, *spread) for spread in TRAINED[task]]
    sizes = [
        (result_of(folder)["world_size"], result_of(folder)["accumulate"]) for folder in folders
    ]
    assert sizes == [spread[1:] for spread in TRAINED[task]]
    assert_equally_trained(folders, TOLERANCE[task])


@pytest.mark.slow(seconds=1)
@pytest.mark.parametrize("task", ["position", "pair"])
@pytest.mark.parametrize(("strategy", "devices"), RESUMED)
def test_resumed_run_has_the_bits_of_an_uninterrupted_run(
    runs: Path, task: str, strategy: str, devices: int
) -> None:
    whole = runs / name_of(task, strategy, devices)
    resumed = whole.with_name(f"{whole.name}_resumed")
    segments = result_of(resumed)["segments"]
    assert [segment["first_step"] for segment in segments] == [0, MIDDLE]
    assert_equal_bits(resumed, whole)
    assert curve_of(resumed) == curve_of(whole)


def predicted(run: Path, images: torch.Tensor) -> torch.Tensor:
    """Return the outputs of the model of a run, [N, 2]."""
    model = Tiny(outputs=2, width=6)
    model.load_state_dict(contents_of(run)["model"])
    with torch.no_grad():
        outputs: torch.Tensor = model((images / 255 - 0.1) / 0.2)
    return outputs


@pytest.mark.slow(seconds=1)
def test_evaluation_equals_a_plain_computation_on_all_validation_images(runs: Path) -> None:
    """The curves of the other runs, which have these metrics, equal those of this run."""
    run, val = runs / name_of("position", "single", 1), Spots(DataConfig()).val
    errors = predicted(run, val.images) - val.labels
    distances = errors.square().sum(1).sqrt()
    expected = {
        "loss": errors.double().square().mean().item(),
        "near": (distances < 1 / 7).double().mean().item(),
        "median_distance": sorted(distances.tolist())[len(val) // 2],
        "samples": 23,
    }
    result = result_of(run)
    assert {name: result["val"][name] for name in expected} == pytest.approx(expected, rel=1e-5)
    lower = {name: kind["lower_is_better"] for name, kind in result["metrics"].items()}
    assert lower == {"loss": True, "near": False, "median_distance": True}


@pytest.mark.slow(seconds=1)
def test_evaluation_of_ragged_targets_divides_by_the_number_of_all_points(runs: Path) -> None:
    run, val = runs / name_of("points", "single", 1), Scattered(DataConfig()).val
    outputs = predicted(run, torch.stack([image for image, _ in val]))
    errors = torch.cat(
        [output - of["points"] for output, (_, of) in zip(outputs, val, strict=True)]
    )
    assert {len(of["points"]) for _, of in val} == {0, 1, 2, 3}
    expected = {
        "loss": errors.double().square().mean(1).sum().item() / 23,
        "distance": errors.double().square().sum(1).sqrt().mean().item(),
        "samples": 23,
    }
    val_numbers = result_of(run)["val"]
    assert {name: val_numbers[name] for name in expected} == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow(seconds=1)
def test_after_step_sums_over_the_ranks(runs: Path) -> None:
    """The critic of the pair counts the samples of all ranks in each step."""
    for spread in TRAINED["pair"]:
        assert weights_of(runs / name_of("pair", *spread))["critic.seen"] == 12 * STEPS, spread


# Command line of a refused run -> part of the message that names the fix.
REFUSED = {
    "data.nois=0.1": "did you mean data.noise",
    "data.noise=2": "data.noise=2.0: expected <= 1",
    "model.width=wide": "model.width",
    "data.name=spot": "did you mean spots",
    "model.name=small.model.Tin": "model.name=small.model.Tin: no such class",
    "train.task=positon": "did you mean position",
    "train.loss=mae": "train.loss=mae: not supported",
    "checkpoint.metric=val/nea": "did you mean val/near",
    "parallel=eech": "each",
    "parallel.strategy=sngle": "did you mean single",
    "parallel.strategy=small.strategies.Eech": "small.strategies.Eech: no such class",
    "parallel=single parallel.devices=2": "choose parallel=ddp",
    "parallel=each parallel.devices=5": "nearest sizes: 10, 15",
    "data.batch_size=62": "use 61 or less",
}


@pytest.mark.parametrize("line", REFUSED)
def test_command_with_a_wrong_key_value_or_name_is_refused_with_a_fix(
    refuse: Refuse, line: str
) -> None:
    assert REFUSED[line] in refuse(*line.split())

"""A run resumed with other settings or data trains as announced, or refuses to start."""

from __future__ import annotations

import copy
import shutil
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from src.app import app
from src.schema import ResolvedConfig
from src.tasks.classification import Classification
from src.train.run import train
from tests.template.runs import draw_images, parts_of, resolved, start_run, take_steps
from timm_parallel.config.compose import load_config
from timm_parallel.config.validate import check_combination, check_values
from timm_parallel.entry import run_command
from timm_parallel.keys import leaves
from timm_parallel.launch import job
from timm_parallel.launch.job import prepare, record_end
from timm_parallel.launch.resume import check_resumable
from timm_parallel.machine import hardware
from timm_parallel.record.result import read_result
from timm_parallel.run import checkpoint
from timm_parallel.run.parts import RunParts
from timm_parallel.run.progress import Progress
from timm_parallel.run.restoring import checkpoint_of
from timm_parallel.run.run import Run
from timm_parallel.testing.configs import read_lines
from timm_parallel.testing.ranks import RANK_VARIABLES, warm_ranks

SETTINGS = (
    *("data=folder", "data.image_size=16", "data.workers=0", "data.batch_size=6"),
    *("data.limit_train=null", "data.augment.scale=null", "data.augment.hflip=0"),
    "model.kwargs={embed_dim:16,depth:2,num_heads:2,patch_size:8}",
    *("train.epochs=4", "train.log_every=1", "parallel=single", "parallel.accelerator=cpu"),
    *(
        "optim.warmup_epochs=0.5",
        "optim.lr=0.01",
        "optim.min_lr=1e-4",
        "checkpoint.keep=50",
        "print_config=false",
    ),
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write 24 training images in 3 classes, which make 4 steps per epoch."""
    root = tmp_path_factory.mktemp("data") / "images"
    draw_images(root, "val/ant", "val/bee", "val/cat")
    return draw_images(root, "train/ant", "train/bee", "train/cat", count=8)


@cache
def composed(root: Path, *overrides: str) -> ResolvedConfig:
    return resolved(*SETTINGS, f"data.root={root}", *overrides)


def config_of(root: Path, *overrides: str) -> ResolvedConfig:
    return copy.deepcopy(composed(root, *overrides))


def step(parts: RunParts, count: int = 1) -> None:
    """Train the given number of steps without evaluation, also across the end of an epoch."""
    progress = parts.progress
    until = progress.step + count
    while progress.step < until:
        first = progress.step_in_epoch * parts.config.train.accumulate
        batches = parts.train_loader.epoch(progress.epoch, first)
        for _ in take_steps(parts, batches, until - progress.step):
            pass
        if progress.step_in_epoch == parts.steps_per_epoch:
            progress.end_epoch(is_whole=True)


Folders = Callable[..., Path]


@pytest.fixture(scope="module")
def stopped(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """Return a function that trains each run once, stops it at a step, and returns its folder."""
    made: dict[tuple[Any, ...], Path] = {}

    def at(at_step: int, *overrides: str) -> Path:
        if (at_step, *overrides) not in made:
            folder = tmp_path_factory.mktemp("stopped")
            config = config_of(data, *overrides)
            prepare(config, folder)
            run = start_run(config, folder)
            step(run.parts, at_step)
            save(run)
            record_end(config, folder, "interrupted", "stopped")
            made[at_step, *overrides] = folder
        return made[at_step, *overrides]

    return at


def save(run: Run) -> None:
    contents = checkpoint_of(run.parts, run.segments)
    folder = run.folder / "checkpoints"
    checkpoint.save(folder, contents, run.parts.progress.step, keep=50, is_best=False)


def contents_of(folder: Path) -> dict[str, Any]:
    return torch.load(folder / "checkpoints" / "last.pt", weights_only=True)  # type: ignore[no-any-return]


def reference(config: ResolvedConfig, contents: dict[str, Any]) -> RunParts:
    """Build a new run of `config`. Copy the weights, the optimizer state and the progress from
    the checkpoint into this run, without the code of a resume.
    """
    run = parts_of(config)
    state = run.state
    state.model.load_state_dict(contents["model"])
    if state.ema is not None:
        state.ema.load_state_dict(contents["averages"].get("ema", contents["model"]))
    state.progress = Progress(**contents["progress"])
    [phase] = state.phases
    optimizer, saved = phase.optimizer, contents["phases"]["train"]["optimizer"]
    if saved["kind"] == type(optimizer).__name__:
        for name, parameter in state.model.named_parameters():
            optimizer.state[parameter] = copy.deepcopy(saved["state"][name])
        if "step" in saved["param_groups"][0]:
            for group in optimizer.param_groups:
                group["step"] = copy.deepcopy(saved["param_groups"][0]["step"])
    phase.learning.schedule.step_update(
        state.progress.epoch * run.steps_per_epoch + state.progress.step_in_epoch
    )
    if run.mixing is not None:
        run.mixing.batch = state.progress.step * config.train.accumulate
    return run


def groups_of(parts: RunParts) -> list[dict[str, Any]]:
    names = {id(parameter): name for name, parameter in parts.state.model.named_parameters()}
    return [
        {
            **{key: value for key, value in group.items() if key != "params"},
            "names": [names[id(p)] for p in group["params"]],
        }
        for group in parts.state.phases[0].optimizer.param_groups
    ]


def assert_trains_as(parts: RunParts, expected: RunParts, steps: int = 2) -> None:
    assert groups_of(parts) == groups_of(expected)
    for _ in range(steps):
        step(parts)
        step(expected)
        assert groups_of(parts) == groups_of(expected)
    for name, tensor in expected.state.model.state_dict().items():
        assert torch.equal(parts.state.model.state_dict()[name], tensor), name


@pytest.mark.slow(seconds=1)
def test_resume_continues_the_step_counters_in_parameter_groups_of_lamb_and_adan(
    stopped: Folders, data: Path
) -> None:
    folder = stopped(5, "optim.opt=adan")
    config = config_of(data, "optim.opt=adan", "optim.layer_decay=0.5", "optim.weight_decay=0.5")
    parts = start_run(config, folder).parts
    groups = parts.state.phases[0].optimizer.param_groups
    assert {int(group["step"]) for group in groups} == {5}
    assert_trains_as(parts, reference(config, contents_of(folder)), steps=8)


def changed_data(data: Path, to: Path, change: str) -> Path:
    shutil.copytree(data, to)
    train = to / "train"
    if change == "remove":
        for name in ("ant", "bee", "cat"):
            for index in range(3):
                (train / name / f"{index}.png").unlink()
    elif change == "replace":
        (train / "ant" / "0.png").rename(train / "ant" / "9.png")
    elif change == "rename":
        for split in ("train", "val"):
            (to / split / "cat").rename(to / split / "aardvark")
    else:
        assert change == "move"
    return to


@pytest.mark.parametrize(
    ("change", "at_step", "outcome"),
    [
        ("remove", 5, "mid-epoch.*images: 24 -> 15.*steps_per_epoch: 4 -> 2"),
        ("replace", 5, "mid-epoch.*listing"),
        ("rename", 4, "checkpoint .*: cat; .* only in the data: aardvark"),
        ("remove", 4, None),
        ("move", 5, None),
    ],
)
@pytest.mark.slow(seconds=1)
def test_resume_accepts_changed_data_only_at_the_start_of_an_epoch(
    stopped: Folders,
    data: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    change: str,
    at_step: int,
    outcome: str | None,
) -> None:
    config = config_of(changed_data(data, tmp_path / "other", change))
    if outcome is not None:
        with pytest.raises(ValueError, match=outcome):
            start_run(config, stopped(at_step))
        return
    with caplog.at_level("INFO", logger="timm_parallel"):
        parts = start_run(config, stopped(at_step)).parts
    announced = [line for line in caplog.messages if line.startswith("resume: training data")]
    assert len(announced) == (change != "move")
    assert_trains_as(parts, reference(config, contents_of(stopped(at_step))))


@pytest.mark.slow(seconds=1)
def test_resume_with_fewer_images_trains_all_remaining_epochs_of_the_schedule(
    stopped: Folders, data: Path, tmp_path: Path
) -> None:
    """The run has trained 12 steps in 3 epochs of 4 steps. With fewer images an epoch has 2
    steps, so the whole schedule of 4 epochs has only 8 steps.
    """
    config = config_of(changed_data(data, tmp_path / "other", "remove"))
    folder = tmp_path / "run"
    shutil.copytree(stopped(12), folder)
    run = start_run(config, folder)
    with run.training() as training:
        train(training)
    result = read_result(folder)
    assert (result.status, result.steps, result.epochs) == ("done", 14, 4.0)
    lines = [line for line in read_lines(folder / "metrics.jsonl") if "lr" in line]
    assert [line["step"] for line in lines] == [13, 14] and lines[0]["lr"] > lines[1][
        "lr"
    ] > config.optim.min_lr


@pytest.mark.slow(seconds=3)
def test_resume_refuses_limits_that_are_reached_and_other_batches_in_an_epoch(
    stopped: Folders, data: Path
) -> None:
    # The checkpoint is at step 5, in the second epoch of 4 steps.
    for override, message in (
        ("train.epochs=1", "train.epochs=1 is reached: .*step 5"),
        ("train.max_steps=4", "train.max_steps=4 is reached: .*step 5"),
        ("data.batch_size=12", "mid-epoch"),
        ("seed=7", "mid-epoch"),
        ("data.limit_train=18", "mid-epoch"),
        ("train.accumulate=2", "mid-epoch"),
        ("data.balance=1", "mid-epoch"),
    ):
        with pytest.raises(ValueError, match=message):
            start_run(config_of(data, override, "resume_strict=false"), stopped(5))
    start_run(config_of(data, "data.batch_size=3", "train.accumulate=2"), stopped(5))
    assert start_run(config_of(data, "train.max_steps=5"), stopped(5)).parts.total_steps == 5


@pytest.mark.slow(seconds=1)
def test_resume_with_a_different_checkpoint_metric_resets_the_best_value(
    stopped: Folders, data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(stopped(4), folder)
    first = start_run(config_of(data), folder)
    for loss in (1.0, 0.9):
        values = {"loss": loss, "acc": 0.5}
        first.parts.progress.add_evaluation(values, "acc", Classification.metrics)
    save(first)
    same = start_run(config_of(data), folder).parts.progress
    assert (same.best, same.best_metric, same.evaluations_since_best) == (0.5, "acc", 1)
    config = config_of(data, "checkpoint.metric=val/loss", "train.early_stop=2")
    with caplog.at_level("INFO", logger="timm_parallel"):
        other = start_run(config, folder).parts.progress
    assert (other.best, other.evaluations_since_best, other.best_values["acc"]) == (None, 0, 0.5)
    assert sum("best.pt" in line for line in caplog.messages) == 1
    for loss, is_best in ((1.4, True), (1.3, True), (1.5, False)):
        values = {"loss": loss, "acc": 0.4}
        assert other.add_evaluation(values, "loss", Classification.metrics) == is_best


@pytest.mark.slow(seconds=6)
def test_train_py_resumes_and_records_allowed_changes_or_exits_2_without_changing_files(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job, "run_ranks", warm_ranks)
    monkeypatch.setattr(hardware, "visible_cuda_devices", lambda: ())
    for name in RANK_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    root, folder = tmp_path / "images", tmp_path / "run"
    shutil.copytree(data, root)

    def main(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
        return run_command(app)

    def records() -> dict[Path, bytes]:
        return {
            path: path.read_bytes()
            for path in folder.rglob("*")
            if path.suffix in (".yaml", ".pt", ".json")
        }

    overrides = (*SETTINGS, "model=tiny", f"data.root={root}", "parallel.threads_per_device=1")
    assert main(*overrides, f"hydra.run.dir={folder}", "train.max_steps=4") == 0
    before, more = records(), "train.max_steps=6"
    assert main(f"resume={folder}", "optim=sgd", more) == 2
    assert records() == before
    (root / "train" / "cat").rename(root / "train" / "aardvark")
    assert main(f"resume={folder}", more) == 2
    (root / "train" / "aardvark").rename(root / "train" / "cat")
    failures = [path for path in records() if path.name.startswith("failure_")]
    assert {path: text for path, text in records().items() if path not in failures} == before
    assert main(f"resume={folder}", more, "optim.layer_decay=0.5") == 0
    groups = contents_of(folder)["phases"]["train"]["optimizer"]["param_groups"]
    assert len({group["lr_scale"] for group in groups}) == 4
    words = ("train.max_steps=8", "optim=sgd", "optim.layer_decay=null", "resume_strict=false")
    assert main(f"resume={folder}", *words) == 0
    assert contents_of(folder)["phases"]["train"]["optimizer"]["kind"] == "SGD"
    log = (folder / "logs" / "rank_0.log").read_text()
    assert "AdamW -> SGD" in log
    for text in (log, (folder / "console.txt").read_text()):
        assert text.count("resume: optim.layer_decay: null -> 0.5") == 1
    result = read_result(folder)
    first, second, third = result.segments
    assert (result.steps, result.started) == (8, first["started"])
    assert [segment["first_step"] for segment in result.segments] == [0, 4, 6]
    assert all(segment["command"] and segment["devices"] == 1 for segment in result.segments)
    assert first["changed"] == {}
    assert second["changed"] == {"train.max_steps": [4, 6], "optim.layer_decay": [None, 0.5]}
    assert third["changed"]["train.max_steps"] == [6, 8]
    assert third["changed"]["optim.layer_decay"] == [0.5, None]
    header = [
        line for line in (folder / "config.yaml").read_text().splitlines() if line.startswith("#")
    ]
    assert [line.split(":")[0] for line in header[1:]] == ["# step 0", "# step 4", "# step 6"]
    record_end(load_config(folder), folder, "interrupted", "stopped")
    assert read_result(folder).segments == result.segments


VALUES: dict[str, tuple[Any, ...]] = {
    "seed": (7,),
    "resume_strict": (True, False),
    "model.ema.decay": (0.9,),
    "model.kwargs": (
        {"embed_dim": 16, "depth": 2, "num_heads": 2, "patch_size": 8, "drop_rate": 0.5},
        {"depth": 1},
    ),
    "data.batch_size": (3, 12),
    "data.limit_train": (18, 24),
    "data.augment.scale": ([0.5, 1.0],),
    "data.augment.hflip": (0.5,),
    "data.augment.mixup": (0.2,),
    "data.on_error": ("skip",),
    "optim.opt": ("momentum", "lamb", "lion", "rmsprop"),
    "optim.lr": (0.001, 0.1),
    "optim.weight_decay": (0.0, 0.5),
    "optim.momentum": (0.5, 0.0),
    "optim.layer_decay": (0.5, 1.0),
    "optim.head_lr_scale": (0.1, 5.0),
    "model.freeze": ("backbone", 1, "blocks"),
    "data.balance": (0.5, 1.0),
    "train.class_weights": ("auto", [1.0, 2.0, 3.0]),
    "optim.clip_grad": (0.1,),
    "optim.kwargs": ({"eps": 1e-3}, {"betas": [0.5, 0.6]}),
    "optim.lr_rule": ("linear", "sqrt"),
    "optim.lr_base_batch": (6, 64),
    "optim.sched": ("constant", "tanh", "poly", "step", "multistep", "wsd", "rsqrt"),
    "optim.sched_kwargs": ({"cycle_limit": 2},),
    "optim.warmup_epochs": (0.0, 2.0),
    "optim.warmup_lr": (0.005,),
    "optim.warmup_prefix": (False,),
    "optim.min_lr": (0.002,),
    "optim.cooldown_epochs": (1.0,),
    "optim.decay_epochs": (1.0,),
    "optim.decay_milestones": ([1.0, 2.0],),
    "optim.decay_rate": (0.5,),
    "optim.of": ({"train": {"lr": 0.05}},),
    "train.epochs": (3, 6),
    "train.precision": ("bf16",),
    "train.accumulate": (2,),
    "train.loss": ("bce",),
    "train.smoothing": (0.1,),
    "train.log_every": (2,),
    "train.early_stop": (2,),
    "checkpoint.metric": ("val/loss", "val/acc_ema"),
    "checkpoint.every_steps": (2,),
}
# Draw keys of the optimizer and of checkpoints more often, because a resume may change them. Most
# other keys end the random example early, because the resume is refused.
OFTEN = sorted(
    key for key in VALUES if key.startswith(("optim.", "checkpoint.")) and key != "optim.opt"
)
CHANGES = st.dictionaries(
    st.sampled_from([*sorted(VALUES), *OFTEN, *OFTEN, *OFTEN]), st.integers(0, 6), max_size=4
)
DATA = st.sampled_from(["none", "none", "none", "move", "move", "remove", "replace", "rename"])


@pytest.fixture(scope="module")
def roots(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("changed")
    return {"none": data} | {
        change: changed_data(data, base / change, change)
        for change in ("remove", "replace", "rename", "move")
    }


@pytest.mark.parametrize("examples", [12, pytest.param(300, marks=pytest.mark.nightly)])
def test_resume_with_random_config_and_data_changes_trains_as_recorded_or_is_refused(
    stopped: Folders, roots: dict[str, Path], tmp_path: Path, examples: int
) -> None:
    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=examples == 12,
        suppress_health_check=list(HealthCheck),
    )
    @given(at_step=st.sampled_from([4, 5]), changes=CHANGES, change=DATA)
    def check(at_step: int, changes: dict[str, int], change: str) -> None:
        folder, scratch = stopped(at_step), tmp_path / "run"
        config = config_of(roots["none"])
        config.data.root = str(roots[change])
        for key, index in changes.items():
            section, _, name = key.rpartition(".")
            place: Any = config
            for part in filter(None, section.split(".")):
                place = getattr(place, part)
            setattr(place, name, VALUES[key][index % len(VALUES[key])])
        shutil.rmtree(scratch, ignore_errors=True)
        shutil.copytree(folder, scratch)
        try:
            check_values(config)
            check_combination(config)
            check_resumable(config, scratch)
            run = start_run(config, scratch)
        except ValueError:
            event("refused")
            return
        event("trained")
        assert_trains_as(run.parts, reference(config, contents_of(folder)))
        before, now = (
            contents_of(folder)["config"],
            {key: value for key, value, _ in leaves(config)},
        )
        assert set(run.segments[-1]["changed"]) == {
            key
            for key in now
            if before[key] != now[key] and not key.startswith(("resume", "print_config"))
        }

    check()

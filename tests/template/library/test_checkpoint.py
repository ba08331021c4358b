"""Checkpoints are written atomically, and refused if they do not fit the run."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from src.tasks.classification import Classification
from tests.template.runs import parts_of, resolved
from timm_parallel.errors import UnknownFormatError
from timm_parallel.machine.ranks import Ranks
from timm_parallel.parallel.strategy import Single
from timm_parallel.record.result import CHECKPOINT_FORMAT
from timm_parallel.run import checkpoint, restoring
from timm_parallel.run.parts import RunParts
from timm_parallel.run.progress import Progress

Contents = dict[str, Any]


def run_of(*overrides: str, loss: str | None = None) -> RunParts:
    """Build a run, and train one step. `loss`: class of a loss."""
    config = resolved("parallel.accelerator=cpu", "model.ema.decay=0.9", *overrides)
    config.train.loss = loss or config.train.loss
    run = parts_of(config)
    phase = run.state.phases[0]
    losses, _ = phase.wrapped(next(run.train_loader.epoch(0)))
    losses.mean().backward()
    phase.optimizer.step()
    run.strategy.group.close()
    return run


def contents_of(run: RunParts, step: int = 1) -> Contents:
    run.state.progress = Progress(step=step, step_in_epoch=step, best_values={"acc": 0.25})
    made_by = {"strategy": "single", "devices": 1}
    return {
        **restoring.snapshot(run.state, run.strategy),
        "classes": run.dataset.target_names,
        "made_by": made_by,
    }


@pytest.fixture(scope="module")
def single() -> RunParts:
    return run_of("parallel=single")


@pytest.fixture(scope="module")
def contents(single: RunParts) -> Contents:
    return contents_of(single)


def save(folder: Path, contents: Contents, step: int, keep: int = 3, is_best: bool = False) -> Path:
    progress = {**contents["progress"], "step": step}
    checkpoint.save(folder, {**contents, "progress": progress}, step, keep, is_best)
    return folder / "last.pt"


def everything(folder: Path) -> dict[str, bytes]:
    """Return relative path -> contents of all files below a folder, also hidden ones."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


class Summing(Single):
    """Strategy that has a state to save in checkpoints."""

    total = torch.zeros(2)

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.total = state["total"]


def test_checkpoint_restore_ignores_strategy_state_that_another_strategy_saved(
    single: RunParts, tmp_path: Path
) -> None:
    before, after, other = (Summing(single.config.parallel, Ranks()) for _ in range(3))
    before.total = torch.tensor([1.0, 2.0])
    other.config = replace(single.config.parallel, strategy="src.parallel.other.Other")
    made_by = {"strategy": "single", "devices": 1}
    saved = {**restoring.snapshot(single.state, before), "classes": [], "made_by": made_by}
    contents = checkpoint.load(save(tmp_path, saved, 1))
    for strategy, expected in ((after, [1.0, 2.0]), (other, [0.0, 0.0])):
        restoring.restore(single.state, strategy, contents)
        assert strategy.total.tolist() == expected


def test_checkpoint_restore_starts_ema_from_model_weights_when_ema_is_missing(
    single: RunParts, contents: Contents
) -> None:
    """The EMA can be missing in a checkpoint with resume_strict=false. An EMA of random weights
    would need many steps to become useful.
    """
    other = run_of("parallel=single", "seed=8").state
    restoring.restore(other, single.strategy, {**contents, "averages": {}})
    assert other.ema is not None
    for name, tensor in other.ema.state_dict().items():
        assert torch.equal(tensor, contents["model"][name]), name


def test_checkpoint_save_keeps_last_best_and_newest_files_with_the_facts_of_each_in_json(
    contents: Contents, tmp_path: Path
) -> None:
    # Use steps whose numerical and alphabetical orders differ: 9 is before 100, but the text 100 is
    # before the text 9.
    for step in (5, 8, 9, 10, 100):
        save(tmp_path, contents, step, keep=2, is_best=step == 8)
        if step == 5:
            shutil.copy(tmp_path / "step_5.pt", tmp_path / "step_5_copy_of_the_user.pt")
    (tmp_path / "step_5_copy_of_the_user.pt").unlink()
    assert {path.stem for path in tmp_path.glob("*.json")} == {
        path.stem for path in tmp_path.glob("*.pt")
    }
    steps = {path.stem: checkpoint.load(path)["progress"]["step"] for path in tmp_path.glob("*.pt")}
    assert steps == {"last": 100, "best": 8, "step_10": 10, "step_100": 100}
    expected = {
        "step": 100,
        "best": {"acc": 0.25},
        "classes": 10,
        "parameters": sum(tensor.numel() for tensor in contents["model"].values()),
        "strategy": "single",
    }
    sidecar = json.loads((tmp_path / "last.json").read_text())
    assert {key: sidecar[key] for key in expected} == expected


def disk_full(*args: object, **kwargs: object) -> None:
    raise OSError(28, "No space left on device")


@contextlib.contextmanager
def failing_rename(number: int) -> Iterator[None]:
    """Let the rename with this number fail, counted from 0."""
    done: list[Any] = []
    replace = os.replace

    def rename(source: Any, target: Any) -> None:
        if len(done) == number:
            disk_full()
        done.append(target)
        replace(source, target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "replace", rename)
        yield


@pytest.mark.parametrize(("place", "call"), [(torch, "save"), (os, "fsync"), (Path, "mkdir")])
def test_checkpoint_save_leaves_all_files_unchanged_when_writing_fails(
    contents: Contents, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: Any, call: str
) -> None:
    save(tmp_path, contents, 1, keep=1, is_best=True)
    before = everything(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(place, call, disk_full)
        with pytest.raises(OSError, match=r"step_2\.pt: .*MiB free.*No space left") as refusal:
            save(tmp_path, contents, 2, keep=1, is_best=True)
    assert "\n" not in str(refusal.value)
    assert everything(tmp_path) == before, "expected unchanged files and no temporary file"


@pytest.mark.parametrize("undefined", [math.nan, None])
def test_undefined_metric_never_becomes_the_best_value_of_a_run(undefined: float | None) -> None:
    progress = Progress()
    losses = [undefined, 2.0, undefined, 1.0, 3.0]
    assert [
        progress.add_evaluation({"loss": loss, "acc": 0.5}, "loss", Classification.metrics)
        for loss in losses
    ] == [False, True, False, True, False]
    assert (progress.best, progress.evaluations_since_best) == (-1.0, 1)
    assert progress.best_values == {"loss": 1.0, "acc": 0.5}


@pytest.mark.slow(seconds=1)
def test_checkpoint_save_leaves_loadable_files_when_any_rename_fails(
    contents: Contents, tmp_path: Path
) -> None:
    """A save renames six files: step_2, last and best, each with .pt and .json. After the failure,
    the run continues from last.pt, so it may train step 2 again.
    """
    for failing in range(6):
        run = tmp_path / str(failing)
        folder = run / "checkpoints"
        run.mkdir()
        save(folder, contents, 1, keep=1, is_best=True)
        with failing_rename(failing), pytest.raises(OSError, match=r"step_2\.pt"):
            save(folder, contents, 2, keep=1, is_best=True)
        names = [path.name for path in folder.iterdir()]
        assert not [name for name in names if name.startswith(".") or "tmp" in name]
        last, best = (
            checkpoint.load(folder / f"{name}.pt")["progress"]["step"] for name in ("last", "best")
        )
        # The files of last are linked before those of best.
        assert (last, best) == (2 if failing > 2 else 1, 2 if failing > 4 else 1), failing
        assert (checkpoint.load_newest(run) or "")[0] == folder / "last.pt"
        if last == 1:
            save(folder, contents, 2, keep=1, is_best=True)
        save(folder, contents, 3, keep=1)
        assert checkpoint.load(folder / "last.pt")["progress"]["step"] == 3


def test_checkpoint_save_copies_files_when_hard_links_fail(
    contents: Contents, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "link", disk_full)
    path = save(tmp_path, contents, 4, is_best=True)
    assert (
        path.read_bytes()
        == (tmp_path / "best.pt").read_bytes()
        == (tmp_path / "step_4.pt").read_bytes()
    )
    assert path.stat().st_ino != (tmp_path / "step_4.pt").stat().st_ino


@pytest.mark.parametrize(
    ("foreign", "reason"),
    [
        ([1, 2], "not a checkpoint of this project"),
        ({"head.weight": torch.ones(2)}, "not a checkpoint of this project"),
        ({"format": "timm", "model": {}}, "not a checkpoint of this project"),
        ({"format": CHECKPOINT_FORMAT + 1, "model": {}}, f"expected {CHECKPOINT_FORMAT}"),
        ({"format": 1, "model": nn.Linear(2, 2)}, "more than tensors"),
    ],
    ids=["list", "weights of timm", "named format", "newer", "module"],
)
def test_checkpoint_load_refuses_a_file_of_another_format_in_one_line(
    tmp_path: Path, foreign: Any, reason: str
) -> None:
    path = tmp_path / "foreign.pt"
    torch.save(foreign, path)
    with pytest.raises(ValueError, match=reason) as refusal:
        checkpoint.load(path)
    assert str(refusal.value).startswith(f"{path}: ") and "\n" not in str(refusal.value)


@pytest.mark.parametrize("has_sidecar", [True, False])
def test_load_newest_checkpoint_refuses_an_unknown_format_and_uses_no_older_file(
    contents: Contents, tmp_path: Path, has_sidecar: bool
) -> None:
    folder = tmp_path / "checkpoints"
    save(folder, contents, 3)
    for sidecar in folder.glob("*.json"):
        sidecar.unlink()
    (folder / "last.pt").unlink()
    torch.save({**contents, "format": 1}, folder / "last.pt")
    if has_sidecar:
        # A file of another format need not be a file that torch can load.
        (folder / "last.json").write_text(json.dumps({"format": 1}))
        (folder / "last.pt").write_bytes(b"another kind of file")
    with pytest.raises(UnknownFormatError, match=r"last.pt.* 1, expected"):
        checkpoint.load_newest(tmp_path)


def test_load_newest_checkpoint_error_lists_all_files_when_all_are_damaged(
    contents: Contents, tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoints"
    assert checkpoint.load_newest(tmp_path) is None
    save(folder, contents, 1)
    for path in folder.glob("*.pt"):
        path.write_bytes(path.read_bytes()[:99])
    with pytest.raises(ValueError, match="damaged") as refusal:
        checkpoint.load_newest(tmp_path)
    assert all(str(folder / f"{name}.pt") in str(refusal.value) for name in ("last", "step_1"))
    assert "\n" not in str(refusal.value)


def test_checkpoint_restore_refuses_weights_of_a_different_model_or_weights_alone(
    single: RunParts, contents: Contents
) -> None:
    run = run_of("model.kwargs.embed_dim=24", "model.kwargs.num_heads=2")
    with pytest.raises(ValueError, match="by a different model") as refusal:
        restoring.restore(run.state, run.strategy, contents)
    assert "\n" not in str(refusal.value)
    with pytest.raises(ValueError, match="only weights, no averages, networks, phases, progress"):
        restoring.restore(
            replace(single.state), single.strategy, {"format": 3, "model": contents["model"]}
        )


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.get_buffer("calls").add_(1)
        return nn.functional.cross_entropy(outputs * self.scale, targets)


# Let a config refer to the class of this file by a name below src.
HERE = "src.checkpoint_of_test"
sys.modules[HERE] = sys.modules[__name__]


def as_format_2(contents: Contents) -> Contents:
    """Build what format 2 stored of a run: one optimizer, one average, and the tensors of the loss
    as those of a training step.
    """

    def renamed(name: str) -> str:
        return name.replace("loss.", "train_step.criterion.", 1) if name[:5] == "loss." else name

    phase, own = contents["phases"]["train"], contents["networks"]["loss"]
    optimizer = phase["optimizer"]
    new = ("networks", "averages", "phases")
    return {
        **{key: value for key, value in contents.items() if key not in new},
        "format": 2,
        "ema": contents["averages"]["ema"],
        "train_step": {f"criterion.{name}": tensor for name, tensor in own.items()},
        "scaler": phase["scaler"],
        "optimizer": {
            "kind": optimizer["kind"],
            "state": {renamed(name): state for name, state in optimizer["state"].items()},
            "param_groups": [
                {**group, "params": [renamed(name) for name in group["params"]]}
                for group in optimizer["param_groups"]
            ],
        },
    }


def tensors_after_a_step(contents: Contents) -> list[torch.Tensor]:
    run = run_of("parallel=single", "seed=8", loss=f"{HERE}.Scaled")
    phase = run.state.phases[0]
    phase.optimizer.zero_grad()
    restoring.restore(run.state, run.strategy, contents)
    losses, _ = phase.wrapped(next(run.train_loader.epoch(1)))
    losses.mean().backward()
    phase.optimizer.step()
    assert run.state.ema is not None
    return [*run.state.networks.state_dict().values(), *run.state.ema.state_dict().values()]


@pytest.mark.slow(seconds=1)
def test_checkpoint_of_format_2_continues_like_the_same_one_of_format_3(tmp_path: Path) -> None:
    contents = contents_of(run_of("parallel=single", loss=f"{HERE}.Scaled"))
    assert contents["networks"]["loss"].keys() == {"scale", "calls"}
    path = save(tmp_path, contents, 3)
    expected = tensors_after_a_step(checkpoint.load(path))
    for sidecar in tmp_path.glob("*.json"):
        sidecar.unlink()
    torch.save(as_format_2(checkpoint.load(path)), tmp_path / "old.pt")
    actual = tensors_after_a_step(checkpoint.load(tmp_path / "old.pt"))
    assert all(map(torch.equal, actual, expected)) and len(actual) == len(expected)


@pytest.mark.parametrize("part", ["model", "ema", "train_step"])
def test_checkpoint_of_format_2_with_weights_that_are_not_finite_is_refused(
    tmp_path: Path, part: str
) -> None:
    saved = {name: {"weight": torch.ones(2)} for name in ("model", "ema", "train_step")}
    saved[part]["weight"][0] = math.nan
    torch.save({"format": 2, **saved}, tmp_path / "old.pt")
    with pytest.raises(ValueError, match="weight has values that are not finite"):
        checkpoint.load(tmp_path / "old.pt")

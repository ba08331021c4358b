"""A checkpoint holds bare weights and plain values, replaces its forerunner in one go, and says no to what does not fit."""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from conftest import Finished, in_ranks, resolved
from torch import nn

import train as entry
from src.engine.machine import hardware
from src.engine.machine.ranks import NEEDED, Ranks
from src.parallel import build_strategy
from src.run.build import Run
from src.training import checkpoint
from src.training.state import Progress

Contents = dict[str, Any]
SETTINGS = ("parallel.accelerator=cpu", "model.ema.decay=0.9")


def run_of(*overrides: str, ranks: Ranks | None = None, store: Any = None) -> Run:
    """What a run is made of, after one step."""
    config, ranks = resolved(*SETTINGS, *overrides), ranks or Ranks()
    torch.manual_seed(0)
    strategy = build_strategy(config.parallel, ranks, store)
    run = Run(config, strategy)
    images, labels = next(run.train.epoch(0))
    run.state.wrapped(images, labels).backward()
    run.state.optimizer.step()
    strategy.close()
    return run


def contents_of(run: Run, step: int = 1) -> Contents:
    run.state.progress = Progress(step=step, step_in_epoch=step, best_acc=0.25)
    made_by = {"strategy": "single", "devices": 1}
    return checkpoint.snapshot(run.state, run.strategy, run.images.class_names, run.preprocessing, made_by)


@pytest.fixture(scope="module")
def single() -> Run:
    return run_of("parallel=single")


@pytest.fixture(scope="module")
def contents(single: Run) -> Contents:
    return contents_of(single)


def save(folder: Path, contents: Contents, step: int, keep: int = 3, is_best: bool = False) -> Path:
    return checkpoint.save(
        folder, {**contents, "progress": {**contents["progress"], "step": step}}, step, keep, is_best
    )


def everything(folder: Path) -> dict[str, bytes]:
    """The files of a folder, hidden ones too."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# What is in it -----------------------------------------------------------------------------------------------------


def ddp_names(ranks: Ranks, store: Any) -> dict[str, list[str]]:
    return names(contents_of(run_of("parallel=ddp", "parallel.devices=2", ranks=ranks, store=store)))


def names(contents: Contents) -> dict[str, list[str]]:
    return {part: list(contents[part]) for part in ("model", "ema")}


@pytest.mark.processes
def test_weights_have_the_names_of_plain_timm_under_every_strategy(contents: Contents) -> None:
    model = resolved().model
    plain = timm.create_model(model.name, num_classes=10, in_chans=1, img_size=32, **model.kwargs)
    expected = {key: list(plain.state_dict()) for key in ("model", "ema")}
    assert names(contents) == expected
    assert names(contents_of(run_of("parallel=dp", "parallel.devices=2"))) == expected
    assert in_ranks(ddp_names, 2) == [expected] * 2
    plain.load_state_dict(contents["model"])


def test_what_was_saved_comes_back_in_another_state(single: Run, contents: Contents, tmp_path: Path) -> None:
    path = save(tmp_path, contents, 7)
    other = run_of("parallel=single", "seed=8").state
    checkpoint.restore(other, single.strategy, checkpoint.load(path))
    assert other.progress == Progress(step=7, step_in_epoch=1, best_acc=0.25)
    for one, two in ((single.state.model, other.model), (single.state.ema, other.ema)):
        assert one is not None and two is not None
        for name, tensor in two.state_dict().items():
            assert torch.equal(one.state_dict()[name], tensor), name
    moments = [list(state.optimizer.state_dict()["state"].values()) for state in (single.state, other)]
    assert len(moments[0]) == len(list(other.model.parameters()))
    for one, two in zip(*moments, strict=True):
        assert all(torch.equal(torch.as_tensor(one[key]), torch.as_tensor(two[key])) for key in one)


def test_averaged_weights_that_are_new_begin_at_those_of_the_checkpoint(single: Run, contents: Contents) -> None:
    """With resume_strict=false: at the fresh ones of a model that was never trained, they would be of no use for long."""
    other = run_of("parallel=single", "seed=8").state
    checkpoint.restore(other, single.strategy, {**contents, "ema": None})
    assert other.ema is not None
    for name, tensor in other.ema.module.state_dict().items():
        assert torch.equal(tensor, contents["model"][name]), name


def test_the_json_beside_it_says_what_it_is(contents: Contents, tmp_path: Path) -> None:
    said = json.loads(save(tmp_path, contents, 7, is_best=True).with_suffix(".json").read_text())
    parameters = sum(tensor.numel() for tensor in contents["model"].values())
    expected = {"step": 7, "best_acc": 0.25, "classes": 10, "parameters": parameters, "strategy": "single"}
    assert {key: said[key] for key in expected} == expected
    assert all((tmp_path / f"{name}.json").is_file() for name in ("last", "best", "step_7"))


# Whole or not at all -----------------------------------------------------------------------------------------------


def test_keep_leaves_the_newest_and_best_outlives_them(contents: Contents, tmp_path: Path) -> None:
    for step in (5, 8, 9, 10, 100):  # 100 comes after 9, which text would not say
        save(tmp_path, contents, step, keep=2, is_best=step == 8)
    assert {path.name for path in tmp_path.glob("*.pt")} == {"last.pt", "best.pt", "step_10.pt", "step_100.pt"}
    assert {path.stem for path in tmp_path.glob("*.json")} == {path.stem for path in tmp_path.glob("*.pt")}
    steps = {path.stem: checkpoint.load(path)["progress"]["step"] for path in tmp_path.glob("*.pt")}
    assert steps == {"last": 100, "best": 8, "step_10": 10, "step_100": 100}


def full(*words: object, **options: object) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("call", ["torch.save", "os.replace", "os.fsync"])
def test_a_save_that_fails_at_once_leaves_all_as_it_was(
    contents: Contents, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    save(tmp_path, contents, 1, keep=1, is_best=True)
    before = everything(tmp_path)
    module, _, name = call.partition(".")
    with monkeypatch.context() as patch:
        patch.setattr({"torch": torch, "os": os}[module], name, full)
        with pytest.raises(OSError, match=r"step_2\.pt: could not be written .*MiB free.*No space left") as said:
            save(tmp_path, contents, 2, keep=1, is_best=True)
    assert "\n" not in str(said.value)
    assert everything(tmp_path) == before, "nor is a temporary file left"


def test_a_disk_without_room_for_the_folder_is_said_too(
    contents: Contents, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "mkdir", lambda *_, **__: full())
    with pytest.raises(OSError, match=r"step_1\.pt: could not be written .* MiB free: .*No space left"):
        save(tmp_path / "checkpoints", contents, 1)


def test_a_copy_that_somebody_keeps_there_is_left_alone(contents: Contents, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    save(folder, contents, 1)
    shutil.copy(folder / "step_1.pt", folder / "step_1_good.pt")
    save(folder, contents, 2, keep=1)
    assert sorted(path.name for path in folder.glob("*.pt")) == ["last.pt", "step_1_good.pt", "step_2.pt"]
    assert (checkpoint.load_newest(tmp_path) or "")[0] == folder / "last.pt"


def test_what_is_no_number_is_never_the_best() -> None:
    progress = Progress()
    losses = [float("nan"), 2.0, float("nan"), 1.0, 3.0]
    assert [progress.note_evaluation({"loss": loss, "acc": 0.5}, "loss") for loss in losses] == [
        False, True, False, True, False,
    ]  # fmt: skip
    assert (progress.best, progress.evaluations_since_best) == (-1.0, 1)


def test_a_save_that_fails_at_any_rename_leaves_good_ones_and_no_temporary(
    contents: Contents, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six renames: step_2, last and best, each with its .json."""
    really = os.replace
    for failing in range(6):
        run = tmp_path / str(failing)
        folder = run / "checkpoints"
        save(folder, contents, 1, keep=1, is_best=True)
        done: list[Any] = []

        def rename(source: Any, target: Any, done: list[Any] = done, failing: int = failing) -> None:
            if len(done) == failing:
                full()
            done.append(target)
            really(source, target)

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", rename)
            with pytest.raises(OSError, match="could not be written"):
                save(folder, contents, 2, keep=1, is_best=True)
        assert [path.name for path in folder.iterdir() if path.name.startswith(".") or "tmp" in path.name] == []
        found = {name: checkpoint.load(folder / f"{name}.pt")["progress"]["step"] for name in ("last", "best")}
        assert found == {"last": 2 if failing > 2 else 1, "best": 2 if failing > 4 else 1}
        assert (checkpoint.load_newest(run) or "")[0] == folder / "last.pt"
        save(folder, contents, 3, keep=1)
        assert checkpoint.load(folder / "last.pt")["progress"]["step"] == 3


def test_where_links_are_not_possible_copies_are_made(
    contents: Contents, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "link", full)
    path = save(tmp_path, contents, 4, is_best=True)
    assert path.read_bytes() == (tmp_path / "best.pt").read_bytes() == (tmp_path / "step_4.pt").read_bytes()
    assert path.stat().st_ino != (tmp_path / "step_4.pt").stat().st_ino


# What is no checkpoint of ours -------------------------------------------------------------------------------------


class Payload:
    """Unpickled, it makes a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = str(mark)

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (self.mark, "w")


FOREIGN: dict[str, tuple[Callable[[Contents], Any], str]] = {
    "a_list": (lambda contents: [1, 2], "not a checkpoint of this project"),
    "a_tensor": (lambda contents: torch.zeros(3), "not a checkpoint of this project"),
    "weights_of_timm": (lambda contents: contents["model"], "not a checkpoint of this project"),
    "of_lightning": (lambda contents: {"state_dict": contents["model"], "epoch": 1}, "not a checkpoint of this"),
    "a_named_format": (lambda contents: {**contents, "format": "timm"}, "not a checkpoint of this project"),
    "no_format": (lambda contents: {**contents, "format": None}, "not a checkpoint of this project"),
    "newer": (lambda contents: {**contents, "format": checkpoint.FORMAT + 1}, "newer than this code reads"),
    "a_module": (lambda contents: {**contents, "format": 1, "model": nn.Linear(2, 2)}, "more than tensors"),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_what_is_no_checkpoint_of_this_project_is_refused_in_a_line(
    contents: Contents, tmp_path: Path, name: str
) -> None:
    make, said = FOREIGN[name]
    path = tmp_path / f"{name}.pt"
    torch.save(make(contents), path)
    with pytest.raises(ValueError, match=said) as refusal:
        checkpoint.load(path)
    assert str(refusal.value).startswith(f"{path}: ") and "\n" not in str(refusal.value)


def test_a_checkpoint_that_would_run_code_runs_none_and_nobody_is_told_to_let_it(
    contents: Contents, tmp_path: Path
) -> None:
    path, mark = tmp_path / "last.pt", tmp_path / "mark"
    torch.save({**contents, "format": 1, "classes": Payload(mark)}, path)
    with pytest.raises(ValueError, match="more than tensors and plain values") as refusal:
        checkpoint.load(path)
    assert "weights_only" not in str(refusal.value)
    assert not mark.exists()
    torch.load(path, weights_only=False)["classes"].close()
    assert mark.exists(), "the payload works"


def test_a_run_with_damaged_checkpoints_only_names_each(contents: Contents, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    assert checkpoint.load_newest(tmp_path) is None
    save(folder, contents, 1)
    for path in folder.glob("*.pt"):
        path.write_bytes(path.read_bytes()[:99])
    with pytest.raises(ValueError, match="damaged") as refusal:
        checkpoint.load_newest(tmp_path)
    assert all(str(folder / f"{name}.pt") in str(refusal.value) for name in ("last", "step_1"))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("model=tiny", "model.kwargs.embed_dim=24", "another model"),
        ("optim=adamw", "optim=sgd", "another optimizer"),
        ("optim=sgd", "optim=adamw", "another optimizer"),
        ("optim.opt=adamw", "optim.opt=lamb", "another optimizer"),
    ],
)
def test_a_checkpoint_of_something_else_is_not_put_into_it(before: str, after: str, said: str) -> None:
    kwargs = ("model.kwargs.num_heads=2",) if "embed_dim" in after else ()
    run, contents = run_of(after, *kwargs), contents_of(run_of(before))
    with pytest.raises(ValueError, match=f"the checkpoint is of {said}") as refusal:
        checkpoint.restore(run.state, run.strategy, contents)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(("before", "after"), [("optim.sched=none", "optim.sched=cosine"), ("optim=sgd", "optim=sgd")])
def test_the_same_optimizer_goes_on(before: str, after: str) -> None:
    sgd = ("optim=sgd",) if "sgd" in before else ()
    run = run_of(after, *sgd)
    checkpoint.restore(run.state, run.strategy, contents_of(run_of(before, *sgd)))
    assert run.state.progress.step == 1


def test_weights_alone_are_not_gone_on_from(single: Run, contents: Contents) -> None:
    with pytest.raises(ValueError, match="only weights, no ema, optimizer, progress, scaler"):
        checkpoint.restore(replace(single.state), single.strategy, {"format": 1, "model": contents["model"]})


# resume= -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def resume(
    finished_run: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, list[str]]]:
    """`resume(*words)` on a copy of a finished run, up to where ranks would start: (code, line, who was started)."""
    folder = tmp_path / "run"
    shutil.copytree(finished_run.folder, folder)
    for name in NEEDED:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(hardware, "visible_cuda_devices", lambda: ())
    started: list[str] = []
    monkeypatch.setattr("src.engine.launch.job.run_job", lambda config, folder: started.append(str(folder)) or 0)

    def run(*words: str) -> tuple[int, str, list[str]]:
        before = everything(folder)
        monkeypatch.setattr(sys, "argv", ["train.py", f"resume={folder}", *words])
        code = entry.main()
        out, err = capfd.readouterr()
        if code == 2:
            assert out == "" and len(err.splitlines()) == 1, err
            assert everything(folder) == before, "a refused command changes nothing"
        logging.shutdown()
        return code, err, started

    return run


@pytest.mark.processes
@pytest.mark.parametrize("words", [(), ("parallel=ddp", "parallel.devices=2"), ("train.epochs=1",)])
def test_a_finished_run_says_so_and_keeps_its_result(resume: Any, words: tuple[str, ...]) -> None:
    """Gone on with, it would train no step, and leave a result without its throughput."""
    code, said, started = resume(*words)
    assert (code, started) == (2, [])
    assert "this run is done" in said and "train.epochs" in said


@pytest.mark.processes
def test_a_finished_run_can_be_made_longer(resume: Any) -> None:
    code, said, started = resume("train.epochs=3")
    assert code == 0 and len(started) == 1, said
    assert "resume: train.epochs: 2 -> 3" in said


@pytest.mark.processes
@pytest.mark.parametrize(
    ("words", "key"),
    [
        (("train.accumulate=2",), "train.accumulate=2"),  # steps inside an epoch would count other images
        (("optim=sgd",), "optim.opt="),
        (("model.kwargs.depth=3",), "model.kwargs"),
        (("data.batch_size=64",), "data.batch_size=64"),
    ],
)
def test_another_training_is_refused_by_key_unless_told_otherwise(
    resume: Any, words: tuple[str, ...], key: str
) -> None:
    code, said, started = resume("train.epochs=3", *words)
    assert (code, started) == (2, [])
    assert said.startswith(f"train.py: {key}") and "resume_strict=false" in said
    code, said, started = resume("train.epochs=3", *words, "resume_strict=false")
    assert code == 0 and len(started) == 1, said

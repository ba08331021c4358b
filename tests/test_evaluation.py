"""Every evaluation image counts exactly once, on any number of ranks, and a checkpoint gives its numbers again."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT, Finished, in_ranks, plain, resolved
from torch import Tensor, nn
from torch.nn import functional

import evaluate as entry
from src.data.datasets import InMemory
from src.data.feed import DeviceFeed
from src.data.loader import Loader, Reader
from src.data.sampling import EvaluationRequests
from src.engine.config.compose import freeze
from src.engine.config.evaluation import evaluation_config
from src.engine.machine.ranks import Ranks
from src.parallel import build_strategy
from src.parallel.single import Single
from src.run.evaluate import evaluate_config
from src.schema import ParallelConfig
from src.training import metrics


def test_a_run_of_a_cluster_is_evaluated_on_this_machine(tmp_path: Path) -> None:
    there = ("cluster=slurm", "cluster.submit=false", "cluster.gpus=1", "cluster.nodes=2", "parallel=ddp")
    freeze(resolved(*there), tmp_path)
    parallel = evaluation_config(tmp_path, [], None).parallel
    assert (parallel.strategy, parallel.devices) == ("single", 1)
    assert parallel.accelerator == resolved("parallel=single").parallel.accelerator
    assert (
        evaluation_config(tmp_path, ["parallel=ddp", "parallel.backend=gloo"], Ranks(0, 2, 0, 2)).parallel.devices == 2
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["parallel.devices=2"], "parallel.devices=2: single uses one device"),
        (["parallel=ddp", "parallel.dim=1"], "parallel.dim=1: an option of dp"),
        (["data.batch_size=8", "data.batch_size_per_device=4"], "set one"),
        (["data.mean=[0.5]"], "data.mean and data.std: set both or neither"),
    ],
)
def test_keys_that_do_not_go_together_are_refused_of_a_run_as_of_a_model(
    tmp_path: Path, words: list[str], said: str
) -> None:
    freeze(resolved("parallel=single"), tmp_path)
    for run, model_of in ((tmp_path, []), (None, ["model.weights=" + __file__])):
        with pytest.raises(ValueError, match=said):
            evaluation_config(run, [*model_of, *words], None)


def test_a_compiled_run_is_evaluated_where_nothing_can_be_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("src.engine.config.resolve.shutil.which", lambda name: name)
    freeze(resolved("parallel=ddp", "parallel.devices=2", "model.compile=true"), tmp_path)
    monkeypatch.setattr("src.engine.config.resolve.shutil.which", lambda name: None)
    assert not evaluation_config(tmp_path, [], None).model.compile
    assert evaluation_config(tmp_path, ["parallel=dp", "parallel.devices=2"], None).parallel.strategy == "dp"


SPLITS = ((37, 7), (10, 6), (2, 4), (1, 6))  # (samples, classes): indivisible by 2 and 3, fewer than ranks, one


def split(num_samples: int, num_classes: int) -> InMemory:
    generator = torch.Generator().manual_seed(num_samples)
    images = torch.randint(0, 256, (num_samples, 1, 4, 4), dtype=torch.uint8, generator=generator)
    return InMemory(images, torch.randint(0, num_classes, (num_samples,), generator=generator))


def model(num_classes: int) -> nn.Module:
    """Its BatchNorm in training mode would make every number depend on the batch."""
    torch.manual_seed(3)
    made = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(16), nn.Linear(16, num_classes))
    made(torch.randn(50, 1, 4, 4))
    return made


def measured(ranks: Ranks, store: Any, kind: str, devices: int) -> list[dict[str, Any]]:
    config = ParallelConfig(strategy=kind, devices=devices, accelerator="cpu", threads_per_device=1, backend="gloo")
    strategy = build_strategy(config, ranks, store)
    found = []
    for num_samples, num_classes in SPLITS:
        data = split(num_samples, num_classes)
        requests = EvaluationRequests(len(data), 6, strategy.rank, strategy.world_size)
        feed = DeviceFeed(torch.device("cpu"), plain(1, 4, 0.5, 0.25), channels_last=False)
        evaluation = metrics.evaluate(
            strategy.for_evaluation(model(num_classes), None),
            Loader(Reader(data, num_classes, None, 0), requests, feed, 0),
            strategy=strategy,
            num_samples=num_samples,
            num_classes=num_classes,
        )
        found.append({**evaluation.numbers(), **evaluation.details(), "confusion": evaluation.confusion.tolist()})
    strategy.close()
    return found


def outputs(num_samples: int, num_classes: int) -> tuple[Tensor, Tensor]:
    """(logits, labels) of the whole split in one piece."""
    data = split(num_samples, num_classes)
    with torch.no_grad():
        return model(num_classes).eval()((data.images / 255 - 0.5) / 0.25), data.labels


@pytest.fixture(scope="module")
def alone() -> list[dict[str, Any]]:
    return measured(Ranks(), None, "single", 1)


@pytest.mark.parametrize(("case", "size"), list(enumerate(SPLITS)))
def test_numbers_are_those_of_a_plain_loop(alone: list[dict[str, Any]], case: int, size: tuple[int, int]) -> None:
    found, (logits, labels) = alone[case], outputs(*size)
    hits = logits.argmax(1) == labels
    assert (found["samples"], found["correct"]) == (size[0], int(hits.sum()))
    assert found["acc"] == pytest.approx(hits.double().mean().item())
    assert found["loss"] == pytest.approx(functional.cross_entropy(logits, labels).item(), rel=1e-6)
    for label, accuracy in enumerate(found["acc_per_class"]):
        own = hits[labels == label]
        assert accuracy == (pytest.approx(own.double().mean().item()) if len(own) else None)
    for label in range(size[1]):
        assert (
            found["confusion"][label] == torch.bincount(logits.argmax(1)[labels == label], minlength=size[1]).tolist()
        )


@pytest.mark.parametrize(("case", "size"), list(enumerate(SPLITS)))
def test_top_5_is_given_only_where_it_says_something(
    alone: list[dict[str, Any]], case: int, size: tuple[int, int]
) -> None:
    logits, labels = outputs(*size)
    if size[1] <= 5:
        assert alone[case]["acc5"] is None
    else:
        within = sum(int(label in row.topk(5).indices) for row, label in zip(logits, labels, strict=True))
        assert alone[case]["acc5"] == pytest.approx(within / size[0])


def test_a_head_with_more_scores_than_the_data_has_classes_answers_among_these() -> None:
    """`model.num_classes` may be larger: neither the first answer nor the first five are outside the data's classes."""
    strategy = build_strategy(
        ParallelConfig(strategy="single", devices=1, accelerator="cpu", threads_per_device=1), Ranks(), None
    )

    class Larger(nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            return torch.cat([images.flatten(1), torch.full((len(images), 5), 9.0)], 1)

    labels = torch.arange(7)
    found = metrics.evaluate(
        Larger(), [(torch.eye(7).view(7, 1, 7, 1), labels)], strategy=strategy, num_samples=7, num_classes=7
    )
    assert found is not None and (found.acc, found.acc5) == (1.0, 1.0)


@pytest.mark.parametrize("fault", ["in the data", "in evaluating"])
def test_an_evaluation_that_fails_leaves_no_loader_and_no_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """Loader workers ignore SIGTERM, so the interpreter would wait for them at its end."""
    closed: list[str] = []
    monkeypatch.setattr(Loader, "close", lambda loader: closed.append("loader"))
    monkeypatch.setattr(Single, "close", lambda strategy: closed.append("strategy"))
    if fault == "in evaluating":
        monkeypatch.setattr("src.run.evaluate.evaluate", lambda *_, **__: 1 / 0)
    config = resolved("parallel=single", "parallel.accelerator=cpu", "model=tiny")
    config.model.weights = str(tmp_path)  # so that the head is taken as it is
    monkeypatch.setattr("src.models.build.load_weights", lambda *_: None)
    split = "val" if fault == "in evaluating" else "other"
    with pytest.raises((ZeroDivisionError, ValueError)):
        next(evaluate_config(config, None, split, None, Ranks(), None))
    assert closed == ["loader", "loader", "strategy"]


@pytest.mark.processes
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_any_number_of_ranks_counts_alike(alone: list[dict[str, Any]], world_size: int) -> None:
    for found in in_ranks(measured, world_size, "ddp", world_size):
        check_equal(found, alone)


@pytest.mark.parametrize("devices", [2, 3])
def test_replicas_over_threads_count_alike(alone: list[dict[str, Any]], devices: int) -> None:
    check_equal(measured(Ranks(), None, "dp", devices), alone)


def check_equal(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.pop("loss") == pytest.approx(theirs["loss"], rel=1e-6)
        assert ours == {key: value for key, value in theirs.items() if key != "loss"}


def test_a_sample_that_is_missed_or_counted_twice_is_noticed() -> None:
    strategy = build_strategy(
        ParallelConfig(strategy="single", devices=1, accelerator="cpu", threads_per_device=1), Ranks(), None
    )
    batch = (torch.zeros(3, 1, 4, 4), torch.zeros(3, dtype=torch.long))
    for num_samples in (2, 4):
        with pytest.raises(AssertionError, match=f"3 samples evaluated and 0 skipped of {num_samples}"):
            metrics.evaluate(model(2), [batch], strategy=strategy, num_samples=num_samples, num_classes=2)


@pytest.mark.processes
def test_evaluate_py_gives_the_best_numbers_again(finished_run: Finished) -> None:
    done = subprocess.run(
        [sys.executable, "evaluate.py", f"run={finished_run.folder}"],
        cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = {line["split"]: line for line in map(json.loads, done.stdout.splitlines())}
    result = finished_run.result
    assert found["val"]["acc"] == result["val"]["acc_best"]
    assert found["val"]["samples"] == 270
    for key in ("correct", "samples", "acc", "acc5", "acc_per_class"):
        assert found["test"][key] == result["test"][key], key
    assert found["test"]["loss"] == pytest.approx(result["test"]["loss"], rel=1e-6)


@pytest.mark.processes
def test_the_last_checkpoint_gives_the_last_numbers(finished_run: Finished, capsys: pytest.CaptureFixture[str]) -> None:
    assert entry.main([f"run={finished_run.folder}", "split=val", "checkpoint=last"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["correct"] == finished_run.result["val"]["correct"]
    assert found["loss"] == pytest.approx(finished_run.result["val"]["loss"], rel=1e-6)


def damaged(folder: Path) -> str:
    for path in (folder / "checkpoints").iterdir():
        path.write_bytes(path.read_bytes()[:1000])
    return "best.pt"


def emptied(folder: Path) -> str:
    shutil.rmtree(folder / "checkpoints")
    return "checkpoint"


def of_another_model(folder: Path) -> str:
    config = folder / "config.yaml"
    config.write_text(config.read_text().replace("embed_dim: 48", "embed_dim: 96"))
    return "another model"


@pytest.mark.processes
@pytest.mark.parametrize("spoil", [damaged, emptied, of_another_model])
def test_a_bad_checkpoint_is_refused_in_one_line(
    finished_run: Finished, tmp_path: Path, capfd: pytest.CaptureFixture[str], spoil: Any
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(finished_run.folder, folder)
    reason = spoil(folder)
    assert entry.main([f"run={folder}"]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1, err
    assert reason in err and err.startswith("evaluate.py: ")


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ([], "run=<run folder>"),
        (["model.name=resnet18"], "model.pretrained=true or model.weights"),
        (["model.name=resnet18", "checkpoint=best"], "give run=<run folder> too"),
        (["model.name=resnet18", "model.pretrained=true", "optim.lr=1"], "optim.lr=1: has no part in an evaluation"),
        (["run=/nowhere", "model.name=resnet18"], "model.name=resnet18: has no part in an evaluation"),
        (["run=/nowhere", "data.rot=/x"], "did you mean data.root"),
        (["run=/nowhere"], "/nowhere"),
        (["run=/nowhere", "splt=val"], "did you mean split"),
        (["run=/nowhere", "split=train"], "split: invalid choice: 'train'"),
    ],
)
def test_bad_words_are_refused_in_one_line(words: list[str], reason: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert entry.main(words) == 2
    err = capfd.readouterr().err
    assert reason in err and len(err.splitlines()) == 1


@pytest.mark.processes
def test_a_run_is_evaluated_in_other_batches(finished_run: Finished, capsys: pytest.CaptureFixture[str]) -> None:
    assert entry.main([f"run={finished_run.folder}", "split=test", "data.batch_size=7"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["correct"] == finished_run.result["test"]["correct"]
    assert found["loss"] == pytest.approx(finished_run.result["test"]["loss"], rel=1e-6)


@pytest.mark.processes
def test_a_model_is_evaluated_without_a_run(finished_run: Finished, capsys: pytest.CaptureFixture[str]) -> None:
    """timm's habit: a model by its name, and weights. The run's own, so that the numbers are known."""
    weights = finished_run.folder / finished_run.result["checkpoint"]
    assert entry.main(["model=tiny", f"model.weights={weights}", "data=digits", "split=test"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["correct"] == finished_run.result["test"]["correct"]
    assert (found["model"], found["world_size"]) == (finished_run.result["model"], 1)


@pytest.mark.processes
@pytest.mark.parametrize("classes", [10, 3])
def test_other_classes_are_refused(finished_run: Finished, capfd: pytest.CaptureFixture[str], classes: int) -> None:
    """Labels would mean something else, whether or not their number is the same."""
    words = ["data=synthetic", "data.kwargs.in_chans=1", f"data.kwargs.num_classes={classes}"]
    assert entry.main([f"run={finished_run.folder}", *words]) == 2
    assert "are not the 10 that" in capfd.readouterr().err


def test_a_head_for_other_classes_is_refused() -> None:
    from src.run.evaluate import _check_head
    from src.schema import Config, ModelConfig

    model = nn.Linear(2, 2)
    model.pretrained_cfg = {"num_classes": 1000}  # type: ignore[assignment]
    _check_head(Config(), model, 1000)
    _check_head(Config(model=ModelConfig(weights="mine.pt")), model, 10)
    with pytest.raises(ValueError, match=r"1000 classes, the data has 10"):
        _check_head(Config(), model, 10)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("strategy", ["ddp", "dp"])
def test_every_world_size_counts_the_same(
    finished_run: Finished, capfd: pytest.CaptureFixture[str], strategy: str
) -> None:
    words = [f"run={finished_run.folder}", f"parallel={strategy}", "parallel.devices=2"]
    if strategy == "ddp":  # the command starts itself again, as ranks
        command = [sys.executable, "evaluate.py", *words]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        said = done.stdout
    else:
        assert entry.main(words) == 0
        said = capfd.readouterr().out
    found = {line["split"]: line for line in map(json.loads, said.splitlines())}
    assert found["test"]["world_size"] == 2
    for key in ("correct", "samples", "acc_per_class"):
        assert found["test"][key] == finished_run.result["test"][key], key


@pytest.mark.slow
@pytest.mark.processes
def test_a_table_has_a_row_per_combination(
    finished_run: Finished, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert entry.main(["-m", f"run={finished_run.folder},{tmp_path}", "split=test"]) == 1, "one row failed"
    head, good, bad = capfd.readouterr().out.splitlines()
    assert head.split() == ["split", "acc", "acc5", "loss", "samples"]
    assert good.startswith(f"run={finished_run.folder} ") and f"{finished_run.result['test']['acc']:.4f}" in good
    assert bad.startswith(f"run={tmp_path} ") and "no config.yaml" in bad

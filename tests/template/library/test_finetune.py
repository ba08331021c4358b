"""Tests of training and evaluation with the weights of an earlier run."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import evaluate as entry
from src.train.run import train
from tests.template.runs import draw_images, parts_of, resolved, start_run
from timm_parallel.faults.failure import failure_text, first_failure
from timm_parallel.launch.job import prepare
from timm_parallel.machine.ranks import Ranks
from timm_parallel.record.result import read_result
from timm_parallel.state.parts import RunParts
from timm_parallel.testing.ranks import in_ranks, train_warm, warm_ranks

CLASSES = ("circle", "square", "star")
OTHER_CLASSES = ("cross", "flower", "star")
SMALL = (
    "data=folder",
    "data.image_size=16",
    "data.batch_size=6",
    "data.limit_train=null",
    "data.augment.scale=null",
    "data.workers=0",
    "train.epochs=1",
    "parallel=single",
    "parallel.accelerator=cpu",
)


def images(
    root: Path, classes: tuple[str, ...], splits: tuple[str, ...] = ("train", "val", "test")
) -> Path:
    """Write six images of each class into each split, and return the root folder."""
    return draw_images(root, *(f"{split}/{name}" for split in splits for name in classes), count=6)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return images(tmp_path_factory.mktemp("data") / "shapes", CLASSES)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    """Train a run with averaged weights, which its checkpoint.metric evaluates."""
    overrides = (
        f"data.root={data}",
        "model.ema.decay=0.5",
        "checkpoint.metric=val/acc_ema",
        "optim.lr=1e-2",
    )
    return train_warm(resolved(*SMALL, *overrides), tmp_path_factory.mktemp("trained"))


def best(run: Path) -> Path:
    return run / "checkpoints" / "best.pt"


def contents(path: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = torch.load(path, weights_only=True)
    return loaded


def is_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(tensor, other[name]) for name, tensor in one.items()
    )


def fine_tuned(folder: Path, *overrides: str) -> tuple[int, str]:
    """Train a run in forked ranks, and return (exit code, output with the failure)."""
    config = resolved(*SMALL, *overrides)
    prepare(config, folder)
    ended = warm_ranks(config, folder)
    failure = failure_text(first_failure(folder, ended)) if ended.exit_codes else ""
    return ended.exit_codes.get(0, 0), (folder / "console.txt").read_text() + failure


def evaluated(capfd: pytest.CaptureFixture[str], *overrides: str) -> tuple[int, str, str]:
    """Run main of evaluate.py with given overrides, and return (exit code, stdout, stderr)."""
    capfd.readouterr()
    code = entry.main(list(overrides))
    return code, *capfd.readouterr()


def of_file(trained: Path, data: Path, *overrides: str) -> tuple[str, ...]:
    """Return arguments of evaluate.py for the best weights file of a run."""
    return (
        "model=tiny",
        f"model.weights={best(trained)}",
        "data=folder",
        f"data.root={data}",
        "data.workers=0",
        *overrides,
    )


def run_of(data: Path, weights: Path, *overrides: str) -> RunParts:
    config = resolved(*SMALL, f"data.root={data}", f"model.weights={weights}", *overrides)
    return parts_of(config)


def test_fine_tuning_keeps_loaded_head_when_classes_are_the_same(trained: Path, data: Path) -> None:
    assert is_equal(
        run_of(data, best(trained)).state.model.state_dict(),
        contents(best(trained))["averages"]["ema"],
    )


@pytest.mark.slow(seconds=1)
def test_fine_tuning_reinitializes_head_when_class_names_differ(
    trained: Path, tmp_path: Path
) -> None:
    root = images(tmp_path / "other", OTHER_CLASSES)
    code, message = fine_tuned(
        tmp_path / "run", f"model.weights={best(trained)}", f"data.root={root}", "optim.lr=1e-9"
    )
    assert code == 0, message
    (line,) = (line for line in message.splitlines() if "weights  " in line)
    for name in ("head.weight", "head.bias", "circle, square", "cross, flower"):
        assert name in line
    before, after = (
        contents(best(trained))["averages"]["ema"],
        contents(best(tmp_path / "run"))["model"],
    )
    for name, tensor in before.items():
        assert torch.allclose(tensor, after[name], atol=1e-6) == (not name.startswith("head.")), (
            name
        )


@pytest.mark.parametrize(("metric", "kind"), [("val/acc", "model"), ("val/loss_ema", "ema")])
def test_fine_tuning_loads_ema_weights_only_when_checkpoint_metric_is_computed_with_ema(
    trained: Path, data: Path, tmp_path: Path, metric: str, kind: str
) -> None:
    saved = contents(best(trained))
    weights = {"model": saved["model"], **saved["averages"]}
    assert not is_equal(weights["model"], weights["ema"])
    assert saved["made_by"]["metric"] == "val/acc_ema"
    saved["made_by"]["metric"] = metric
    torch.save(saved, tmp_path / "other.pt")
    assert is_equal(run_of(data, tmp_path / "other.pt").state.model.state_dict(), weights[kind])


def test_evaluation_of_a_weights_file_matches_metrics_of_the_run_that_saved_the_file(
    trained: Path, data: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code, out, err = evaluated(capfd, *of_file(trained, data, "data.image_size=16", "split=test"))
    assert code == 0, err
    assert json.loads(out)["loss"] == pytest.approx(read_result(trained).test["loss_ema"], rel=1e-6)
    assert "weights  " in err and "averaged" in err


def test_evaluation_refuses_weights_file_when_a_tensor_would_stay_random(
    trained: Path, data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code, out, err = evaluated(capfd, *of_file(trained, data, "data.image_size=32"))
    assert (code, out) == (2, "") and "pos_embed" in err and len(err.splitlines()) == 1
    bare = contents(best(trained))["model"]
    del bare["head.bias"]
    torch.save(bare, tmp_path / "bare.pt")
    overrides = of_file(
        trained, data, "data.image_size=16", f"model.weights={tmp_path / 'bare.pt'}"
    )
    code, out, err = evaluated(
        capfd, *(word for word in overrides if word != f"model.weights={best(trained)}")
    )
    assert (code, out) == (2, "") and "head.bias" in err


@pytest.mark.parametrize("classes", [OTHER_CLASSES, (*CLASSES, "tree")], ids=["names", "number"])
def test_evaluation_refuses_weights_file_when_classes_differ(
    trained: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], classes: tuple[str, ...]
) -> None:
    root = images(tmp_path / "other", classes)
    code, out, err = evaluated(capfd, *of_file(trained, root, "data.image_size=16"))
    assert (code, out) == (2, "")
    for name in set(CLASSES) ^ set(classes):
        assert name in err


@pytest.mark.parametrize(("split", "asked"), [("test", "test"), ("val", "all")])
def test_evaluation_of_a_run_on_an_image_folder_needs_no_train_split(
    trained: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], split: str, asked: str
) -> None:
    """The folder has fewer classes than the run. If labels were numbered by the class folders, they
    would not fit the outputs of the model.
    """
    root = images(tmp_path / "alone", CLASSES[1:], (split,))
    code, out, err = evaluated(capfd, f"run={trained}", f"data.root={root}", f"split={asked}")
    assert code == 0, err
    for line in map(json.loads, out.splitlines()):
        assert (line["split"], line["samples"]) == (split, 12)
        assert line["acc_per_class"][0] is None and None not in line["acc_per_class"][1:]


def test_evaluation_error_names_missing_split_folder(
    trained: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    root = images(tmp_path / "alone", CLASSES, ("val",))
    code, out, err = evaluated(capfd, f"run={trained}", f"data.root={root}", "split=test")
    assert (
        (code, out) == (2, "")
        and str(root / "test") in err
        and "train" not in err.replace(str(trained), "")
    )


def test_evaluation_error_names_class_folders_that_the_trained_run_lacks(
    trained: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    root = images(tmp_path / "other", OTHER_CLASSES, ("val",))
    code, out, err = evaluated(capfd, f"run={trained}", f"data.root={root}")
    assert (code, out) == (2, "")
    assert "2 of the 3 classes" in err and "cross, flower" in err and "circle, square, star" in err


def read_by(ranks: Ranks, store: Any, root: str, *overrides: str) -> list[str]:
    """Return the files that this rank reads in two epochs, as texts `<class>/<number>.png`."""
    config = resolved(*SMALL, f"data.root={root}", *overrides)
    parts = parts_of(config, ranks, store)
    train = parts.train_loader
    actual: list[str] = []
    train.fetcher.split.__class__.__getitem__ = recorded(actual)  # type: ignore[method-assign]
    for epoch in range(2):
        for _ in train.epoch(epoch):
            pass
    train.close()
    parts.strategy.close()
    return actual


def recorded(actual: list[str]) -> Any:
    def get(files: Any, index: int) -> tuple[Tensor, int]:
        path, label = files.files[index]
        actual.append(f"{path.parent.name}/{path.name}")
        return torch.zeros(3, 16, 16, dtype=torch.uint8), label

    return get


@pytest.mark.slow(seconds=2)
def test_limit_train_selects_same_images_for_any_seed_and_world_size(data: Path) -> None:
    limit = ("data.limit_train=12",)
    (alone,) = in_ranks(read_by, 1, str(data), *limit)
    assert len(alone) == 24 and len(set(alone)) == 12
    assert {name.partition("/")[0] for name in alone} == set(CLASSES)
    (other_seed,) = in_ranks(read_by, 1, str(data), *limit, "seed=7")
    assert set(other_seed) == set(alone)
    (repeated,) = in_ranks(read_by, 1, str(data), *limit, "data.augment.aug_repeats=2")
    assert set(repeated) <= set(alone) and len(repeated) == 24
    halves = in_ranks(read_by, 2, str(data), *limit, "parallel=ddp", "parallel.devices=2")
    assert sorted(halves[0] + halves[1]) == sorted(alone)


def test_error_gives_image_indices_within_the_whole_split_when_limit_train_is_set(
    data: Path, tmp_path: Path
) -> None:
    run = start_run(resolved(*SMALL, f"data.root={data}", "data.limit_train=12"), tmp_path)
    files: Any = run.parts.dataset.train
    with run.training() as training:
        message = training._describe_step(1)
        train(training)
    numbers = [int(number) for number in re.findall(r"\d+", message.partition("…")[0])]
    wanted = [files.files[number] for number in numbers]
    labels = next(run.parts.train_loader.epoch(0)).target.tolist()
    assert [label for _, label in wanted] == labels
    assert max(numbers) >= 12, "expected indices in the whole split, not among the twelve images"

"""Tests of training with the weights of an earlier run, and with frozen parameters."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

import evaluate as entry
from src.train.optim import build_optimizer, build_schedule
from tests.template.runs import draw_images, parts_of, resolved, task_of
from timm_parallel.machine.ranks import Ranks
from timm_parallel.model.freeze import check_statistics_move, freeze, frozen_modules, write_counts
from timm_parallel.parallel.networks import Networks, PhaseStep
from timm_parallel.record.result import read_result
from timm_parallel.run.parts import RunParts
from timm_parallel.testing.ranks import in_ranks, train_warm

CLASSES = ("circle", "square", "star")
OTHER_CLASSES = ("cross", "flower", "star")
MORE_CLASSES = (*CLASSES, "tree")
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


def evaluated(capfd: pytest.CaptureFixture[str], *overrides: str) -> tuple[int, str, str]:
    capfd.readouterr()
    code = entry.main(list(overrides))
    return code, *capfd.readouterr()


def of_file(weights: Path, data: Path, *overrides: str) -> tuple[str, ...]:
    folder = ("data=folder", f"data.root={data}", "data.workers=0")
    return ("model=tiny", f"model.weights={weights}", *folder, *overrides)


def run_of(data: Path, weights: Path, *overrides: str) -> RunParts:
    config = resolved(*SMALL, f"data.root={data}", f"model.weights={weights}", *overrides)
    return parts_of(config)


def test_fine_tuning_reinitializes_head_when_class_names_differ(
    trained: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="src"):
        parts = run_of(images(tmp_path / "other", OTHER_CLASSES), best(trained))
    (line,) = (line for line in caplog.messages if line.startswith("weights  "))
    for name in ("head.weight", "head.bias", "circle, square", "cross, flower"):
        assert name in line
    after = parts.state.model.state_dict()
    for name, tensor in contents(best(trained))["averages"]["ema"].items():
        assert torch.equal(tensor, after[name]) == (not name.startswith("head.")), name


@pytest.mark.parametrize(("metric", "kind"), [("val/acc", "model"), ("val/loss_ema", "ema")])
def test_fine_tuning_loads_all_ema_weights_only_when_checkpoint_metric_is_computed_with_ema(
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
    code, out, err = evaluated(
        capfd, *of_file(best(trained), data, "data.image_size=16", "split=test")
    )
    assert code == 0, err
    assert json.loads(out)["loss"] == pytest.approx(read_result(trained).test["loss_ema"], rel=1e-6)
    assert "weights  " in err and "averaged" in err


def test_evaluation_refuses_a_weights_file_if_a_tensor_would_stay_random_or_classes_differ(
    trained: Path, data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    bare = contents(best(trained))["model"]
    del bare["head.bias"]
    torch.save(bare, tmp_path / "bare.pt")
    named, more = (
        images(tmp_path / str(len(classes)), classes) for classes in (OTHER_CLASSES, MORE_CLASSES)
    )
    for weights, root, size, words in (
        (best(trained), data, 32, {"pos_embed"}),
        (tmp_path / "bare.pt", data, 16, {"head.bias"}),
        (best(trained), named, 16, set(CLASSES) ^ set(OTHER_CLASSES)),
        (best(trained), more, 16, set(CLASSES) ^ set(MORE_CLASSES)),
    ):
        code, out, err = evaluated(capfd, *of_file(weights, root, f"data.image_size={size}"))
        assert (code, out, len(err.splitlines())) == (2, "", 1)
        assert all(word in err for word in words)


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


def test_evaluation_error_names_missing_split_folder_or_classes_that_the_run_lacks(
    trained: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    root = images(tmp_path / "other", OTHER_CLASSES, ("val",))
    code, out, err = evaluated(capfd, f"run={trained}", f"data.root={root}", "split=test")
    assert (code, out) == (2, "") and str(root / "test") in err
    assert "train" not in err.replace(str(trained), "")
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
    parts.strategy.group.close()
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


FROZEN = (
    "model=resnet18",
    "data.image_size=16",
    "model.freeze=backbone",
    "data.limit_train=48",
    "data.batch_size=12",
    "train.epochs=1",
    "train.evaluate_every=0",
    "optim.lr=1e-2",
    "optim.warmup_epochs=0",
    "parallel.accelerator=cpu",
    "parallel.threads_per_device=1",
)


@pytest.mark.parametrize(
    ("which", "trained"),
    [
        ("backbone", {"fc"}),
        (1, {"layer1", "layer2", "layer3", "layer4", "fc"}),
        (4, {"layer4", "fc"}),
        (r"conv1|bn1|layer[12]\.", {"layer3", "layer4", "fc"}),
        (None, {"conv1", "bn1", "layer1", "layer2", "layer3", "layer4", "fc"}),
    ],
)
def test_freeze_leaves_only_expected_resnet18_layers_trainable(
    which: int | str | None, trained: set[str]
) -> None:
    model = timm.create_model("resnet18", num_classes=4)
    names = list(model.state_dict())
    freeze(model, which)
    moving = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert {name.partition(".")[0] for name in moving} == trained
    assert list(model.state_dict()) == names


@pytest.mark.parametrize(
    ("name", "which", "reason"),
    [
        ("test_resnet", 99, r"model\.freeze=99: .* groups"),
        ("test_resnet", "blocks", r"model\.freeze=blocks: .*layer1"),
        ("test_resnet", ".*", r"model\.freeze=\.\*: freezes every parameter"),
        (None, 2, r"model\.freeze=2: .*group_matcher"),
    ],
)
def test_model_freeze_refuses_an_invalid_number_of_groups_or_pattern(
    name: str | None, which: int | str, reason: str
) -> None:
    model: Any = (
        nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) if name is None else timm.create_model(name)
    )
    with pytest.raises(ValueError, match=reason):
        freeze(model, which)


def test_train_step_keeps_frozen_modules_in_evaluation_mode() -> None:
    model = timm.create_model("resnet18", num_classes=4)
    freeze(model, 2)
    networks = Networks({"model": model})
    step = PhaseStep(task_of(4), networks, "train", frozen_modules(networks)).train()
    modes = {name: module.training for name, module in model.named_modules()}
    assert not any(modes[name] for name in ("bn1", "layer1", "layer1.0.bn1"))
    assert all(modes[name] for name in ("", "layer2", "layer2.0.bn1", "fc"))
    assert {id(module) for module in step.frozen} == {
        id(model.conv1),
        id(model.bn1),
        id(model.layer1),
    }
    assert step.training


@pytest.mark.parametrize(
    ("moves", "is_refused"),
    [((), False), (("0.weight", "1.running_mean"), False), (("0.weight",), True)],
)
def test_teacher_that_moves_without_its_batchnorm_statistics_is_refused(
    moves: tuple[str, ...], is_refused: bool
) -> None:
    teacher = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).requires_grad_(False)
    networks = Networks({"model": nn.Linear(2, 2), "teacher": teacher})
    frozen = frozen_modules(networks)
    before = write_counts(frozen)
    for name in moves:
        networks["teacher"].state_dict()[name].lerp_(torch.ones(()), 0.1)
    with pytest.raises(ValueError, match="BatchNorm") if is_refused else nullcontext():
        check_statistics_move(before, write_counts(frozen))


@pytest.mark.slow(seconds=1)
def test_head_lr_scale_multiplies_head_learning_rate_at_every_step() -> None:
    config = resolved(
        "optim.head_lr_scale=10", "optim.lr=1e-3", "optim.layer_decay=0.5", "parallel=single"
    )
    model = timm.create_model("resnet18", num_classes=4)
    optimizer = build_optimizer(config.optim, 1e-3, {"model": model})
    schedule = build_schedule(config.optim, config.train, optimizer, steps_per_epoch=5)
    head = {id(parameter) for parameter in model.get_submodule("fc").parameters()}
    other_config = resolved("optim.layer_decay=0.5", "optim.lr=1e-3").optim
    plain = build_optimizer(other_config, 1e-3, {"model": model})
    other = build_schedule(config.optim, config.train, plain, steps_per_epoch=5)
    for step in (0, 7, 20):
        schedule.step_update(step)
        other.step_update(step)
        rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
        before = {id(p): group["lr"] for group in plain.param_groups for p in group["params"]}
        assert rates.keys() == before.keys()
        for key, rate in rates.items():
            assert rate == pytest.approx(before[key] * (10 if key in head else 1))


@pytest.mark.processes
@pytest.mark.slow(seconds=4)
@pytest.mark.parametrize(
    "strategy",
    ["single", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("ddp", "dp"))],
)
def test_frozen_backbone_trains_the_head_alone_until_a_resume_with_freeze_null(
    tmp_path: Path, strategy: str
) -> None:
    words = (
        *FROZEN,
        f"parallel={strategy}",
        f"parallel.devices={1 if strategy == 'single' else 2}",
    )
    saved = contents(best(train_warm(resolved(*words), tmp_path)).with_name("last.pt"))
    groups = saved["phases"]["train"]["optimizer"]["param_groups"]
    assert {name for group in groups for name in group["params"]} == {"fc.weight", "fc.bias"}
    torch.manual_seed(42)
    fresh = timm.create_model("resnet18", num_classes=10, in_chans=1).state_dict()
    assert list(saved["model"]) == list(fresh)
    for name, tensor in saved["model"].items():
        assert torch.equal(tensor, fresh[name]) == (not name.startswith("fc")), name
    train_warm(resolved(*words, "model.freeze=null", "train.epochs=2"), tmp_path)
    trained = contents(tmp_path / "checkpoints" / "last.pt")["model"]
    for name, tensor in saved["model"].items():
        assert not (name.endswith("conv1.weight") and torch.equal(trained[name], tensor)), name

"""Tests of model.freeze and optim.head_lr_scale, which select the trained parameters and their
learning rate equally under every strategy.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

from src.train.optim import build_optimizer, build_schedule
from tests.template.runs import resolved, task_of
from timm_parallel.model.freeze import check_statistics_move, freeze, frozen_modules, write_counts
from timm_parallel.parallel.networks import Networks, PhaseStep
from timm_parallel.testing.ranks import train_warm

SMALL = (
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


def trainable(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


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
    assert {name.partition(".")[0] for name in trainable(model)} == trained
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


def with_teacher() -> Networks:
    """Build a model and a frozen teacher, which a task may move after the student."""
    teacher = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).requires_grad_(False)
    return Networks({"model": nn.Linear(2, 2), "teacher": teacher})


@pytest.mark.parametrize(
    ("moves", "is_refused"),
    [((), False), (("0.weight", "1.running_mean"), False), (("0.weight",), True)],
)
def test_teacher_that_moves_without_its_batchnorm_statistics_is_refused(
    moves: tuple[str, ...], is_refused: bool
) -> None:
    networks = with_teacher()
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


def weights(folder: Path) -> dict[str, Tensor]:
    model: dict[str, Tensor] = torch.load(folder / "checkpoints" / "last.pt", weights_only=True)[
        "model"
    ]
    return model


@pytest.fixture(scope="module")
def frozen_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_warm(resolved(*SMALL, "parallel=single"), tmp_path_factory.mktemp("single"))


@pytest.mark.processes
@pytest.mark.parametrize("strategy", ["ddp", "dp"])
@pytest.mark.nightly
@pytest.mark.slow(seconds=5)
def test_frozen_backbone_gives_same_head_under_every_strategy(
    strategy: str, frozen_run: Path, tmp_path: Path
) -> None:
    config = resolved(*SMALL, f"parallel={strategy}", "parallel.devices=2")
    state, reference = weights(train_warm(config, tmp_path)), weights(frozen_run)
    torch.manual_seed(config.seed)
    fresh = timm.create_model("resnet18", num_classes=10, in_chans=1).state_dict()
    assert list(state) == list(reference) == list(fresh)
    for name, tensor in state.items():
        if name.startswith("fc"):
            assert not torch.equal(tensor, fresh[name]), name
            torch.testing.assert_close(tensor, reference[name], rtol=1e-5, atol=1e-6)
        else:
            assert torch.equal(tensor, fresh[name]), name


@pytest.mark.nightly
@pytest.mark.slow(seconds=8)
@pytest.mark.processes
def test_resume_with_freeze_null_trains_the_previously_frozen_backbone(tmp_path: Path) -> None:
    words = (*SMALL, "parallel=ddp", "parallel.devices=2")
    train_warm(resolved(*words), tmp_path)
    frozen = weights(tmp_path)
    saved = torch.load(tmp_path / "checkpoints" / "last.pt", weights_only=True)
    groups = saved["phases"]["train"]["optimizer"]["param_groups"]
    names = {name for group in groups for name in group["params"]}
    assert names == {name for name in frozen if name.startswith("fc")}
    train_warm(resolved(*words, "model.freeze=null", "train.epochs=2"), tmp_path)
    trained = weights(tmp_path)
    assert not any(
        torch.equal(trained[name], frozen[name]) for name in frozen if name.endswith("conv1.weight")
    )

"""timm optimizers update the weights, and timm schedules match their formulas."""

from __future__ import annotations

import math
import re
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import timm.optim
import torch
from torch import nn

from src.app import app
from src.schema import NESTEROV, Config, OptimConfig, TrainConfig
from src.train.optim import build_learning, build_optimizer, build_schedule
from tests.template.runs import resolved
from timm_parallel import Metric, Task
from timm_parallel.config.suggest import timm_optimizers

# Optimizers of Apex and bitsandbytes need CUDA and more packages. Compiling kron, kronc or kronw
# takes 20 s.
LEFT_OUT = ("bnb", "fused", "adahessian", "kron")


@pytest.mark.parametrize(
    "opt", sorted(opt for opt in timm_optimizers() if not opt.startswith(LEFT_OUT))
)
def test_every_timm_optimizer_updates_all_weights_within_two_steps(opt: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4))
    optimizer = build_optimizer(OptimConfig(opt=opt), 1e-3, {"model": model})
    before = [parameter.detach().clone() for parameter in model.parameters()]
    # Run two steps, because some optimizers do not change the weights in the first step.
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(4, 3, 8, 8)).square().mean().backward()
        optimizer.step()
    assert all(
        not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True)
    )


@pytest.mark.parametrize("opt", ["bnbadamw", "fusedadamw"])
def test_apex_and_bitsandbytes_optimizers_are_refused_when_there_is_no_cuda(opt: str) -> None:
    if torch.cuda.is_available():
        pytest.skip("Apex or bitsandbytes may work here")
    with pytest.raises(ValueError, match=rf"optim\.opt={opt}: CUDA required"):
        build_optimizer(resolved(f"optim.opt={opt}").optim, 1e-3, {"model": nn.Linear(2, 2)})


@pytest.mark.parametrize("opt", sorted({"momentum", "sgdp", "lars", "rmsprop", *NESTEROV}))
def test_momentum_0_is_refused_only_for_optimizers_that_reject_momentum_0(opt: str) -> None:
    config = OptimConfig(opt=opt, momentum=0)
    early = list(config.problems(Config()))
    assert [line.partition(":")[0] for line in early] == (
        ["optim.momentum=0"] if opt in NESTEROV else []
    )
    if early:
        # The error must not blame optim.kwargs, which is empty.
        with pytest.raises(ValueError, match=rf"optim: {opt} ") as error:
            build_optimizer(config, 1e-3, {"model": nn.Linear(2, 2)})
        assert "kwargs" not in str(error.value)
    else:
        build_optimizer(config, 1e-3, {"model": nn.Linear(2, 2)})
    assert (
        list(OptimConfig(opt=opt, momentum=0, kwargs={"nesterov": False}).problems(Config())) == []
    )


def test_rsqrt_schedule_without_warmup_is_refused_unless_the_time_scale_is_given() -> None:
    config = OptimConfig(sched="rsqrt", warmup_epochs=0)
    assert [line.partition(":")[0] for line in config.problems(Config())] == [
        "optim.warmup_epochs=0"
    ]
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1.0)
    with pytest.raises(ValueError, match="optim: rsqrt ") as error:
        build_schedule(config, TrainConfig(), optimizer, 10)
    assert "kwargs" not in str(error.value)
    config.sched_kwargs = {"stable_timescale": 2}
    assert list(config.problems(Config())) == []
    build_schedule(config, TrainConfig(), optimizer, 10)


def test_optimizer_gives_norms_and_biases_no_weight_decay() -> None:
    for model in (timm.create_model("test_resnet"), timm.create_model("test_vit")):
        optimizer = build_optimizer(
            resolved("optim.weight_decay=0.1").optim, 1e-3, {"model": model}
        )
        decay = {
            id(p): group["weight_decay"]
            for group in optimizer.param_groups
            for p in group["params"]
        }
        excluded: set[str] = getattr(model, "no_weight_decay", set)()
        for name, parameter in model.named_parameters():
            # Skip embeddings and tokens, because a fork may exclude them from weight decay too.
            if "embed" not in name and "token" not in name:
                decays = parameter.ndim > 1 and name not in excluded
                assert decay[id(parameter)] == (0.1 if decays else 0.0), name


def rates(steps_per_epoch: int = 10, **keys: Any) -> list[float]:
    """Return the learning rate of every step of a 10-epoch training."""
    config = OptimConfig(lr=1.0, warmup_epochs=2, warmup_lr=0.1, **keys)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = build_schedule(config, TrainConfig(epochs=10), optimizer, steps_per_epoch)
    assert schedule is not None
    actual = []
    for step in range(1, 10 * steps_per_epoch + 1):
        actual.append(optimizer.param_groups[0]["lr"])
        schedule.step_update(step)
    return [*actual, optimizer.param_groups[0]["lr"]]


@pytest.mark.parametrize("decay_epochs", [0.7, 2.5])
@pytest.mark.parametrize("sched", ["wsd", "rsqrt"])
def test_decay_epochs_of_wsd_and_rsqrt_schedules_set_the_length_of_the_final_decay(
    sched: str, decay_epochs: float
) -> None:
    """The rate warms up for 20 steps, is constant or falls, and decays at the end."""
    actual = rates(sched=sched, decay_epochs=decay_epochs, cooldown_epochs=1)
    decay_starts = 90 - 10 * decay_epochs
    for step in range(20, 101):
        stable = 1.0 if sched == "wsd" else (1 + (step - 20) / 20) ** -0.5
        share = min(1.0, max(0.0, step - decay_starts) / (10 * decay_epochs))
        left = 1 - math.sqrt(share) if sched == "wsd" else 1 - share
        assert actual[step] == pytest.approx(stable * left, abs=1e-6), f"step {step}"


@pytest.mark.parametrize("sched", ["cosine", "tanh", "poly", "wsd", "rsqrt", "constant"])
def test_learning_rate_by_epoch_does_not_depend_on_steps_per_epoch(sched: str) -> None:
    few, many = (rates(steps, sched=sched) for steps in (10, 40))
    assert few == pytest.approx(many[::4], abs=0.02)


class Signs(torch.optim.Optimizer):
    """Optimizer of a fork."""

    works_on_parts = True

    def __init__(self, params: Any, lr: float, weight_decay: float, momentum: float) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})


# Module name under which configs find this file, because they may name only classes of src/.
HERE = "src.optim_of_test"
sys.modules[HERE] = sys.modules[__name__]


def test_custom_optimizer_gets_parameter_groups_and_settings_of_timm() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    config = OptimConfig(opt=f"{HERE}.Signs", momentum=0.3, weight_decay=0.2)
    optimizer = build_optimizer(config, 0.1, {"model": model})
    assert type(optimizer) is Signs
    groups = [
        {name: group[name] for name in ("lr", "weight_decay", "momentum")}
        for group in optimizer.param_groups
    ]
    assert groups == [{"lr": 0.1, "weight_decay": decay, "momentum": 0.3} for decay in (0.0, 0.2)]


def test_wrong_class_or_argument_of_a_custom_optimizer_is_refused() -> None:
    networks, kwargs = {"model": nn.Linear(2, 2)}, {"gamma": 1}
    with pytest.raises(ValueError, match=r"^optim\.kwargs=\{'gamma': 1\}: "):
        build_optimizer(OptimConfig(opt=f"{HERE}.Signs", kwargs=kwargs), 0.1, networks)
    with pytest.raises(ValueError, match=rf"^optim\.opt={HERE}\.InPhases: "):
        build_optimizer(OptimConfig(opt=f"{HERE}.InPhases"), 0.1, networks)


class InPhases(Task[Any]):
    """Task of a fork with two phases and a loss of its own."""

    phases = {"model": ("model",), "critic": ("critic",)}
    metrics = {"loss": Metric()}


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (("+optim.of={generator: {lr: 1}}",), "optim.of.generator"),
        (("+optim.of={critic: {rate: 1}}",), "optim.of.critic.rate=1"),
        (("train.loss=bce",), "train.loss=bce"),
    ],
)
def test_key_that_does_not_fit_the_phases_or_loss_of_a_task_is_refused(
    words: tuple[str, ...], key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(app.tasks, "phases", f"{__name__}.InPhases")
    with pytest.raises(ValueError, match=rf"^{re.escape(key)}\b"):
        resolved("train.task=phases", *words)


def test_keys_of_a_phase_change_its_optimizer_alone() -> None:
    config = resolved("optim.lr=0.1")
    config.optim.of = {"critic": {"opt": "sgd", "lr": 0.02}}
    strategy: Any = SimpleNamespace(shards=False, device=torch.device("cpu"))
    built = {
        phase: build_learning(config, strategy, 5, phase, {phase: nn.Linear(2, 2)}).optimizer
        for phase in ("model", "critic")
    }
    of_phase = {name: (type(of).__name__, of.param_groups[0]["lr"]) for name, of in built.items()}
    assert of_phase == {"model": ("AdamW", 0.1), "critic": ("SGD", 0.02)}

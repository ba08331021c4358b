"""Tests of an optimizer step. Its mean is that of all its batches on all ranks, each phase trains
its own networks, and a loop of a project cannot leave out a part of a step.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from src.schema import ResolvedConfig
from src.tasks.classification import Classification
from timm_parallel.batch import Batch
from timm_parallel.machine.ranks import Ranks
from timm_parallel.measure.metric_window import MetricWindow
from timm_parallel.runtime.run import Training
from timm_parallel.runtime.step import Step
from timm_parallel.state import checkpoint
from timm_parallel.state.parts import RunParts
from timm_parallel.task_rules import check_task
from timm_parallel.testing.configs import read_lines, resolved
from timm_parallel.testing.ranks import in_ranks
from timm_parallel.testing.runs import parts_of, start_run, train_run

# Let configs refer to the classes of this file by a name below src, because a config may name only
# classes of src/.
HERE = "src.steps_of_test"
sys.modules[HERE] = sys.modules[__name__]
SETTINGS = (
    "parallel.accelerator=cpu",
    "data.batch_size=24",
    "data.limit_train=48",
    "train.log_every=1",
    "optim=sgd",
    "optim.momentum=0",
    "optim.weight_decay=0",
    "optim.lr=0.1",
)
HALVED = ("data.batch_size=12", "train.accumulate=2")
SPREADS: dict[str, tuple[int, tuple[str, ...]]] = {
    "single": (1, ("parallel=single",)),
    "accumulated": (1, ("parallel=single", *HALVED)),
    "dp2": (1, ("parallel=dp", "parallel.devices=2")),
    "ddp2": (2, ("parallel=ddp", "parallel.devices=2")),
    "ddp3_accumulated": (3, ("parallel=ddp", "parallel.devices=3", *HALVED)),
    "fsdp2_accumulated": (2, ("parallel=fsdp", "parallel.devices=2", *HALVED)),
}


def config_of(task: str | None, *overrides: str) -> ResolvedConfig:
    """Build the config of a run. `task`: name of a class of this file; None: classification."""
    config = resolved(*SETTINGS, *overrides)
    if task is not None:
        config.train.task = f"{HERE}.{task}"
    return config


def first_step(parts: RunParts) -> Step:
    batches = parts.train_loader.epoch(0)
    step = Step(parts, batches, MetricWindow(parts.strategy.device), is_logged=True)
    step.seed()
    for phase in parts.state.phases:
        phase.wrapped.train()
    return step


def difference(actual: list[float], expected: Tensor) -> float:
    """Return the norm of a difference, relative to the norm of the expected values."""
    return float((torch.tensor(actual) - expected).norm() / expected.norm())


# Tests of the mean over a step.
# --------------------------------------------------------------------------------------------------


class Mean(Classification):
    """Task whose loss is a mean, as most losses of other people are."""

    def losses(self, networks: Any, batch: Batch, phase: str) -> tuple[Tensor, dict[str, Tensor]]:
        outputs = networks.model(batch.image)
        return functional.cross_entropy(outputs, batch.target.to(outputs.device)), {}


class Weighted(Classification):
    """Task whose samples count as often as their label says, so digits 0 do not count."""

    def weight(self, batch: Batch) -> Tensor:
        return batch.target.sum()

    def losses(self, networks: Any, batch: Batch, phase: str) -> tuple[Tensor, dict[str, Tensor]]:
        labels = batch.target
        losses = functional.cross_entropy(networks.model(batch.image), labels, reduction="none")
        return losses * labels, {}


class Noised(Classification):
    """Task whose loss draws random numbers for each sample."""

    def losses(self, networks: Any, batch: Batch, phase: str) -> tuple[Tensor, dict[str, Tensor]]:
        noisy = networks.model(batch.image + 0.1 * batch.normal(*batch.image.shape[1:]))
        return (noisy - batch.normal(noisy.shape[1])).square().mean(1), {}


def step_of(
    ranks: Ranks, store: Any, task: str, words: tuple[str, ...]
) -> tuple[float, list[float]]:
    """Return the loss and the gradients of the first step."""
    parts = parts_of(config_of(task, *words), ranks, store)
    step = first_step(parts)
    for batch in step.batches():
        step.backward(batch)
    gradients = [
        parts.strategy.whole(p.grad) for p in parts.state.parameters() if p.grad is not None
    ]
    numbers = step.update()
    parts.strategy.close()
    loss = numbers["train/loss"]
    assert loss is not None
    return loss, torch.cat([gradient.flatten() for gradient in gradients]).tolist()


def plain_step(task: str) -> tuple[float, Tensor]:
    """Compute the loss and the gradients of the first step with one batch in plain torch."""
    parts = parts_of(config_of(task, "parallel=single"))
    batch = next(parts.train_loader.epoch(0))
    parts.state.networks.train()
    losses, _ = parts.task.losses(parts.state.networks, batch, "train")
    loss = losses if losses.ndim == 0 else losses.sum() / parts.task.weight(batch)
    gradients = torch.autograd.grad(loss, [*parts.state.model.parameters()])
    return loss.item(), torch.cat([gradient.flatten() for gradient in gradients])


@pytest.mark.processes
@pytest.mark.slow(seconds=3)
@pytest.mark.sample(6)
@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("task", ["Mean", "Weighted", "Noised"])
def test_step_has_the_gradients_of_its_whole_batch_on_any_devices(task: str, spread: str) -> None:
    world_size, words = SPREADS[spread]
    loss, gradients = plain_step(task)
    for of_rank, of_all in in_ranks(step_of, world_size, task, words):
        assert of_rank == pytest.approx(loss, rel=1e-5)
        assert difference(of_all, gradients) < 1e-5


class Short(Classification):
    def losses(self, networks: Any, batch: Batch, phase: str) -> tuple[Tensor, dict[str, Tensor]]:
        return networks.model(batch.image).mean(1)[:-1], {}


class Matrix(Classification):
    def losses(self, networks: Any, batch: Batch, phase: str) -> tuple[Tensor, dict[str, Tensor]]:
        return networks.model(batch.image), {}


@pytest.mark.parametrize(("task", "shape"), [("Short", r"\[23\]"), ("Matrix", r"\[24, 10\]")])
def test_losses_of_a_wrong_shape_are_refused(task: str, shape: str) -> None:
    parts = parts_of(config_of(task, "parallel=single"))
    with pytest.raises(ValueError, match=rf"^train\.task: .* {shape} .* 24"):
        first_step(parts).train()


# Tests of phases and networks.
# --------------------------------------------------------------------------------------------------


class Critic(Classification):
    """Task with two networks, each of which has its phase."""

    phases = {"main": ("model",), "critic": ("critic",)}

    def networks(self, model: nn.Module) -> dict[str, nn.Module]:
        return {"model": model, "critic": nn.Linear(self.num_outputs, 1)}

    def losses(self, networks: Any, batch: Batch, phase: str) -> tuple[Tensor, dict[str, Tensor]]:
        outputs = networks.model(batch.image)
        rated = networks.critic(outputs)[:, 0]
        if phase == "main":
            return -rated, {"rated": rated.detach()}
        return (rated - batch.target).square(), {}


def parameters_with_gradients(parts: RunParts) -> set[str]:
    names = {name for name, p in parts.state.named_parameters() if p.grad is not None}
    return {"critic" if name.startswith("critic.") else "model" for name in names}


def test_each_phase_trains_only_its_networks_with_its_learning_rate() -> None:
    config = config_of("Critic", "parallel=single", *HALVED)
    config.optim.of = {"critic": {"lr": 0.25}}
    parts = parts_of(config)
    step = first_step(parts)
    losses: dict[str, float] = {}
    before = {name: p.detach().clone() for name, p in parts.state.named_parameters()}
    for phase, network in (("main", "model"), ("critic", "critic")):
        losses[phase] = 0.0
        for batch in step.batches():
            losses[phase] += step.backward(batch, phase).item() / 2
        assert parameters_with_gradients(parts) == {network}
        numbers = step.update(phase)
        assert bool(numbers) == step.is_done == (phase == "critic")
    changed = {
        name.startswith("critic.")
        for name, p in parts.state.named_parameters()
        if not torch.equal(p, before[name])
    }
    assert changed == {True, False}
    assert (numbers["lr_main"], numbers["lr_critic"]) == (0.1, 0.25)
    for phase, loss in losses.items():
        assert numbers[f"train/loss_{phase}"] == pytest.approx(loss)
        assert (numbers[f"train/grad_norm_{phase}"] or 0) > 0
    assert numbers["train/loss"] == pytest.approx(sum(losses.values()))
    assert numbers["train/rated"] == pytest.approx(-losses["main"])


class InTwo(Critic):
    phases = {"main": ("model", "critic"), "critic": ("critic",)}


class InNone(Critic):
    phases = {"main": ("model",)}


class Unknown(Critic):
    phases = {"main": ("model",), "critic": ("judge",)}


class OfUnknown(Critic):
    averages = {"teacher": ("judge", 0.9)}


class NoModel(Critic):
    def networks(self, model: nn.Module) -> dict[str, nn.Module]:
        return {"critic": model}


class Holding(Classification):
    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.queue = torch.zeros(4)


class Hiding(Classification):
    def networks(self, model: nn.Module) -> dict[str, nn.Module]:
        return {"model": model, "keys": nn.Linear(1, 1)}


@pytest.mark.parametrize(
    ("task", "reason"),
    [
        ("InTwo", r"critic\.weight .* critic, main"),
        ("InNone", r"no phase trains critic\.weight"),
        ("Unknown", "no network judge"),
        ("OfUnknown", "no network judge"),
        ("NoModel", "network `model`"),
        ("Holding", "attribute queue is a Tensor"),
        ("Hiding", "keys"),
    ],
)
def test_networks_that_a_run_cannot_train_or_save_are_refused(task: str, reason: str) -> None:
    with pytest.raises(ValueError, match=rf"^train\.task.*{reason}"):
        parts_of(config_of(task, "parallel=single"))


class Averaged(Classification):
    averages = {"teacher": ("model", 0.9)}


@pytest.mark.parametrize(
    ("task", "overrides", "key"),
    [
        ("Critic", ("parallel=dp", "parallel.devices=2"), "parallel=dp"),
        ("Averaged", ("parallel=dp", "parallel.devices=2"), "parallel=dp"),
        ("Critic", ("train.precision=fp16",), "train.precision=fp16"),
        (
            "Critic",
            ("parallel=ddp", "parallel.devices=2", "parallel.static_graph=true"),
            "parallel.static_graph=true",
        ),
    ],
)
def test_keys_that_work_with_one_network_or_phase_are_refused_for_more(
    task: str, overrides: tuple[str, ...], key: str
) -> None:
    check_task(config_of(task))
    with pytest.raises(ValueError, match=rf"^{key}: .*train\.task={HERE}\.{task}"):
        check_task(config_of(task, *overrides))


# Tests of loops of a project.
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("accumulate", "added"), [(2, 1), (1, 0), (1, 2)])
def test_loop_that_leaves_out_a_batch_fails_in_its_first_step(accumulate: int, added: int) -> None:
    parts = parts_of(config_of(None, "parallel=single", f"train.accumulate={accumulate}"))
    step = first_step(parts)
    [batch, *_] = step.batches()
    for _ in range(added):
        step.backward(batch)
    with pytest.raises(RuntimeError, match=f"train.accumulate={accumulate}"):
        step.update()
    assert parts.progress.step == 0


def without_update(training: Training) -> None:
    for step in training.steps():
        for batch in step.batches():
            step.backward(batch)


def without_a_phase(training: Training) -> None:
    for step in training.steps():
        for batch in step.batches():
            step.backward(batch, "main")
        step.update("main")


def without_log(training: Training) -> None:
    for step in training.steps():
        step.train()


def too_short(training: Training) -> None:
    for step in training.steps():
        training.log(step.train())
        break


@pytest.mark.parametrize(
    ("task", "loop", "steps", "reason"),
    [
        (None, without_update, 0, "step 1 was not updated"),
        ("Critic", without_a_phase, 0, "step 1 was not updated"),
        (None, without_log, 1, "step 1 was not logged"),
        (None, too_short, 1, "ended before"),
    ],
)
def test_loop_that_leaves_out_a_part_of_a_step_is_refused(
    tmp_path: Path, task: str | None, loop: Callable[[Training], None], steps: int, reason: str
) -> None:
    run = start_run(config_of(task, "parallel=single"), tmp_path)
    with (
        pytest.raises(RuntimeError, match=rf"^train\.loop: .*{reason}"),
        run.training() as training,
    ):
        loop(training)
    assert run.parts.progress.step == steps


def test_loop_in_parts_trains_like_the_loop_of_the_project(tmp_path: Path) -> None:
    config = config_of("Critic", "parallel=single", *HALVED)
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    train_run(config, tmp_path / "whole")
    run = start_run(config, tmp_path / "parts")
    with run.training() as training:
        for step in training.steps():
            for phase in ("main", "critic"):
                for batch in step.batches():
                    step.backward(batch, phase)
                numbers = step.update(phase)
            training.log({**numbers, "train/own": 1.0})
    one, other = (
        checkpoint.load(tmp_path / name / "checkpoints" / "last.pt") for name in ("whole", "parts")
    )
    for part in ("model", "networks"):
        torch.testing.assert_close(one[part], other[part], rtol=0, atol=0)


# Tests of optimizers with a closure, and of schedules that observe evaluations.
# --------------------------------------------------------------------------------------------------


class Ascent(torch.optim.SGD):
    """Sharpness-aware minimization, with a step of 0.1 times the gradient."""

    needs_closure = True

    def step(self, closure: Any = None) -> Any:
        loss = closure()
        parameters = [p for group in self.param_groups for p in group["params"]]
        moves = [0.1 * p.grad for p in parameters]
        with torch.no_grad():
            torch._foreach_add_(parameters, moves)
        closure()
        with torch.no_grad():
            torch._foreach_sub_(parameters, moves)
        super().step()
        return loss


class NoCall(Ascent):
    def step(self, closure: Any = None) -> Any:
        return None


def weights_after_a_step(
    ranks: Ranks, store: Any, words: tuple[str, ...]
) -> tuple[float | None, list[float]]:
    config = config_of("Noised", *words)
    config.optim.opt = f"{HERE}.Ascent"
    parts = parts_of(config, ranks, store)
    numbers = first_step(parts).train()
    weights = [parts.strategy.whole(p.detach()).flatten() for p in parts.state.parameters()]
    parts.strategy.close()
    return numbers["train/loss"], torch.cat(weights).tolist()


def plain_ascent() -> tuple[float, Tensor]:
    """Compute a step of sharpness-aware minimization in plain torch."""
    parts = parts_of(config_of("Noised", "parallel=single"))
    batch = next(parts.train_loader.epoch(0))
    parameters = list(parts.state.model.parameters())
    parts.state.networks.train()

    def gradients() -> tuple[float, tuple[Tensor, ...]]:
        batch.draws = 0
        loss = parts.task.losses(parts.state.networks, batch, "train")[0].mean()
        return loss.item(), torch.autograd.grad(loss, parameters)

    start = [p.detach().clone() for p in parameters]
    loss, first = gradients()
    with torch.no_grad():
        for parameter, gradient in zip(parameters, first, strict=True):
            parameter.add_(0.1 * gradient)
    _, second = gradients()
    weights = [p - 0.1 * gradient for p, gradient in zip(start, second, strict=True)]
    return loss, torch.cat([of.flatten() for of in weights])


@pytest.mark.processes
@pytest.mark.slow(seconds=3)
@pytest.mark.sample(3)
@pytest.mark.parametrize("spread", [name for name in SPREADS if name != "dp2"])
def test_optimizer_with_a_closure_takes_the_step_of_the_whole_batch(spread: str) -> None:
    world_size, words = SPREADS[spread]
    loss, weights = plain_ascent()
    for of_rank, of_all in in_ranks(weights_after_a_step, world_size, words):
        assert of_rank == pytest.approx(loss, rel=1e-5)
        assert difference(of_all, weights) < 1e-6


@pytest.mark.parametrize(
    ("optimizer", "precision", "error", "key"),
    [
        ("NoCall", "fp32", RuntimeError, "optim.opt: NoCall"),
        ("Ascent", "fp16", ValueError, "train.precision=fp16: Ascent"),
    ],
)
def test_optimizer_that_does_not_fit_a_closure_is_refused(
    optimizer: str, precision: str, error: type[Exception], key: str
) -> None:
    config = config_of(None, "parallel=single", f"train.precision={precision}")
    config.optim.opt = f"{HERE}.{optimizer}"
    with pytest.raises(error, match=f"^{key}"):
        first_step(parts_of(config)).train()


class Halving:
    """Schedule that halves the learning rate after each evaluation."""

    def __init__(self, optimizer: torch.optim.Optimizer, config: Any, steps: int) -> None:
        self.optimizer, self.observed = optimizer, 0

    def step_update(self, step: int) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = 0.1 * 0.5**self.observed

    def observe(self, numbers: dict[str, float | None]) -> None:
        assert numbers["acc"] is not None
        self.observed += 1

    def state_dict(self) -> dict[str, int]:
        return {"observed": self.observed}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.observed = state["observed"]


def test_schedule_that_observes_evaluations_continues_after_a_resume(tmp_path: Path) -> None:
    """An epoch has two steps, and an evaluation at its end."""
    config = config_of(None, "parallel=single", "train.epochs=3")
    config.optim.sched = f"{HERE}.Halving"
    for name, stops in {"whole": (None,), "resumed": (4, None)}.items():
        folder = tmp_path / name
        folder.mkdir()
        for config.train.max_steps in stops:
            run = train_run(config, folder)
            schedule = run.parts.state.phases[0].learning.schedule
            [phase] = checkpoint.load(folder / "checkpoints" / "last.pt")["phases"].values()
            assert phase["schedule"] == {"observed": schedule.observed}
        lines = read_lines(folder / "metrics.jsonl")
        rates = [line["lr"] for line in lines if "lr" in line]
        assert rates == [0.1, 0.1, 0.05, 0.05, 0.025, 0.025]

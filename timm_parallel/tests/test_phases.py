"""A task trains as its phases, averages and weights of samples say. A loop or an optimizer that
leaves a part of a step out is refused.

test_small_project.py tests that any number of devices trains such tasks alike.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import count, islice
from pathlib import Path
from typing import Any

import pytest
import torch
from small import training
from small.pair import Pair
from small.points import Points
from small.task import Position
from torch import Tensor, nn

from timm_parallel import Batch, Training
from timm_parallel.launch import rank
from timm_parallel.machine.ranks import Ranks
from timm_parallel.record.result import read_result
from timm_parallel.testing.configs import read_lines
from timm_parallel.testing.ranks import in_ranks
from timm_parallel.tests.small_runs import (
    TASKS,
    contents_of,
    resolved,
    start_run,
    take_steps,
    weights_of,
)

# Module name under which configs find this file, because they may name only classes of small/.
HERE = "small.phases_of_test"
sys.modules[HERE] = sys.modules[__name__]
HALVES = ("data.batch_size=6", "train.accumulate=2")
Trained = tuple[list[dict[str, Any]], dict[str, Tensor]]


def config_of(task: str, *words: str) -> Any:
    """Build the config of two steps of a task of the small project, or of one in this file."""
    common = ("optim.opt=momentum", "optim.lr=0.1", "train.max_steps=2", "train.log_every=1")
    return resolved(*TASKS.get(task, (f"train.task={HERE}.{task}",)), *common, *words)


@pytest.fixture
def train(tmp_path: Path) -> Callable[..., Trained]:
    """Return a function `(task, *words) -> (numbers of each step, tensors at the end)`."""
    numbers = count()

    def trained(task: str, *words: str) -> Trained:
        run = start_run(config_of(task, *words), tmp_path / str(next(numbers)))
        return list(take_steps(run)), weights_of(run.folder)

    return trained


def assert_alike(one: Trained, other: Trained) -> None:
    for before, after in zip(one[0], other[0], strict=True):
        assert before == pytest.approx(after, rel=1e-4, abs=1e-6)
    torch.testing.assert_close(other[1], one[1], rtol=1e-5, atol=1e-6)


# --- Losses and their weights.


class Mean(Position):
    """Position with the mean loss of a call."""

    def losses(self, networks: Any, batch: Batch, phase: str) -> tuple[Tensor, dict[str, Tensor]]:
        losses, values = super().losses(networks, batch, phase)
        return losses.mean(), values


def test_scalar_loss_is_the_mean_over_the_samples_of_its_call(
    train: Callable[..., Trained],
) -> None:
    assert_alike(train("position", *HALVES), train("Mean", *HALVES))


@pytest.mark.parametrize("task", ["position", "points"])
def test_gradient_is_that_of_the_sum_of_losses_divided_by_the_weight_of_the_step(
    task: str, tmp_path: Path
) -> None:
    """The reference computes both batches of the step with its own arithmetic."""
    run = start_run(config_of(task, *HALVES, "train.max_steps=1"), tmp_path)
    model, batches = run.parts.state.model, list(islice(run.parts.train_loader.epoch(0), 2))
    # Rows [K, 2] of each image.
    targets = [
        of_image.view(-1, 2)
        for batch in batches
        for of_image in (batch.target if task == "position" else batch.points)
    ]
    outputs = model(torch.cat([batch.image for batch in batches]))
    sums = [
        (output - target).square().mean(1).sum()
        for output, target in zip(outputs, targets, strict=True)
    ]
    loss = torch.stack(sums).sum() / sum(map(len, targets))
    gradients = torch.autograd.grad(loss, [*model.parameters()])
    expected = [p.detach() - 0.1 * of for p, of in zip(model.parameters(), gradients, strict=True)]
    (numbers,) = take_steps(run)
    assert numbers["train/loss"] == pytest.approx(loss.item(), rel=1e-5)
    torch.testing.assert_close([p.detach() for p in model.parameters()], expected)


class Nothing(Points):
    """Points as if no image had one."""

    def weight(self, batch: Batch) -> int:
        return 0

    def losses(self, networks: Any, batch: Batch, phase: str) -> tuple[Tensor, dict[str, Tensor]]:
        return 0 * super().losses(networks, batch, phase)[0], {}


def test_step_without_any_weight_has_the_loss_0(train: Callable[..., Trained]) -> None:
    numbers, tensors = train("Nothing", "data.name=scattered")
    assert [of_step["train/loss"] for of_step in numbers] == [0.0, 0.0]
    assert all(tensor.isfinite().all() for tensor in tensors.values())


@pytest.mark.parametrize("shape", [(12, 10), (6,)])
def test_losses_of_another_shape_are_refused(
    shape: tuple[int, ...], train: Callable[..., Trained], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Position, "losses", lambda *_: (torch.zeros(shape, requires_grad=True), {}))
    with pytest.raises(ValueError, match=r"losses\(\) returned a tensor .* batch of 12") as refusal:
        train("position")
    assert str(list(shape)) in str(refusal.value)


def test_numbers_whose_names_change_between_steps_are_refused(
    train: Callable[..., Trained], monkeypatch: pytest.MonkeyPatch
) -> None:
    inherited, calls = Position.losses, count()

    def renamed(task: Position, networks: Any, batch: Batch, phase: str) -> Any:
        losses, _ = inherited(task, networks, batch, phase)
        return losses, {f"number_{next(calls)}": losses.detach()}

    monkeypatch.setattr(Position, "losses", renamed)
    with pytest.raises(ValueError, match=r"number_\d.*before: .*number_\d"):
        train("position")


# --- Phases and averages, and what a task holds.


def test_each_phase_trains_only_its_networks(train: Callable[..., Trained], tmp_path: Path) -> None:
    start = start_run(config_of("pair"), tmp_path / "start").parts.state.networks.state_dict()
    for frozen in ("model", "critic"):
        _, end = train("pair", f"+optim.of={{{frozen}: {{opt: sgd, lr: 1e-30}}}}")
        for name in start.keys() - {"critic.seen"}:
            difference = (end[name] - start[name]).abs().max()
            is_frozen = name.startswith(frozen)
            assert difference < 1e-20 if is_frozen else difference > 1e-6, (frozen, name)


def test_each_phase_has_its_own_draws_and_logs_its_loss_learning_rate_and_gradient_norm(
    train: Callable[..., Trained], monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: dict[str, Tensor] = {}
    inherited = Pair.losses

    def noted(task: Pair, networks: Any, batch: Batch, phase: str) -> Any:
        drawn[phase] = batch.normal(2)
        return inherited(task, networks, batch, phase)

    monkeypatch.setattr(Pair, "losses", noted)
    first = train("pair", "+optim.of={critic: {lr: 0.02}}")[0][0]
    assert not torch.isclose(drawn["model"], drawn["critic"]).any()
    assert set(first) == {
        *("train/loss", "train/loss_model", "train/loss_critic", "train/guess"),
        *("lr_model", "lr_critic", "train/grad_norm_model", "train/grad_norm_critic"),
    }
    assert (first["lr_model"], first["lr_critic"]) == (0.1, 0.02)
    sum_of_phases = first["train/loss_model"] + first["train/loss_critic"]
    assert first["train/loss"] == pytest.approx(sum_of_phases)


def test_average_moves_once_per_optimizer_step(tmp_path: Path) -> None:
    run = start_run(config_of("pair", *HALVES, "train.max_steps=3"), tmp_path)
    modules: Any = run.parts.state.modules
    model, slow = modules["model"].head.weight, modules["slow"].head.weight
    expected = slow.clone()
    assert torch.equal(expected, model)
    # As in timm, the first step copies the weights.
    for decay, _ in zip((0, 0.9, 0.9), take_steps(run), strict=True):
        expected = decay * expected + (1 - decay) * model.detach()
        torch.testing.assert_close(slow, expected, rtol=1e-6, atol=1e-8)
    assert not torch.allclose(slow, model, rtol=1e-2)


def networks_and_tensor(task: Any, model: nn.Module) -> dict[str, nn.Module]:
    task.center = torch.zeros(3)
    return {"model": model, "critic": nn.Linear(2, 1)}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"networks": networks_and_tensor}, "the attribute center is a Tensor"),
        ({"networks": lambda _, model: {"backbone": model}}, "must return the network `model`"),
        (
            {"networks": lambda _, model: {"model": model, "values": nn.Linear(2, 2)}},
            "values cannot be the name of a network",
        ),
        ({"phases": {"model": ("model", "generator")}}, "there is no network generator"),
        ({"phases": {"model": ("model",)}}, r"no phase trains critic\.layer\.weight"),
        (
            {"phases": {"model": ("model", "critic"), "critic": ("critic",)}},
            r"critic\.layer\.weight is trained in the phases critic, model",
        ),
    ],
)
def test_task_is_refused_when_it_holds_or_trains_its_networks_wrongly(
    changes: dict[str, Any], named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in changes.items():
        monkeypatch.setattr(Pair, name, value)
    with pytest.raises(ValueError, match=rf"^train\.task.*{named}") as refusal:
        start_run(config_of("pair"), tmp_path)
    assert "\n" not in str(refusal.value)


class Averaged(Position):
    averages = {"teacher": ("model", 0.99)}
    headline = "near"


@pytest.mark.parametrize(
    ("task", "words", "key"),
    [
        ("pair", ("parallel=dp", "parallel.devices=2"), "parallel=dp"),
        ("Averaged", ("parallel=dp", "parallel.devices=2"), "parallel=dp"),
        ("pair", ("train.precision=fp16",), "train.precision=fp16"),
        (
            "pair",
            ("parallel=ddp", "parallel.devices=2", "parallel.static_graph=true"),
            "parallel.static_graph=true",
        ),
    ],
)
def test_key_is_refused_before_a_run_when_it_does_not_fit_the_task(
    task: str, words: tuple[str, ...], key: str
) -> None:
    with pytest.raises(ValueError) as refusal:  # noqa: PT011
        config_of(task, *words)
    assert str(refusal.value).startswith(key) and "\n" not in str(refusal.value)


def test_checkpoint_metric_auto_becomes_the_headline_of_the_task() -> None:
    assert config_of("position").checkpoint.metric == "val/loss"
    assert config_of("Averaged").checkpoint.metric == "val/near"


# --- The loop.


def in_parts(training: Training) -> None:
    """Train as step.train() does, and log a number more."""
    for step in training.steps():
        numbers: dict[str, float | None] = {}
        for phase in ("model", "critic"):
            for batch in step.batches():
                step.backward(batch, phase)
            numbers = step.update(phase)
        training.log({**numbers, "train/own": 1.0} if numbers else {})


def without_a_batch(training: Training) -> None:
    for step in training.steps():
        step.backward(next(iter(step.batches())), "model")
        step.update("model")


def without_an_update(training: Training) -> None:
    for step in training.steps():
        for batch in step.batches():
            step.backward(batch, "model")
        training.log(step.update("model"))


def without_a_log(training: Training) -> None:
    for step in training.steps():
        step.train()


def without_the_last_steps(training: Training) -> None:
    training.log(next(iter(training.steps())).train())


def run_with(loop: Callable[[Training], None], folder: Path) -> None:
    with start_run(config_of("pair", *HALVES), folder).training() as started:
        loop(started)


def test_own_loop_in_parts_trains_like_the_default_loop_and_logs_more(
    train: Callable[..., Trained], tmp_path: Path
) -> None:
    train("pair", *HALVES)
    run_with(in_parts, tmp_path / "own")
    default, own = (read_result(tmp_path / name) for name in ("0", "own"))
    assert default.parameters_hash == own.parameters_hash
    logged = [
        [line for line in read_lines(tmp_path / name / "metrics.jsonl") if "train/loss" in line]
        for name in ("0", "own")
    ]
    assert [line["train/loss"] for line in logged[0]] == [line["train/loss"] for line in logged[1]]
    assert [line["train/own"] for line in logged[1]] == [1.0, 1.0]


@pytest.mark.parametrize(
    ("loop", "named"),
    [
        (without_a_batch, r"train\.accumulate=2: .* 1 batches in step 1"),
        (without_an_update, r"train\.loop: step 1 was not updated"),
        (without_a_log, r"train\.loop: step 1 was not logged"),
        (without_the_last_steps, r"train\.loop: .*take all steps"),
    ],
)
def test_loop_is_refused_when_it_leaves_out_a_part_of_a_step(
    tmp_path: Path, loop: Callable[[Training], None], named: str
) -> None:
    with pytest.raises(RuntimeError, match=named):
        run_with(loop, tmp_path)
    assert not (tmp_path / "result.json").exists()


# --- Optimizers with a closure, and schedules that observe.


class Descent(torch.optim.Optimizer):
    """Steps with the gradient."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter -= group["lr"] * parameter.grad


class Closure(Descent):
    """Computes the loss `calls` times, and steps with the last gradient."""

    needs_closure = True
    calls = 2
    losses: list[float] = []

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        Closure.losses += [float(closure()) for _ in range(Closure.calls)]
        super().step()


class Noisy(Position):
    """Position with noise, which comes from the batch."""

    def losses(self, networks: Any, batch: Batch, phase: str) -> tuple[Tensor, dict[str, Tensor]]:
        noise = batch.normal(*batch.image.shape[1:])
        return super().losses(networks, batch.replace(image=batch.image + noise), phase)


CLOSURE = (f"optim.opt={HERE}.Closure",)


def test_optimizer_with_a_closure_trains_like_one_that_gets_gradients(
    train: Callable[..., Trained],
) -> None:
    """Every computation of the loss has the same batches, draws and dropout."""
    Closure.losses.clear()
    dropout = "+model.kwargs.dropout=0.3"
    expected = train("Noisy", dropout, f"optim.opt={HERE}.Descent")
    assert_alike(expected, train("Noisy", dropout, *CLOSURE))
    assert Closure.losses[::2] == Closure.losses[1::2] and len(Closure.losses) == 4


def trained_on_rank(ranks: Ranks, store: Any, folder: Path, config: Any) -> None:
    rank.train(config, folder, ranks, store)


@pytest.mark.processes
def test_optimizer_with_a_closure_trains_alike_under_ddp_with_accumulation(
    train: Callable[..., Trained], tmp_path: Path
) -> None:
    _, expected = train("Noisy", f"optim.opt={HERE}.Descent")
    config = config_of("Noisy", *CLOSURE, *HALVES, "parallel=ddp", "parallel.devices=2")
    in_ranks(trained_on_rank, 2, tmp_path, config, timeout=120)
    torch.testing.assert_close(weights_of(tmp_path), expected, rtol=1e-5, atol=1e-6)


def test_optimizer_with_a_closure_is_refused_in_fp16_or_when_it_does_not_call_it(
    train: Callable[..., Trained], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=r"^train\.precision=fp16: Closure"):
        train("position", *CLOSURE, "train.precision=fp16")
    monkeypatch.setattr(Closure, "calls", 0)
    with pytest.raises(RuntimeError, match=r"^optim\.opt: Closure"):
        train("position", *CLOSURE)


class Plateau:
    """Halves the learning rate at each evaluation that it observes."""

    def __init__(self, optimizer: Any, **_: Any) -> None:
        self.optimizer, self.factor, self.observed = optimizer, 1.0, list[float]()
        self.rate = optimizer.param_groups[0]["lr"]

    def observe(self, numbers: dict[str, float]) -> None:
        self.observed.append(numbers["loss"])
        self.factor /= 2

    def step_update(self, step: int) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate * self.factor

    def state_dict(self) -> dict[str, Any]:
        return {"factor": self.factor, "observed": self.observed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.factor, self.observed = state["factor"], state["observed"]


def test_schedule_that_observes_evaluations_continues_after_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "CosineLRScheduler", Plateau)
    rates, contents = [], []
    # An epoch has two steps.
    for folder, ends in ((tmp_path / "whole", ["null"]), (tmp_path / "parts", ["2", "null"])):
        for end in ends:
            config = config_of("position", "data.limit_train=24", f"train.max_steps={end}")
            for _ in take_steps(start_run(config, folder)):
                pass
        rates.append([line["lr"] for line in read_lines(folder / "metrics.jsonl") if "lr" in line])
        contents.append(contents_of(folder))
    assert rates[0] == rates[1] == [0.1, 0.1, 0.05, 0.05, 0.025, 0.025]
    whole, parts = contents
    schedule = whole["phases"]["train"]["schedule"]
    assert schedule == parts["phases"]["train"]["schedule"]
    assert schedule["factor"] == 0.5**3 and len(schedule["observed"]) == 3
    assert all(torch.equal(tensor, parts["model"][name]) for name, tensor in whole["model"].items())


# A config accepts only classes of the project.
for own in [value for value in globals().values() if isinstance(value, type)]:
    if own.__module__ == __name__:
        own.__module__ = HERE

"""Any number of devices trains a task alike: its weights of samples, its phases, and its updates
after a step. A loop or an optimizer that leaves a part out is refused.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from src.train.run import run
from tests.template.runs import parts_of, resolved, take_steps
from timm_parallel.batch import Batch
from timm_parallel.machine.ranks import Ranks
from timm_parallel.metric import Metric, to_double
from timm_parallel.record.result import read_result
from timm_parallel.runtime.run import Training
from timm_parallel.state import checkpoint
from timm_parallel.state.parts import RunParts
from timm_parallel.task import Task
from timm_parallel.testing.configs import read_lines
from timm_parallel.testing.ranks import in_ranks

# Module name under which configs find this file, because they may name only classes of src/.
HERE = "src.phases_of_test"
sys.modules[HERE] = sys.modules[__name__]
# Two steps of 24 images. An optimizer without momentum, so that an update is lr * gradient.
COMMON = (
    *("optim.opt=momentum", "optim.momentum=0", "optim.lr=0.1", "optim.weight_decay=0"),
    *("optim.sched=constant", "data.batch_size=24", "data.limit_train=48", "train.epochs=1"),
    *("train.log_every=1", "parallel.accelerator=cpu"),
)
SPREADS = {
    "single": ("parallel=single",),
    "accumulated": ("parallel=single", "data.batch_size=12", "train.accumulate=2"),
    "ddp": ("parallel=ddp", "parallel.devices=2"),
    "ddp_accumulated": (
        *("parallel=ddp", "parallel.devices=2", "data.batch_size=12", "train.accumulate=2"),
    ),
}


def loss_sum(task: Any, scores: Tensor, batch: Batch) -> Tensor:
    return to_double(functional.cross_entropy(scores, batch.target)) * len(batch)


class Plain(Task[Any]):
    """Classification with a loss per sample."""

    metrics = {"loss": Metric(loss_sum, lambda total, samples: float(total) / samples)}

    def train_transform(self, *given: Any) -> None:
        return None

    def evaluation_transform(self, preprocessing: Any) -> None:
        return None

    def losses(self, networks: Any, batch: Batch, phase: str) -> tuple[Tensor, dict[str, Tensor]]:
        scores = networks.model(batch.image)
        return functional.cross_entropy(scores, batch.target, reduction="none"), {}


class Mean(Plain):
    """The same with the mean loss of a call."""

    def losses(self, networks: Any, batch: Batch, phase: str) -> tuple[Tensor, dict[str, Tensor]]:
        return super().losses(networks, batch, phase)[0].mean(), {}


class Weighted(Plain):
    """A sample counts as often as the square of its class says."""

    def weight(self, batch: Batch) -> Tensor:
        return batch.target.square().sum()

    def losses(self, networks: Any, batch: Batch, phase: str) -> tuple[Tensor, dict[str, Tensor]]:
        return super().losses(networks, batch, phase)[0] * batch.target.square(), {}


class Phases(Plain):
    """A critic learns the loss of the model, after the model has learned to please the critic."""

    phases = {"model": ("model",), "critic": ("critic",)}

    def networks(self, model: nn.Module) -> dict[str, nn.Module]:
        return {"model": model, "critic": nn.Linear(self.num_outputs, 1)}

    def losses(self, networks: Any, batch: Batch, phase: str) -> tuple[Tensor, dict[str, Tensor]]:
        scores = networks.model(batch.image)
        guess = networks.critic(scores)[:, 0]
        loss = functional.cross_entropy(scores, batch.target, reduction="none")
        if phase == "model":
            return loss + 0.1 * guess, {}
        return (guess - loss).square(), {"guess": guess.detach()}


class Noisy(Plain):
    """Images get noise, which comes from the batch."""

    def losses(self, networks: Any, batch: Batch, phase: str) -> tuple[Tensor, dict[str, Tensor]]:
        noise = batch.normal(*batch.image.shape[1:])
        return super().losses(networks, batch.replace(image=batch.image + noise), phase)


class Counting(Plain):
    """A buffer counts the samples of all ranks after each step."""

    def networks(self, model: nn.Module) -> dict[str, nn.Module]:
        counter = nn.Module()
        counter.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        return {"model": model, "counter": counter}

    def losses(self, networks: Any, batch: Batch, phase: str) -> tuple[Tensor, dict[str, Tensor]]:
        self.own = len(batch)
        return super().losses(networks, batch, phase)

    def after_step(self, networks: Any, ranks: Any) -> None:
        networks.counter.seen += ranks.sum(torch.tensor(self.own))


def config_of(task: str, *words: str) -> Any:
    return resolved(*COMMON, "parallel=single", f"train.task={HERE}.{task}", *words)


def tensors_of(parts: RunParts) -> dict[str, np.ndarray]:
    """Return all parameters and own buffers of a run by name."""
    named = dict(parts.state.named_parameters())
    for network in parts.state.networks:
        for name, tensor in parts.state.own_tensors(network).items():
            named.setdefault(f"{network}.{name}", tensor)  # type: ignore[arg-type]
    return {name: tensor.detach().double().numpy() for name, tensor in named.items()}


def trained(ranks: Ranks, store: Any, task: str, *words: str) -> Any:
    """Train an epoch. Return the numbers of each step, and the tensors at the end."""
    torch.set_num_threads(1)
    parts = parts_of(config_of(task, *words), ranks, store)
    try:
        return list(take_steps(parts)), tensors_of(parts)
    finally:
        parts.strategy.close()


def spread(task: str, name: str, *words: str) -> Any:
    if name.startswith("ddp"):
        first, second = in_ranks(trained, 2, task, *SPREADS[name], *words)
        assert first[0] == second[0]
        return first
    return trained(Ranks(), None, task, *SPREADS[name], *words)


def assert_alike(one: Any, other: Any) -> None:
    assert [numbers.keys() for numbers in one[0]] == [numbers.keys() for numbers in other[0]]
    for before, after in zip(one[0], other[0], strict=True):
        assert before == pytest.approx(after, rel=1e-4, abs=1e-6)
    assert one[1].keys() == other[1].keys()
    for name, tensor in one[1].items():
        np.testing.assert_allclose(other[1][name], tensor, rtol=1e-5, atol=1e-6, err_msg=name)


# --- Losses and their weights.


@pytest.mark.processes
@pytest.mark.slow(seconds=3)
@pytest.mark.parametrize(
    ("task", "name"),
    [
        ("Plain", "accumulated"),
        ("Plain", "ddp"),
        ("Weighted", "ddp_accumulated"),
        ("Phases", "ddp_accumulated"),
        ("Noisy", "ddp_accumulated"),
    ],
)
def test_task_trains_alike_under_ddp_and_accumulation(task: str, name: str) -> None:
    assert_alike(spread(task, "single"), spread(task, name))


def test_scalar_loss_is_the_mean_over_the_samples_of_its_call() -> None:
    assert_alike(spread("Plain", "accumulated"), spread("Mean", "accumulated"))


@pytest.mark.parametrize("task", ["Plain", "Weighted"])
def test_gradient_is_that_of_the_sum_of_losses_divided_by_the_weight_of_the_step(task: str) -> None:
    """The reference computes both batches of the step at once, with its own arithmetic."""
    parts = parts_of(config_of(task, *SPREADS["accumulated"], "train.max_steps=1"))
    model, batches = parts.state.model.train(), parts.train_loader.epoch(0)
    chosen = [next(batches) for _ in range(2)]
    images, labels = (torch.cat([getattr(of, name) for of in chosen]) for name in NAMES)
    weights = labels.square() if task == "Weighted" else torch.ones_like(labels)
    losses = functional.cross_entropy(model(images), labels, reduction="none")
    loss = (losses * weights).sum() / weights.sum()
    gradients = torch.autograd.grad(loss, [*model.parameters()])
    expected = [p.detach() - 0.1 * of for p, of in zip(model.parameters(), gradients, strict=True)]
    (numbers,) = take_steps(parts)
    assert numbers["train/loss"] == pytest.approx(loss.item(), rel=1e-5)
    for parameter, value in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.detach(), value, rtol=1e-5, atol=1e-6)


NAMES = ("image", "target")


def test_step_without_any_weight_has_the_loss_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """For example, no image of a step has a labeled pixel or a box."""

    def nothing(task: Weighted, networks: Any, batch: Batch, phase: str) -> Any:
        return 0 * Plain.losses(task, networks, batch, phase)[0], {}

    monkeypatch.setattr(Weighted, "weight", lambda task, batch: 0)
    monkeypatch.setattr(Weighted, "losses", nothing)
    numbers, tensors = spread("Weighted", "single")
    assert [of_step["train/loss"] for of_step in numbers] == [0.0, 0.0]
    assert all(np.isfinite(tensor).all() for tensor in tensors.values())


@pytest.mark.parametrize("shape", [(24, 10), (12,)])
def test_losses_of_another_shape_are_refused(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Plain, "losses", lambda *_: (torch.zeros(shape, requires_grad=True), {}))
    monkeypatch.setattr("timm_parallel.state.parts.count_flops", lambda *_: None)
    with pytest.raises(ValueError, match=r"losses\(\) returned a tensor .* batch of 24") as refusal:
        spread("Plain", "single")
    assert str(list(shape)) in str(refusal.value)


def test_numbers_whose_names_change_between_steps_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inherited, calls = Plain.losses, [0]

    def renamed(task: Plain, networks: Any, batch: Batch, phase: str) -> Any:
        losses, _ = inherited(task, networks, batch, phase)
        calls[0] += 1
        return losses, {f"number_{calls[0]}": losses.detach()}

    monkeypatch.setattr(Plain, "losses", renamed)
    with pytest.raises(ValueError, match=r"number_\d.*before: .*number_\d"):
        spread("Plain", "single")


# --- Phases, and what a task holds.


def test_each_phase_trains_only_its_networks() -> None:
    start = tensors_of(parts_of(config_of("Phases")))
    for frozen, other in (("model", "critic"), ("critic", "model")):
        _, end = spread("Phases", "single", f"+optim.of={{{frozen}: {{lr: 1e-30}}}}")
        of_critic = [name for name in start if name.startswith("critic.")]
        of_model = [name for name in start if name not in of_critic and "critic" not in name]
        names = {"model": of_model, "critic": of_critic}
        differences = {name: np.abs(end[name] - start[name]).max() for name in start}
        assert all(differences[name] < 1e-20 for name in names[frozen])
        assert all(differences[name] > 1e-6 for name in names[other])


def test_each_phase_logs_its_loss_learning_rate_and_gradient_norm() -> None:
    numbers, _ = spread("Phases", "single", "+optim.of={critic: {lr: 0.02}}")
    last = numbers[-1]
    assert set(last) == {
        *("train/loss", "train/loss_model", "train/loss_critic", "train/guess"),
        *("lr_model", "lr_critic", "train/grad_norm_model", "train/grad_norm_critic"),
    }
    assert (last["lr_model"], last["lr_critic"]) == (0.1, 0.02)
    assert last["train/loss"] == pytest.approx(last["train/loss_model"] + last["train/loss_critic"])


def test_draws_of_the_phases_of_a_step_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: dict[str, Tensor] = {}
    inherited = Phases.losses

    def noted(task: Phases, networks: Any, batch: Batch, phase: str) -> Any:
        drawn[phase] = batch.normal(2)
        return inherited(task, networks, batch, phase)

    monkeypatch.setattr(Phases, "losses", noted)
    spread("Phases", "single")
    assert not torch.isclose(drawn["model"], drawn["critic"]).any()


@pytest.mark.processes
def test_after_step_sums_over_the_ranks_and_its_buffers_are_stored() -> None:
    for name in ("single", "ddp"):
        _, tensors = spread("Counting", name)
        assert tensors["counter.seen"] == 48, name


class WithTensor(Plain):
    def networks(self, model: nn.Module) -> dict[str, nn.Module]:
        self.center = torch.zeros(3)
        return {"model": model}


class WithoutModel(Plain):
    def networks(self, model: nn.Module) -> dict[str, nn.Module]:
        return {"backbone": model}


class WithNameOfTorch(Plain):
    def networks(self, model: nn.Module) -> dict[str, nn.Module]:
        return {"model": model, "values": nn.Linear(2, 2)}


class Unknown(Phases):
    phases = {"model": ("model", "generator")}


class Untrained(Phases):
    phases = {"model": ("model",)}


class Twice(Phases):
    phases = {"model": ("model", "critic"), "critic": ("critic",)}


@pytest.mark.parametrize(
    ("task", "named"),
    [
        ("WithTensor", "the attribute center is a Tensor"),
        ("WithoutModel", "must return the network `model`"),
        ("WithNameOfTorch", "values cannot be the name of a network"),
        ("Unknown", "there is no network generator"),
        ("Untrained", r"no phase trains critic\.weight"),
        ("Twice", r"critic\.weight is trained in the phases critic, model"),
    ],
)
def test_task_is_refused_when_it_holds_or_trains_its_networks_wrongly(
    task: str, named: str
) -> None:
    with pytest.raises(ValueError, match=rf"^train\.task.*{named}") as refusal:
        parts_of(config_of(task))
    assert "\n" not in str(refusal.value)


class Averaged(Plain):
    averages = {"teacher": ("model", 0.99)}


@pytest.mark.parametrize(
    ("task", "words", "key"),
    [
        ("Phases", ("parallel=dp", "parallel.devices=2"), "parallel=dp"),
        ("Averaged", ("parallel=dp", "parallel.devices=2"), "parallel=dp"),
        ("Phases", ("train.precision=fp16",), "train.precision=fp16"),
        (
            "Phases",
            ("parallel=ddp", "parallel.devices=2", "parallel.static_graph=true"),
            "parallel.static_graph=true",
        ),
        ("Phases", ("+optim.of={generator: {lr: 1}}",), "optim.of.generator"),
        ("Phases", ("+optim.of={critic: {rate: 1}}",), "optim.of.critic.rate"),
        ("Plain", ("train.loss=bce",), "train.loss=bce"),
        ("Plain", ("checkpoint.metric=val/acc",), "checkpoint.metric=val/acc"),
    ],
)
def test_key_is_refused_before_a_run_when_it_does_not_fit_the_task(
    task: str, words: tuple[str, ...], key: str
) -> None:
    with pytest.raises(ValueError) as refusal:  # noqa: PT011
        config_of(task, *words)
    assert str(refusal.value).startswith(key) and "\n" not in str(refusal.value)


def test_checkpoint_metric_auto_becomes_the_headline_of_the_task() -> None:
    assert config_of("Plain").checkpoint.metric == "val/loss"
    assert resolved().checkpoint.metric == "val/acc"


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
    for step in training.steps():
        training.log(step.train())
        break


def run_with(loop: Callable[[Training], None] | None, folder: Path, *words: str) -> Path:
    (folder / "logs").mkdir(parents=True)
    chosen = () if loop is None else (f"train.loop={HERE}.{loop.__name__}",)
    run(config_of("Phases", "train.accumulate=2", *chosen, *words), folder, Ranks(), None)
    return folder


def test_own_loop_in_parts_trains_like_the_default_loop_and_logs_more(tmp_path: Path) -> None:
    folders = run_with(None, tmp_path / "default"), run_with(in_parts, tmp_path / "own")
    default, own = (read_result(folder) for folder in folders)
    assert default.parameters_hash == own.parameters_hash
    logged = [
        [line for line in read_lines(folder / "metrics.jsonl") if "train/loss" in line]
        for folder in folders
    ]
    assert [line["train/loss"] for line in logged[0]] == [line["train/loss"] for line in logged[1]]
    assert [line["train/own"] for line in logged[1]] == [1.0] * len(logged[0])


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
    words = ("data.limit_train=96",)
    with pytest.raises(RuntimeError, match=named):
        run_with(loop, tmp_path / "run", *words)
    assert not (tmp_path / "run" / "result.json").exists()


# --- Optimizers with a closure, and schedules that observe.


class Closure(torch.optim.Optimizer):
    """Computes the loss twice, and steps with the second gradient. `calls`: number of computations;
    0: the closure is not called.
    """

    needs_closure = True
    losses: list[float] = []

    def __init__(self, params: Any, lr: float, weight_decay: float = 0, calls: int = 2) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "calls": calls})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for _ in range(self.param_groups[0]["calls"]):
            Closure.losses.append(float(closure()))
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter -= group["lr"] * parameter.grad


CLOSURE = (f"optim.opt={HERE}.Closure",)


@pytest.mark.processes
@pytest.mark.parametrize("name", ["single", "ddp_accumulated"])
def test_optimizer_with_a_closure_trains_like_one_that_gets_gradients(name: str) -> None:
    """Every computation of the loss has the same batches, draws and dropout."""
    Closure.losses.clear()
    dropout = "+model.kwargs.drop_rate=0.3" if name == "single" else "optim.weight_decay=0"
    assert_alike(spread("Noisy", name, dropout), spread("Noisy", name, dropout, *CLOSURE))
    first, second = Closure.losses[::2], Closure.losses[1::2]
    assert first == second and len(first) == (0 if name.startswith("ddp") else 2)


def test_optimizer_with_a_closure_is_refused_when_it_does_not_call_it() -> None:
    with pytest.raises(RuntimeError, match=r"^optim\.opt: Closure"):
        spread("Plain", "single", *CLOSURE, "+optim.kwargs.calls=0")


def test_optimizer_with_a_closure_is_refused_in_fp16() -> None:
    with pytest.raises(ValueError, match=r"^train\.precision=fp16: Closure"):
        parts_of(config_of("Plain", *CLOSURE, "train.precision=fp16"))


class Plateau:
    """Halves the learning rate at each evaluation that it observes."""

    def __init__(self, optimizer: Any, config: Any, steps: int) -> None:
        self.optimizer, self.factor, self.rate = optimizer, 1.0, config.lr
        self.observed: list[float] = []

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


def test_schedule_that_observes_evaluations_continues_after_a_resume(tmp_path: Path) -> None:
    words = (f"optim.sched={HERE}.Plateau", "train.epochs=3")
    rates, contents = [], []
    for folder, attempts in (("whole", [()]), ("parts", [("train.max_steps=2",), ()])):
        at = tmp_path / folder
        (at / "logs").mkdir(parents=True)
        for more in attempts:
            run(config_of("Plain", *words, *more), at, Ranks(), None)
        rates.append([line["lr"] for line in read_lines(at / "metrics.jsonl") if "lr" in line])
        contents.append(checkpoint.load(at / "checkpoints" / "last.pt"))
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

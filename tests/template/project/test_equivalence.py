"""single, dp, ddp and fsdp train alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from src.schema import ResolvedConfig
from tests.template.runs import resolved, train_run
from timm_parallel.machine.ranks import Ranks
from timm_parallel.record.result import read_result
from timm_parallel.run import checkpoint
from timm_parallel.testing.configs import read_lines
from timm_parallel.testing.ranks import in_ranks

SPREADS = {
    "dp2": ("parallel=dp", "parallel.devices=2"),
    "dp3": ("parallel=dp", "parallel.devices=3"),
    "dp5_in_unequal_chunks": ("parallel=dp", "parallel.devices=5"),
    "ddp2": ("parallel=ddp", "parallel.devices=2"),
    "ddp3": ("parallel=ddp", "parallel.devices=3"),
    "fsdp2": ("parallel=fsdp", "parallel.devices=2"),
    "fsdp3_in_unequal_parts": (
        "parallel=fsdp",
        "parallel.devices=3",
        "parallel.reshard_after_forward=false",
    ),
}
TRAININGS = {
    "sgd": ("optim=sgd", "optim.lr=0.005"),
    "adamw": ("optim=adamw",),
    "accumulate": ("optim=sgd", "optim.lr=0.005", "train.accumulate=2"),
    "clip_grad": ("optim=sgd", "optim.lr=0.005", "optim.clip_grad=0.5"),
}
COMMON = (
    # A batch of 24 images divides evenly among 2 and 3 ranks.
    "data.batch_size=24",
    "data.limit_train=480",
    "train.epochs=1",
    "train.log_every=1",
    "optim.warmup_epochs=0.25",
    "data.augment.scale=[0.6,1.0]",
    "data.augment.hflip=0.5",
)
EACH_COMMIT = [
    *(("sgd", spread) for spread in ("dp2", "ddp2", "fsdp2")),
    *(("adamw", "ddp2"), ("accumulate", "ddp2"), ("clip_grad", "fsdp2")),
]
# The other strategies and numbers of devices, and pairs for which a strategy has code of its own.
AT_NIGHT = [
    *(("sgd", spread) for spread in SPREADS if ("sgd", spread) not in EACH_COMMIT),
    *(("adamw", "fsdp2"), ("accumulate", "dp2"), ("accumulate", "fsdp2"), ("clip_grad", "ddp2")),
]


def _case(training: str, spread: str) -> Any:
    marks = [] if spread.startswith("dp") else [pytest.mark.processes]
    if training != "sgd":
        marks.append(pytest.mark.slow(seconds=2))
    if (training, spread) in AT_NIGHT:
        marks.append(pytest.mark.nightly)
    return pytest.param(training, spread, marks=marks)


CASES = [_case(*pair) for pair in EACH_COMMIT + AT_NIGHT]


@dataclass
class Trained:
    weights: dict[str, Tensor]
    lines: list[dict[str, Any]]
    result: Any

    def steps(self, key: str) -> list[float]:
        return [line[key] for line in self.lines if key in line]


def train(ranks: Ranks, store: Any, config: ResolvedConfig, folder: str) -> None:
    train_run(config, Path(folder), ranks, store)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Trained]:
    """Return a function `(training, spread) -> Trained`. Each training runs once."""
    base = tmp_path_factory.mktemp("equivalence")

    def get(training: str, spread: str) -> Trained:
        at = base / f"{training}_{spread}"
        if not at.exists():
            at.mkdir()
            overrides = {"single": ("parallel=single",), **SPREADS}[spread]
            config = resolved(*COMMON, *TRAININGS[training], *overrides)
            if config.parallel.has_ranks:
                in_ranks(train, config.parallel.devices, config, str(at))
            else:
                train(Ranks(), None, config, str(at))
        weights = checkpoint.load(at / "checkpoints" / "last.pt")["model"]
        return Trained(weights, read_lines(at / "metrics.jsonl"), read_result(at))

    return get


def distances(one: dict[str, Tensor], other: dict[str, Tensor]) -> tuple[float, float]:
    """Return (largest ‖Δ‖/‖w‖ of any tensor, ‖Δ‖/‖w‖ over all weights)."""
    assert one.keys() == other.keys()
    worst, differences, weights = 0.0, 0.0, 0.0
    for name, weight in one.items():
        difference, norm = (
            (other[name] - weight).double().norm().item(),
            weight.double().norm().item(),
        )
        worst = max(worst, difference / norm if norm else difference)
        differences, weights = differences + difference**2, weights + norm**2
    return worst, (differences / weights) ** 0.5


@pytest.mark.slow(seconds=2)
@pytest.mark.parametrize(("training", "spread"), CASES)
def test_weights_losses_and_evaluations_of_dp_ddp_and_fsdp_match_single(
    trained: Callable[[str, str], Trained], training: str, spread: str
) -> None:
    single, other = trained(training, "single"), trained(training, spread)
    worst, overall = distances(single.weights, other.weights)
    assert overall <= 1e-5 if training == "adamw" else worst <= 1e-6
    assert len(single.steps("train/loss")) == (10 if training == "accumulate" else 20)
    assert other.steps("lr") == single.steps("lr")
    assert other.steps("train/loss") == pytest.approx(single.steps("train/loss"), abs=1e-5)
    assert other.steps("train/acc") == pytest.approx(single.steps("train/acc"), abs=1e-6)
    assert other.steps("train/grad_norm") == pytest.approx(
        single.steps("train/grad_norm"), rel=1e-4
    )
    for split in ("val", "test"):
        ours, theirs = getattr(single.result, split), getattr(other.result, split)
        assert (theirs["samples"], theirs["correct"]) == (ours["samples"], ours["correct"])
        assert theirs["loss"] == pytest.approx(ours["loss"], rel=1e-5)
    assert (
        other.result.world_size == other.result.devices == int(SPREADS[spread][1].partition("=")[2])
    )


@pytest.mark.slow(seconds=3)
def test_optimizer_accumulation_and_clipping_each_change_final_weights(
    trained: Callable[[str, str], Trained],
) -> None:
    """Otherwise the comparisons with single would pass although accumulation or clipping has no
    effect.
    """
    weights = [trained(training, "single").weights for training in TRAININGS]
    assert min(distances(first, second)[1] for first, second in combinations(weights, 2)) > 1e-3
    assert min(trained("clip_grad", "single").steps("train/grad_norm")) > 0.5, (
        "expected clipping in every step"
    )

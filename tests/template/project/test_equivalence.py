"""single, dp, ddp and fsdp train alike, also with timm's options."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from src.schema import ResolvedConfig
from tests.template.runs import parts_of, resolved, take_steps, train_run
from timm_parallel.machine.ranks import Ranks
from timm_parallel.record.result import read_result
from timm_parallel.run import checkpoint
from timm_parallel.run.replica_checks import parameters_hash
from timm_parallel.testing.configs import read_lines
from timm_parallel.testing.ranks import in_ranks

SPREADS = {
    "single": ("parallel=single",),
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
    *(("sgd", spread) for spread in ("dp3", "dp5_in_unequal_chunks", "ddp3")),
    ("sgd", "fsdp3_in_unequal_parts"),
    *(("adamw", "fsdp2"), ("accumulate", "dp2"), ("accumulate", "fsdp2"), ("clip_grad", "ddp2")),
]


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
            config = resolved(*COMMON, *TRAININGS[training], *SPREADS[spread])
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
@pytest.mark.parametrize(
    ("training", "spread"),
    [*EACH_COMMIT, *(pytest.param(*pair, marks=pytest.mark.nightly) for pair in AT_NIGHT)],
)
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
    """Otherwise the comparisons with single would pass although an option has no effect."""
    weights = [trained(training, "single").weights for training in TRAININGS]
    assert min(distances(first, second)[1] for first, second in combinations(weights, 2)) > 1e-3
    assert min(trained("clip_grad", "single").steps("train/grad_norm")) > 0.5, (
        "expected clipping in every step"
    )


# Dictionary from a name to overrides and the largest difference of losses from single. None: they
# may differ, because BatchNorm sees a chunk or each rank draws its own random numbers.
OPTIONS: dict[str, tuple[tuple[str, ...], float | None]] = {
    "nothing": ((), 1e-5),
    "resnet": (("model=resnet18", "model.name=test_resnet"), None),
    "grad_checkpointing": (("model.grad_checkpointing=true",), 1e-5),
    "ema": (("model.ema.decay=0.9",), 1e-5),
    "randaugment": (("data.augment.aa=rand-m9-mstd0.5-inc1",), 1e-5),
    "reprob_rand_and_repeats": (
        (
            "data.augment.reprob=0.9",
            "data.augment.remode=rand",
            "data.augment.aug_repeats=2",
            "data.augment.vflip=0.5",
        ),
        1e-5,
    ),
    "mixup_elem": (
        ("data.augment.mixup=0.8", "data.augment.mixup_mode=elem", "data.augment.mixup_prob=0.5"),
        None,
    ),
    "mixup_larger_head": (("data.augment.mixup=0.8", "model.num_classes=20"), None),
    "bce_mixed": (
        ("train.loss=bce", "train.bce_target_thresh=0.2", "data.augment.mixup=0.5"),
        None,
    ),
    "bf16": (("train.precision=bf16",), 2e-2),
    "clip_agc": (("optim.clip_grad=0.01", "optim.clip_mode=agc"), 1e-5),
    "fp16_accumulate_clip": (
        ("train.precision=fp16", "train.accumulate=2", "optim.clip_grad=1.0"),
        2e-2,
    ),
    "muon": (("optim.opt=muon", "optim.lr=0.01"), 1e-3),
    "layer_decay": (("optim.layer_decay=0.7",), 1e-5),
}
THREE_STEPS = (
    "parallel.accelerator=cpu",
    "data.batch_size=16",
    "data.limit_train=96",
    "train.max_steps=3",
    "optim.warmup_epochs=0.1",
)
# Options that run at every commit: BatchNorm, averaged weights, mixed images, and a gradient scaler
# with accumulation and clipping.
QUICK = ("nothing", "resnet", "ema", "mixup_larger_head", "fp16_accumulate_clip")
# Options that do not change the losses of three steps.
WITHOUT_EFFECT = ("nothing", "ema", "grad_checkpointing")


def three_steps(ranks: Ranks, store: Any, configs: dict[str, ResolvedConfig]) -> dict[str, Any]:
    """Train three steps with each config. Return the losses, and the weights of the model and its
    average if they are equal on all ranks. All ranks must call this function.
    """
    torch.set_num_threads(1)
    outcomes = {}
    for option, config in configs.items():
        own = None if store is None else torch.distributed.PrefixStore(option, store)
        config.train.log_every = 1
        parts = parts_of(config, ranks, own)
        losses = [numbers["train/loss"] for numbers in take_steps(parts)]
        for network in (parts.state.model, parts.state.ema):
            if network is not None:
                assert parameters_hash(network.parameters(), parts.strategy)[1], option
                assert all(bool(weight.isfinite().all()) for weight in network.parameters())
        assert (parts.state.ema is None) == (option != "ema")
        outcomes[option] = losses
        parts.strategy.group.close()
    return outcomes


@pytest.mark.parametrize("options", [QUICK, pytest.param([*OPTIONS], marks=pytest.mark.nightly)])
@pytest.mark.slow(seconds=8)
def test_losses_with_timm_options_are_finite_and_equal_under_single_dp_and_ddp(
    options: Sequence[str],
) -> None:
    losses = {}
    for name in ("single", "dp2", "ddp2"):
        words = (*THREE_STEPS, *SPREADS[name])
        configs = {option: resolved(*words, *OPTIONS[option][0]) for option in options}
        if name == "ddp2":
            losses[name] = in_ranks(three_steps, 2, configs)[0]
        else:
            losses[name] = three_steps(Ranks(), None, configs)
    single = losses["single"]
    for option in options:
        for of_strategy in losses.values():
            actual, tolerance = of_strategy[option], OPTIONS[option][1]
            assert len(actual) == 3 and all(math.isfinite(loss) for loss in actual), option
            assert tolerance is None or actual == pytest.approx(single[option], abs=tolerance)
    # An option without effect would be equal under all strategies, too.
    same = {option for option in options if single[option] == single["nothing"]}
    assert same <= {*WITHOUT_EFFECT}

"""Loss and metrics of a training step are means over all its images."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from src.schema import ResolvedConfig
from tests.template.runs import parts_of, resolved, take_steps, task_of
from timm_parallel.batch import Batch
from timm_parallel.machine.ranks import Ranks
from timm_parallel.parallel.networks import Autocast, Networks, PhaseStep, autocast
from timm_parallel.testing.ranks import in_ranks

# A run of three steps: the first report covers two steps, the second the last one of the epoch. The
# model has no BatchNorm.
COMMON = ("parallel.accelerator=cpu", "train.log_every=2", "optim=sgd", "optim.lr=0.01")
IN_CHUNKS = (
    "parallel=dp",
    "parallel.devices=3",
    "data.batch_size=25",
    "data.limit_train=75",
)
SPREADS = {
    "dp": IN_CHUNKS,
    "dp_accumulating": (*IN_CHUNKS, "data.limit_train=150", "train.accumulate=2"),
    "ddp": ("parallel=ddp", "parallel.devices=3", "data.batch_size=24", "data.limit_train=72"),
    "accumulating": (
        "parallel=single",
        "data.batch_size=12",
        "data.limit_train=72",
        "train.accumulate=2",
    ),
}


def reported_means(ranks: Ranks, store: Any, config: ResolvedConfig) -> list[dict[str, float]]:
    parts = parts_of(config, ranks, store)
    try:
        return [
            {name: numbers[f"train/{name}"] or 0.0 for name in ("loss", "acc")}
            for numbers in take_steps(parts)
        ]
    finally:
        parts.strategy.close()


def means_of_single(config: ResolvedConfig) -> list[dict[str, float]]:
    """Train on the same images in one batch per step."""
    batch, images = config.global_batch * config.train.accumulate, config.data.limit_train
    overrides = ("parallel=single", f"data.batch_size={batch}", f"data.limit_train={images}")
    return reported_means(Ranks(), None, resolved(*COMMON, *overrides))


@pytest.mark.slow(seconds=1)
@pytest.mark.parametrize(
    "spread", [pytest.param("ddp", marks=pytest.mark.processes), *sorted(SPREADS.keys() - {"ddp"})]
)
def test_train_loss_and_accuracy_under_dp_ddp_and_accumulation_match_those_of_single(
    spread: str,
) -> None:
    config = resolved(*COMMON, *SPREADS[spread])
    expected = means_of_single(config)
    assert len(expected) == 2
    assert all(means["acc"] > 0 for means in expected), "accuracies of zero would match trivially"
    of_ranks = (
        in_ranks(reported_means, 3, config)
        if spread == "ddp"
        else [reported_means(Ranks(), None, config)]
    )
    for actual in of_ranks:
        assert actual == [pytest.approx(means, abs=1e-6) for means in expected]


def test_train_accuracy_ignores_outputs_beyond_the_classes_of_the_data() -> None:
    task = task_of(2)
    step = PhaseStep(task, Networks(task.networks(nn.Identity())), "train")
    scores = torch.tensor([[0.0, 1.0, 9.0], [1.0, 0.0, 9.0]])
    _, numbers = step(Batch({"image": scores, "target": torch.tensor([1, 1])}))
    assert numbers["acc"].tolist() == [1.0, 0.0]


def test_autocast_wraps_every_network_but_the_loss() -> None:
    networks = {"model": nn.Linear(3, 2), "teacher": nn.Linear(3, 2), "loss": nn.Linear(2, 2)}
    wrapped = autocast(networks, torch.device("cpu"), "bf16")
    assert {name: type(network) for name, network in wrapped.items()} == {
        "model": Autocast,
        "teacher": Autocast,
        "loss": nn.Linear,
    }


def test_autocast_converts_every_output_of_a_model_to_float32() -> None:
    class TwoHeads(nn.Linear):
        def forward(self, images: torch.Tensor) -> Any:
            scores = super().forward(images)
            return scores, {"auxiliary": 2 * scores}

    scores, others = Autocast(TwoHeads(3, 2), "cpu", torch.bfloat16)(torch.ones(4, 3))
    assert scores.dtype == others["auxiliary"].dtype == torch.float32
    assert torch.equal(2 * scores, others["auxiliary"])
    # bfloat16 has 8 bits of mantissa.
    assert torch.equal(scores.bfloat16().float(), scores)


@pytest.mark.parametrize(
    ("words", "is_refused"),
    [
        (("model=resnet18", "data.batch_size=1"), True),
        (("model=resnet18", "data.batch_size=2", "parallel=dp", "parallel.devices=2"), True),
        (("model=resnet18", "data.batch_size=7", "parallel=dp", "parallel.devices=3"), True),
        (("model=resnet18", "data.batch_size=2"), False),
        # The deepest BatchNorm gets 2x2 pixels of an image.
        (("model=resnet18", "data.batch_size=1", "data.image_size=64"), False),
        (("model=resnet18", "data.batch_size=1", "model.freeze=backbone"), False),
        (("model=tiny", "data.batch_size=1"), False),
    ],
)
def test_run_is_refused_when_batch_norm_gets_one_value_per_channel(
    words: tuple[str, ...], is_refused: bool
) -> None:
    config = resolved("parallel=single", "parallel.accelerator=cpu", *words)
    with (
        pytest.raises(ValueError, match=r"^data\.batch_size=\d: .*BatchNorm")
        if is_refused
        else nullcontext()
    ):
        parts_of(config)

"""Tests of the losses and numbers of a training step, of autocast, and of the refusal of a
BatchNorm that gets one value per channel.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from tests.template.runs import parts_of, resolved, task_of
from timm_parallel.batch import Batch
from timm_parallel.parallel.networks import Autocast, Networks, PhaseStep, autocast


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

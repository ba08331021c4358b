"""plan.py predicts the values that a real run reports."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import profile

from scripts import plan as plan_script
from src.commands.plan import UNKNOWN, Plan, plan
from tests.template.runs import TINY, parts_of, resolved, task_of
from timm_parallel.batch import Batch, stretched
from timm_parallel.model.flops import count_flops
from timm_parallel.parallel.networks import Networks

LARGE = (
    *("model=resnet18", "model.name=vit_small_patch16_224", "data=folder", "data.image_size=224"),
    *("parallel=ddp", "parallel.devices=8"),
)
WORDS = [word for word in TINY if not word.startswith("parallel.")]


def plan_for(*overrides: str, devices: int = 1) -> Plan:
    return plan([*WORDS, *overrides], [devices])[0]


def costs_of(row: Plan) -> tuple[int, int]:
    """Return the FLOPs and the memory of a plan, which must be known."""
    assert row.flops_per_step is not None and row.bytes_per_device is not None
    return row.flops_per_step, row.bytes_per_device


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("model=resnet18", "optim=sgd", "train.accumulate=2"),
        ("model.freeze=backbone",),
        ("model.ema.decay=0.9", "data.augment.mixup=0.2", "model.num_classes=20"),
    ],
)
@pytest.mark.slow(seconds=2)
@pytest.mark.sample(2)
def test_plan_memory_estimate_matches_memory_allocated_by_a_training_step(
    overrides: tuple[str, ...],
) -> None:
    config = resolved("parallel=single", *overrides)
    expected = plan_for("parallel=single", *overrides)
    parts = parts_of(config)
    assert parts.state.flops is not None
    assert parts.state.flops * config.train.accumulate == costs_of(expected)[0] > 0
    assert (parts.steps_per_epoch, parts.total_steps) == (expected.steps_per_epoch, expected.steps)
    trainee, (phase,) = parts.state, parts.state.phases
    batch = next(parts.train_loader.epoch(0))
    if parts.mixing:
        batch = parts.mixing(batch)
    activations = allocated(lambda: phase.wrapped.train()(batch))
    phase.wrapped(batch)[0].mean().backward()
    phase.optimizer.step()
    state = [
        v
        for state in phase.optimizer.state.values()
        for v in state.values()
        if isinstance(v, torch.Tensor)
    ]
    averaged = trainee.ema
    real = (
        size([*trainee.model.parameters(), *trainee.model.buffers()])
        + size([p.grad for p in trainee.model.parameters() if p.grad is not None])
        + size(state)
        + (0 if averaged is None else size([*averaged.parameters(), *averaged.buffers()]))
        + activations
        + size([batch.image, batch.target])
    )
    assert expected.bytes_per_device == pytest.approx(real, rel=0.02)


def size(tensors: list[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def allocated(forward: Any) -> int:
    """Measure with the profiler how many bytes a forward pass allocates and keeps."""
    with profile(profile_memory=True) as profiler:
        loss, _ = forward()
    assert loss.requires_grad
    return sum(event.self_cpu_memory_usage for event in profiler.key_averages())


@pytest.mark.slow(seconds=3)
def test_plan_for_fsdp_divides_all_but_activations_and_images_by_the_devices() -> None:
    # Each device has four images of a batch.
    spreads = [("ddp", 4), ("fsdp", 2), ("fsdp", 4)]
    plans = [
        plan_for(
            f"parallel={name}",
            "model.ema.decay=0.9",
            f"data.batch_size={4 * devices}",
            devices=devices,
        )
        for name, devices in spreads
    ]
    whole, half, quarter = (costs_of(row)[1] for row in plans)
    # Half of the kept tensors, and a quarter of them, are missing.
    assert whole - half == pytest.approx(2 * (half - quarter), rel=1e-6)
    assert quarter < half < whole


@pytest.mark.slow(seconds=1)
def test_plan_accepts_more_devices_than_the_machine_has_and_explains_indivisible_batches() -> None:
    # accumulate=auto does not split the batch.
    words = ("data.batch_size=64", "data.limit_train=200", "train.accumulate=auto")
    plans = plan([*WORDS, *words], [1, 3, 64])
    assert [bool(row.reason) for row in plans] == [False, True, False]
    assert "63, 66" in plans[1].reason
    many = plans[2]
    assert (many.strategy, many.batch_size_per_device, many.images_per_device) == ("ddp", 1, 3)
    assert (many.steps, many.dropped_per_epoch) == (6, 8)
    (flops, memory), (flops_of_many, memory_of_many) = costs_of(plans[0]), costs_of(plans[2])
    assert 0 < memory_of_many < memory
    assert flops_of_many == flops


class RemembersItsInput(nn.Module):
    """Model that keeps a tensor of its first batch and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.drop = nn.Linear(12, 5), nn.BatchNorm1d(5), nn.Dropout(0.5)
        self.first: torch.Tensor | None = None

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.first = images if self.first is None else self.first
        outputs: torch.Tensor = self.drop(self.norm(self.layer(images.flatten(1))))
        return outputs


def test_flop_count_leaves_model_and_random_state_unchanged() -> None:
    model = RemembersItsInput()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    # A multiply-add counts as 2 FLOPs. The input needs no gradient, so the backward pass costs as
    # much as the forward pass.
    task = task_of(5)
    networks = Networks(task.networks(model))
    sample = Batch({"image": torch.zeros(2, 3, 2, 2), "target": torch.zeros(2, dtype=torch.int64)})
    assert count_flops(task, networks, stretched(sample, 7)) == 2 * 2 * 7 * 12 * 5
    assert model.first is None and model.layer.weight.grad is None
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.slow(seconds=2)
def test_plan_py_needs_no_dataset_when_images_and_classes_are_given(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """FLOPs are counted without a fused kernel. A multiply-add counts as 2, and the backward pass
    as two forward passes.
    """
    words = ("images=1281167", "classes=1000", "train.epochs=300", "--json")
    assert plan_script.main([*LARGE, *words]) == 0
    [actual] = json.loads(capfd.readouterr().out)
    assert actual["images"] == 1_281_167
    assert actual["steps"] == 300 * (1_281_167 // actual["batch_size"])
    assert actual["parameters"] == 22_050_664, "of vit_small_patch16_224 with 1,000 classes"
    # With attention, which has 2.1 GFLOPs, and the head.
    assert actual["flops_per_step"] / actual["batch_size"] == pytest.approx(27.48e9, rel=1e-3)


@pytest.mark.parametrize(
    ("word", "fix"),
    [
        ("images=1000", "images=1000: needs classes"),
        ("classes=10", "classes=10: needs images"),
        ("parallel.devices=0", "parallel.devices: '0': expected"),
        ("modle=tiny", "modle"),
    ],
)
def test_plan_py_refuses_bad_arguments_in_one_line(
    word: str, fix: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert plan_script.main([*WORDS, word]) == 2
    out, err = capfd.readouterr()
    assert out == "" and err.startswith("plan.py: ") and len(err.splitlines()) == 1
    assert fix in err


@pytest.mark.slow(seconds=4)
def test_plan_warns_about_small_batchnorm_batches() -> None:
    small = plan_for("model=resnet18", "data.batch_size=6", devices=2)
    assert any("per-device batch 3 with BatchNorm" in warning for warning in small.warnings)
    assert not any(
        "BatchNorm" in warning for warning in plan_for("data.batch_size=6", devices=2).warnings
    ), "a ViT has no BatchNorm"


def test_plan_measures_losses_that_gather_samples_and_says_when_losses_need_values(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def gather(task: Any, networks: Any, batch: Any, phase: str) -> Any:
        return task.ranks.gather_rows(networks.model(batch.image)).sum(1), {}

    def read(task: Any, networks: Any, batch: Any, phase: str) -> Any:
        scores = networks.model(batch.image)
        return scores.sum(1) * scores.detach().numpy().max(), {}

    plans = []
    for losses in (gather, read):
        monkeypatch.setattr("src.tasks.images.LossTask.losses", losses)
        plans.append(plan_for())
    assert min(costs_of(plans[0])) > 0 and plans[0].warnings == []
    assert (plans[1].flops_per_step, plans[1].bytes_per_device) == (None, None)
    assert (plans[1].steps, plans[1].warnings) == (plans[0].steps, [UNKNOWN])

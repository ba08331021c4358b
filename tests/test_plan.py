"""A plan says of a run what the run then says of itself: steps, shards, rates, and the bytes of its tensors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TINY, read_lines, resolved, run_warm
from torch.profiler import profile

from scripts import plan as plan_script
from src.engine.machine.ranks import Ranks
from src.parallel import build_strategy
from src.run.build import Run
from src.run.plan import Plan, plan

ROOT = Path(__file__).parents[1]
WORDS = [word for word in TINY if not word.startswith("parallel.")]


def one(*overrides: str, devices: int = 1) -> Plan:
    return plan([*WORDS, *overrides], [devices])[0]


@pytest.mark.parametrize(
    "overrides",
    [(), ("model=resnet18", "optim=sgd"), ("model.ema.decay=0.9", "data.augment.mixup=0.2", "model.num_classes=20")],
)
def test_bytes_are_those_that_a_step_allocates(overrides: tuple[str, ...]) -> None:
    config = resolved("parallel=single", *overrides)
    planned = one("parallel=single", *overrides).bytes
    assert planned is not None
    torch.manual_seed(0)
    parts = Run(config, build_strategy(config.parallel, Ranks(), None))
    trainee = parts.state
    images, labels = next(parts.train.epoch(0))
    targets = parts.mixing(images, labels)[1] if parts.mixing else labels
    activations = allocated(lambda: trainee.wrapped.train()(images, targets))
    trainee.wrapped(images, targets).backward()
    trainee.optimizer.step()
    state = [v for state in trainee.optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
    real = {
        "weights": size([*trainee.model.parameters(), *trainee.model.buffers()]),
        "gradients": size([p.grad for p in trainee.model.parameters() if p.grad is not None]),
        "optimizer": size(state),
        "ema": 0 if trainee.ema is None else size([*trainee.ema.module.parameters(), *trainee.ema.module.buffers()]),
        "activations": activations,
    }
    for name, found in real.items():
        assert getattr(planned, name) == pytest.approx(found, rel=0.1), name


def size(tensors: list[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def allocated(forward: Any) -> int:
    """Bytes that the allocator holds more after a forward pass, whose graph is kept: the profiler counts them, not we."""
    with profile(profile_memory=True) as profiler:
        kept = forward()
    assert kept.requires_grad
    return sum(event.self_cpu_memory_usage for event in profiler.key_averages())  # allocated minus freed


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("devices", [1, 2])
def test_steps_shards_rates_and_states_are_those_of_real_runs(devices: int, tmp_path: Path) -> None:
    words = (
        "optim.sched=cosine",
        "optim.warmup_epochs=1",
        "optim.lr_rule=linear",
        "train.epochs=4",
        "data.limit_train=200",
    )
    planned = one("parallel=ddp", *words, devices=devices)
    run_warm(tmp_path, "parallel=ddp", f"parallel.devices={devices}", *words)
    result = json.loads((tmp_path / "result.json").read_text())
    assert planned.steps == result["steps"]
    assert planned.dropped_per_epoch == result["dropped_per_epoch"]
    assert planned.images_per_device * devices == result["proof"]["indices_seen"]
    assert planned.parameters == result["parameters"]
    assert planned.bytes is not None
    sent = planned.bytes.gradients if devices > 1 else 0  # one rank has nobody to send to
    assert result["communication"]["bytes_per_step"] == sent
    assert [planned.bytes.optimizer] * devices == result["proof"]["optimizer_state_bytes"]
    rates = dict(planned.learning_rates)
    logged = {line["step"]: line["lr"] for line in read_lines(tmp_path / "metrics.jsonl") if "lr" in line}
    shared = rates.keys() & logged.keys()
    assert len(shared) >= 2
    assert all(rates[step] == pytest.approx(logged[step], rel=1e-9) for step in shared)


def test_hardware_that_is_not_here_is_planned_and_what_cannot_be_has_its_reason() -> None:
    plans = plan([*WORDS, "data.batch_size=64"], [1, 3, 64])
    assert [bool(one.reason) for one in plans] == [False, True, False]
    assert "nearest: 63, 66" in plans[1].reason
    assert (plans[2].strategy, plans[2].batch_size_per_device, plans[2].images_per_device) == ("ddp", 1, 3)
    assert plans[0].bytes is not None and plans[2].bytes is not None
    assert plans[2].bytes.activations == pytest.approx(plans[0].bytes.activations / 64, rel=0.02)
    assert plans[2].flops_per_step == plans[0].flops_per_step
    assert plans[2].bytes.buckets == plans[2].bytes.gradients


def test_what_will_go_wrong_is_said() -> None:
    small = one("model=resnet18", "data.batch_size=6", devices=2)
    assert any("per-device batch 3 with BatchNorm" in warning for warning in small.warnings)
    assert not any("BatchNorm" in warning for warning in one("data.batch_size=6", devices=2).warnings), "a ViT has none"
    weak = plan([*WORDS, "data.batch_size=null", "data.batch_size_per_device=32"], [1, 4])
    assert any("lr_rule" in warning for warning in weak[1].warnings)
    assert any("dropped" in warning for warning in one("data.batch_size=100").warnings)


@pytest.mark.slow
@pytest.mark.processes
def test_as_a_command() -> None:
    command = [sys.executable, "scripts/plan.py", "model=tiny", "parallel.devices=1,8", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert [entry["devices"] for entry in json.loads(done.stdout)] == [1, 8], done.stderr


@pytest.mark.parametrize("word", ["parallel.devices=0", "modle=tiny"])
def test_bad_words_are_refused_in_a_line(word: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert plan_script.main([word]) == 2
    out, err = capfd.readouterr()
    assert out == "" and err.startswith("plan.py: ") and len(err.splitlines()) == 1

"""What keeps the loop fast, as counts: looks at the device, work that grows with the steps, pages faulted in."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
from conftest import in_ranks, resolved
from timm.utils import ModelEmaV3
from torch import nn
from torch.distributed import PrefixStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.tensorboard import SummaryWriter

from src.engine.machine.ranks import Ranks
from src.engine.record.console import Console
from src.engine.record.result import MetricsLog
from src.models.build import build_ema
from src.parallel import build_strategy
from src.parallel.distributed import has_only_batch_norm_buffers
from src.parallel.forward import set_matmul_precision
from src.run.build import Run
from src.run.lifecycle import Training
from src.schema import EmaConfig
from src.training.loop import train_epoch
from src.training.metrics import evaluate
from src.training.state import Progress

BUSY = (  # everything that a step can be asked to do, but for what looks at every step by its nature
    "model.ema.decay=0.99",
    "optim.clip_grad=1.0",
    "train.accumulate=2",
    "data.augment.cutmix=1.0",
    "train.smoothing=0.1",
)


class Looks(TorchDispatchMode):
    """Counts what makes the processor wait for a GPU: values read, and copies to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        self.count += name in (
            "aten::_local_scalar_dense",
            "aten::is_nonzero",
            "aten::nonzero",
            "aten::equal",
            "aten::bincount",
        )
        return func(*args, **(kwargs or {}))


def looks(steps: int, *overrides: str) -> int:
    """At values, in so many steps with one boundary."""
    config = resolved(
        "parallel=single",
        "parallel.accelerator=cpu",
        "data.batch_size=8",
        "data.limit_train=640",
        "train.log_every=100",
        *overrides,
    )
    strategy = build_strategy(config.parallel, Ranks(), None)
    run = Run(config, strategy)
    with Looks() as found:
        for _ in train_epoch(run.state, run.train.epoch(0), config, strategy, run.moments, steps, run.mixing):
            pass
    return found.count


@pytest.mark.parametrize("overrides", [(), BUSY, ("train.precision=bf16",)], ids=["plain", "busy", "bf16"])
def test_no_step_waits_for_a_value(overrides: tuple[str, ...]) -> None:
    few, many = looks(5, *overrides), looks(25, *overrides)
    assert 1 <= few <= 10, "the boundary fetches its losses"
    assert many == few


def test_evaluation_waits_for_the_device_at_its_end_alone() -> None:
    """torch.bincount reads its largest value, and so does an index by a mask."""
    strategy = build_strategy(resolved("parallel=single", "parallel.accelerator=cpu").parallel, Ranks(), None)
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 10))

    def looks_at(batches: int) -> int:
        images, labels = torch.zeros(batches, 4, 3, 2, 2), torch.zeros(batches, 4, dtype=torch.int64)
        with Looks() as found:
            evaluate(
                model, zip(images, labels, strict=True), strategy=strategy, num_samples=4 * batches, num_classes=10
            )
        return found.count

    assert looks_at(2) == looks_at(20)


def test_tf32_rounds_matrix_products_and_fp32_does_not() -> None:
    before = torch.get_float32_matmul_precision()
    try:
        for word, is_set in (("tf32", "high"), ("fp32", "highest")):
            set_matmul_precision(word)
            assert torch.get_float32_matmul_precision() == is_set
    finally:
        torch.set_float32_matmul_precision(before)


def written(steps: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Calls that log, write or draw, of a run with one boundary."""
    calls: Counter[str] = Counter()

    def counted(owner: Any, name: str) -> None:
        before = getattr(owner, name)

        def call(*arguments: Any, **named: Any) -> Any:
            calls[f"{owner.__name__}.{name}"] += 1
            return before(*arguments, **named)

        monkeypatch.setattr(owner, name, call)

    counted(logging.Logger, "handle")
    for owner in (SummaryWriter, MetricsLog, Console):
        for name, member in vars(owner).items():
            if isinstance(member, FunctionType) and not name.startswith("_"):
                counted(owner, name)
    with monkeypatch.context():
        config = resolved(
            "parallel=single", "parallel.accelerator=cpu", "data.batch_size=8", "data.limit_train=640",
            f"train.max_steps={steps}", "train.epochs=1", "train.log_every=1000", "data=synthetic",
        )  # fmt: skip
        training = Training(config, folder, Ranks(), None)
        training.train()
        training.close()
    monkeypatch.undo()
    return calls


def test_nothing_is_logged_or_drawn_per_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "few").mkdir()
    (tmp_path / "many").mkdir()
    few, many = written(5, tmp_path / "few", monkeypatch), written(45, tmp_path / "many", monkeypatch)
    assert few["SummaryWriter.add_scalar"] > 3 and few["MetricsLog.write"] > 2
    for name, count in many.items():
        assert count <= few[name] + 3, f"{name}: {few[name]} calls in 5 steps, {count} in 45"


def test_averaged_weights_are_timms_without_two_lists_of_tensors_per_step(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 2))
    ours = build_ema(model, EmaConfig(decay=0.9, warmup=False))
    assert ours is not None
    theirs = ModelEmaV3(model, decay=0.9)
    calls: Counter[str] = Counter()
    listed = nn.Module.state_dict

    def state_dict(self: nn.Module, *arguments: Any, **named: Any) -> Any:
        calls["state_dict"] += 1
        return listed(self, *arguments, **named)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(1, 6):
        if step == 4:  # as a resumed run does
            model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})
        model(torch.randn(8, 3, 3, 3)).square().sum().backward()
        optimizer.step()
        theirs.update(model, step)
        with monkeypatch.context() as patch:
            patch.setattr(nn.Module, "state_dict", state_dict)
            ours.update(model, step)
        for own, other in zip(ours.module.state_dict().values(), theirs.module.state_dict().values(), strict=True):
            assert torch.equal(own, other)
    assert calls["state_dict"] <= 2 * sum(1 for _ in model.modules())


def buffers_and_bits(ranks: Ranks, store: Any, broadcast: str) -> tuple[bool, list[float]]:
    """(whether DDP sends buffers in every step, rank 0's weights and buffers after five steps)."""
    config = resolved(
        "parallel=ddp", "parallel.devices=2", "parallel.accelerator=cpu", "data.batch_size=8", "model.name=resnet10t",
        f"parallel.broadcast_buffers={broadcast}",
    )  # fmt: skip
    strategy = build_strategy(config.parallel, ranks, store)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 36, 10))
    wrapped = strategy.wrap(model, nn.CrossEntropyLoss(), None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(ranks.rank)
    for _ in range(5):
        wrapped(torch.randn(4, 3, 8, 8), torch.randint(0, 10, (4,))).backward()
        optimizer.step()
        optimizer.zero_grad()
    strategy.share_buffers(model)
    sends = bool(wrapped.broadcast_buffers if hasattr(wrapped, "broadcast_buffers") else wrapped.forward_sync_buffers)
    bits = [float(tensor.double().sum()) for tensor in model.state_dict().values()]
    strategy.close()
    return sends, bits


def test_batch_norms_buffers_are_not_sent_in_every_step_and_it_makes_no_difference() -> None:
    (quiet, loud), (others, _) = in_ranks(both_ways, 2)
    assert (quiet[0], loud[0]) == (False, True)
    assert quiet[1] == others[1] == loud[1]


def both_ways(ranks: Ranks, store: Any) -> list[tuple[bool, list[float]]]:
    return [buffers_and_bits(ranks, PrefixStore(word, store), word) for word in ("null", "true")]


def test_buffers_that_training_may_read_are_still_sent() -> None:
    assert has_only_batch_norm_buffers(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    other = nn.Linear(2, 2)
    other.register_buffer("queue", torch.zeros(3))
    assert not has_only_batch_norm_buffers(nn.Sequential(nn.BatchNorm1d(2), other))


FAULTS = """
import resource, timm, torch
from src.engine.machine.process import keep_freed_memory
torch.set_num_threads(1)
keep_freed_memory()
model = timm.create_model("resnet18", num_classes=10)
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
def step():
    model(torch.randn(16, 3, 32, 32)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
for _ in range(4):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(30):  # some ten of them need no new pages by luck
    step()
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) // 30)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="glibc's own")
@pytest.mark.processes
def test_pages_of_freed_tensors_are_used_again() -> None:
    """Without keep_freed_memory 2,500 to 9,000 pages are faulted in anew by each of these steps."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    command = [sys.executable, "-c", FAULTS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True, env=environment)
    assert int(done.stdout) < 600


ON_CUDA = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"))


@pytest.mark.parametrize("accelerator", ["cpu", pytest.param("cuda", marks=ON_CUDA)])
def test_a_steady_step_never_synchronises_with_the_gpu(accelerator: str) -> None:
    """On a CPU nothing can; there it shows that the steps are there to be run."""
    on = ("parallel=single", f"parallel.accelerator={accelerator}", "data.batch_size=8")
    config = resolved(*on, *BUSY, "train.precision=bf16", "data=synthetic")
    strategy = build_strategy(config.parallel, Ranks(), None)
    run = Run(config, strategy)

    def train(boundary: int, progress: Progress) -> None:
        """To the boundary, and no further."""
        run.state.progress, config.train.log_every = progress, boundary
        next(train_epoch(run.state, run.train.epoch(0), config, strategy, run.moments, 10**9, run.mixing))

    train(7, Progress())  # past the first step and the warm-up, where the meter waits
    progress = Progress()
    if accelerator == "cpu":
        train(8, progress)
    else:
        torch.cuda.set_sync_debug_mode("error")
        try:
            with pytest.raises(RuntimeError, match="synchroniz"):  # at the boundary, where the losses are fetched
                train(8, progress)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert progress.step == 8

"""What would go wrong on GPUs, shown without any: tensors without data on made-up devices, and CPU threads in their place."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import resolved
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.nn.parallel import comm

from src.engine.launch.failure import failure_record
from src.engine.machine.ranks import Ranks
from src.engine.record.meter import Meter
from src.models.build import build_model
from src.parallel import build_strategy
from src.run.lifecycle import Training
from src.schema import ModelConfig, ParallelConfig
from src.training import checkpoint, loop
from src.training.determinism import use_deterministic_algorithms
from src.training.finite import LossWindow
from src.training.metrics import evaluate
from src.training.moments import Moments
from src.training.state import TrainState

NEEDS_DATA = (DataDependentOutputException, DynamicOutputShapeException)  # so everything before that has worked


class ThreadInTurn(threading.Thread):
    """Tensors without data serve one thread at a time; what is a thread's own, as autocast is, stays so."""

    def start(self) -> None:
        super().start()
        self.join()


@pytest.fixture
def three_gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tensors know their device, and operations across devices fail as on GPUs; there is no data and no backward pass."""
    with FakeTensorMode():  # looks for GPUs when it begins
        _pretend(monkeypatch)
        yield


def _pretend(monkeypatch: pytest.MonkeyPatch) -> None:
    """What DataParallel and autocast ask of a machine with three GPUs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *given, **named: True)
    monkeypatch.setattr(torch.cuda, "default_generators", tuple(torch.Generator() for _ in range(3)))
    monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *given: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device=None: nullcontext())
    monkeypatch.setattr(torch.accelerator, "device_index", lambda index: nullcontext())
    monkeypatch.setattr(sys.modules["torch.nn.parallel.data_parallel"], "_check_balance", lambda devices: None)
    instead_of_threads = SimpleNamespace(Thread=ThreadInTurn, Lock=threading.Lock)
    monkeypatch.setattr(sys.modules["torch.nn.parallel.parallel_apply"], "threading", instead_of_threads)
    # torch 2.11 makes a real tensor there
    monkeypatch.setattr("torch._subclasses.fake_tensor.init_gpu_context", lambda device: None, raising=False)
    on = torch.device

    def broadcast(tensors: Any, devices: Any, *given: Any) -> Any:
        return [[tensor.to(on("cuda", index)) for tensor in tensors] for index in devices]

    def scatter(tensor: Tensor, devices: Any, sizes: Any = None, dim: int = 0, streams: Any = None) -> Any:
        chunks = zip(tensor.chunk(len(devices), dim), devices, strict=False)
        return tuple(chunk.to(on("cuda", index)) for chunk, index in chunks)

    def gather(tensors: Any, dim: int = 0, destination: Any = None, *given: Any) -> Tensor:
        return torch.cat([tensor.to(on("cuda", destination)) for tensor in tensors], dim)

    for name, instead in (("broadcast_coalesced", broadcast), ("scatter", scatter), ("gather", gather)):
        monkeypatch.setattr(comm, name, instead)


class Seen(nn.Module):
    """A linear model that notes the device and type of its replicas' outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 5)
        self.outputs: list[tuple[str, torch.dtype]] = []

    def forward(self, images: Tensor) -> Tensor:
        outputs: Tensor = self.linear(images.flatten(1))
        self.outputs.append((str(outputs.device), outputs.dtype))
        return outputs


def on_gpus(**keys: Any) -> Any:
    """The strategy of dp on made-up GPUs."""
    keys = {"strategy": "dp", "accelerator": "cuda", "threads_per_device": 1, "backend": "nccl", **keys}
    return build_strategy(ParallelConfig(**keys), Ranks(), None)


def batch(size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    return torch.zeros(size, 3, 2, 2, device=device), torch.zeros(size, dtype=torch.int64, device=device)


@pytest.mark.parametrize("device_ids", [None, [2, 0, 1]], ids=str)
@pytest.mark.parametrize("output_device", [None, 0, 1])
@pytest.mark.parametrize("loss_in_replica", [None, True])
@pytest.mark.usefixtures("three_gpus")
def test_dp_puts_loss_and_outputs_where_they_are_needed(
    device_ids: list[int] | None,
    output_device: int | None,
    loss_in_replica: bool | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    strategy = on_gpus(
        devices=len(device_ids or [0, 1]),
        device_ids=device_ids,
        output_device=output_device,
        loss_in_replica=loss_in_replica,
    )
    with strategy.device:
        model: nn.Module = Seen()
    wrapped = strategy.wrap(model, nn.CrossEntropyLoss(), None)
    state = TrainState(model, wrapped, torch.optim.SGD(model.parameters(), 0.1), None, None, None)
    monkeypatch.setattr(loop, "_backward", lambda state, loss: None)
    for accumulate in (1, 2):
        batches, moments = iter([batch(7, strategy.device)] * accumulate), Moments(Meter(7, 1), strategy.stopping)
        loss = loop._forward_backward(state, batches, accumulate, strategy, moments, None)
        window = LossWindow()
        window.add(1, loss)
        with pytest.raises(NEEDS_DATA):
            window.fetch(strategy)
        assert loss.device == strategy.device
    with pytest.raises(NEEDS_DATA):
        evaluate_with(strategy, model, None, [batch(7, strategy.device)])


def evaluate_with(strategy: Any, model: nn.Module, dtype: torch.dtype | None, batches: Any) -> Any:
    return evaluate(strategy.for_evaluation(model, dtype), batches, strategy=strategy, num_samples=7, num_classes=5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, None])
@pytest.mark.usefixtures("three_gpus")
def test_dp_evaluates_on_gpus_in_the_precision_of_training(dtype: torch.dtype | None) -> None:
    strategy = on_gpus(devices=3)
    with strategy.device:
        model = Seen()
    with torch.inference_mode(), pytest.raises(NEEDS_DATA):
        evaluate_with(strategy, model, dtype, [batch(7, strategy.device)])
    assert {device for device, _ in model.outputs} == {"cuda:0", "cuda:1", "cuda:2"}
    assert {found for _, found in model.outputs} == {dtype or torch.float32}


@pytest.mark.parametrize("spread", ["single", "dp"])
def test_evaluation_is_in_the_precision_of_training_in_every_replica(spread: str) -> None:
    """The same on CPU threads, whose autocast is as much their own."""
    config = ParallelConfig(
        strategy=spread, devices=2 if spread == "dp" else 1, accelerator="cpu", threads_per_device=1
    )
    strategy, model = build_strategy(config, Ranks(), None), Seen()
    images, labels = torch.randn(7, 3, 2, 2), torch.zeros(7, dtype=torch.int64)
    found = evaluate_with(strategy, model, torch.bfloat16, [(images, labels)])
    assert found.samples == 7
    assert {dtype for _, dtype in model.outputs} == {torch.bfloat16}


class Noisy(nn.Module):
    """Shows which of its inputs dropout has left."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.masks = nn.Parameter(torch.ones(32)), []

    def forward(self, images: Tensor) -> Tensor:
        kept = nn.functional.dropout(self.weight.expand(len(images), 32), 0.5, self.training)
        self.masks.append(kept.detach() != 0)
        return kept[:, :5] + 0 * images.flatten(1)[:, :5]


def masks_of_steps(steps: range, devices: int, accumulate: int = 1) -> list[Tensor]:
    """The dropout masks of each step, of all replicas and batches, in the order of the images."""
    strategy = build_strategy(
        ParallelConfig(strategy="dp", devices=devices, accelerator="cpu", threads_per_device=1), Ranks(), None
    )
    model = Noisy()
    wrapped = strategy.wrap(model, nn.CrossEntropyLoss(), None)
    images = torch.randn(8 * devices, 3, 2, 2)
    found = []
    for step in steps:
        loop.seed_step(0, step, strategy)
        per_batch = []
        for _ in range(accumulate):
            model.masks.clear()
            outputs = wrapped.spread(images)  # type: ignore[operator, union-attr]
            per_batch.append(outputs.detach() != 0)
        found.append(torch.cat(per_batch))
    return found


def test_dropout_under_dp_is_the_same_every_time_and_in_no_two_replicas() -> None:
    tries = [masks_of_steps(range(1, 6), devices=3, accumulate=2) for _ in range(6)]
    assert all(torch.equal(mine, first) for others in tries for mine, first in zip(others, tries[0], strict=True))
    for step in tries[0]:
        chunks = [tuple(chunk.flatten().tolist()) for chunk in step.split(8)]
        assert len(set(chunks)) == 6, "3 replicas in 2 batches"


def test_dropout_under_dp_goes_on_after_a_resume_as_it_would_have() -> None:
    whole, resumed = masks_of_steps(range(1, 9), devices=2), masks_of_steps(range(5, 9), devices=2)
    assert all(torch.equal(mine, other) for mine, other in zip(whole[4:], resumed, strict=True))


@pytest.mark.usefixtures("three_gpus")
def test_each_gpu_of_dp_draws_from_a_seed_of_its_own_in_every_step() -> None:
    strategy = on_gpus(devices=3, device_ids=[2, 0, 1])
    seeds = []
    for step in (1, 2, 1):
        loop.seed_step(7, step, strategy)
        seeds.append([generator.initial_seed() for generator in torch.cuda.default_generators])
    assert len({*seeds[0], *seeds[1]}) == 6
    assert seeds[2] == seeds[0]


@pytest.mark.parametrize("loss_in_replica", [None, True])
@pytest.mark.usefixtures("three_gpus")
def test_bytes_per_step_of_dp_count_every_batch_and_what_is_in_it(loss_in_replica: bool | None) -> None:
    strategy = on_gpus(devices=2, loss_in_replica=loss_in_replica)
    with strategy.device:
        model: nn.Module = nn.Sequential(nn.Flatten(), nn.Linear(12, 5))
        model.register_buffer("average", torch.zeros(6))
    wrapped = strategy.wrap(model, nn.CrossEntropyLoss(), None)
    wrapped(*batch(6, strategy.device))
    parameters, buffers = 4 * (60 + 5), 4 * 6
    images, targets, outputs = 4 * 3 * 12, 8 * 3, 4 * 3 * 5  # of the half on the other device
    moved = images + targets if loss_in_replica else images + 2 * outputs
    expected = 2 * parameters + buffers + moved
    assert strategy.communication_bytes(model, wrapped, 1)[0] == expected
    assert strategy.communication_bytes(model, wrapped, 3)[0] == 3 * expected


@pytest.mark.parametrize("name", ["test_efficientnet", "test_resnet", "mixnet_s", "regnetx_002"])
def test_sync_bn_changes_no_output(name: str) -> None:
    """timm's BatchNorm holds the activation after it, which torch's own converter drops."""
    built = []
    for sync_bn in (False, True):
        torch.manual_seed(0)
        built.append(build_model(ModelConfig(name=name, sync_bn=sync_bn), 5, 3, None, torch.device("cpu")).eval())
    bare, synchronised = built
    assert any(isinstance(module, nn.SyncBatchNorm) for module in synchronised.modules())
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(synchronised(images), bare(images), rtol=0, atol=0)


def test_ranks_that_share_a_gpu_or_its_number_have_memory_curves_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = build_strategy(
        ParallelConfig(strategy="single", devices=1, accelerator="cpu", threads_per_device=1), Ranks(), None
    )
    of_ranks = [[{"device": name, "peak_bytes": 1}] for name in ("cuda:0", "cuda:0", "cuda:1")]
    monkeypatch.setattr(strategy, "gather", lambda own: of_ranks)
    assert [entry["device"] for entry in strategy.memory()] == ["cuda:0_rank_0", "cuda:0_rank_1", "cuda:1"]


def test_what_a_checkpoint_holds_is_not_put_on_the_device_beside_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights' copies would lie there twice, and the optimizer's step counts would be waited for in every step."""
    (tmp_path / "checkpoints").mkdir()
    contents = {"format": 1, "model": {"weight": torch.ones(2)}, "optimizer": {"state": {0: {"step": torch.ones(())}}}}
    torch.save(contents, tmp_path / "checkpoints" / "step_1.pt")
    training: Any = object.__new__(Training)
    meter = SimpleNamespace(expect=lambda steps: None)
    training.folder = tmp_path
    training.run = SimpleNamespace(mixing=None, total_steps=2, moments=SimpleNamespace(meter=meter))
    training.state = SimpleNamespace(progress=SimpleNamespace(step=1))
    training.strategy = SimpleNamespace(
        is_first=True, device=torch.device("meta"), gather=lambda value: [value], share_state=lambda state: state
    )
    restored: list[Any] = []
    monkeypatch.setattr(checkpoint, "restore", lambda *given: restored.append(given[-1]))
    training.resume()
    tensors = [restored[0]["model"]["weight"], restored[0]["optimizer"]["state"][0]["step"]]
    assert [tensor.device.type for tensor in tensors] == ["cpu", "cpu"]


@pytest.fixture
def deterministic_here(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What `train.deterministic` sets for a process is taken back."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    yield
    torch.use_deterministic_algorithms(False)
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)


@pytest.mark.usefixtures("deterministic_here")
def test_deterministic_training_uses_nothing_else_and_trains(tmp_path: Path) -> None:
    config = resolved("parallel=single", "parallel.accelerator=cpu", "train.deterministic=true", "train.max_steps=1")
    training = Training(config, tmp_path, Ranks(), None)
    assert torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
    assert not torch.backends.cudnn.benchmark and os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    training.train()
    training.close()


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.usefixtures("deterministic_here", "three_gpus")
def test_a_gpu_tries_kernels_out_unless_it_must_be_deterministic(deterministic: bool) -> None:
    if deterministic:
        use_deterministic_algorithms()
    on_gpus(devices=3)
    assert torch.backends.cudnn.benchmark == (not deterministic)


@pytest.mark.usefixtures("deterministic_here")
def test_an_operation_without_a_deterministic_algorithm_is_named(tmp_path: Path) -> None:
    use_deterministic_algorithms()
    config = resolved("parallel=single", "parallel.accelerator=cpu", "train.deterministic=true")
    try:
        torch.zeros(3).put_(torch.tensor([0]), torch.ones(1))
    except RuntimeError as error:
        said = failure_record(error, config, Ranks(), tmp_path / "log")["reason"]
    assert "train.deterministic=true: put_ has no deterministic algorithm" in said

"""GPU behavior without GPUs: fake tensors or CPU threads stand for CUDA devices."""

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
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.nn.parallel import comm
from torch.utils._pytree import tree_leaves

from src.models.build import build_model
from src.schema import ModelConfig
from tests.template.runs import evaluate_batches, resolved, task_of, train_run
from timm_parallel.batch import Batch
from timm_parallel.faults.failure import failure_record
from timm_parallel.keys import ResolvedConfig, ResolvedParallel, ResolvedTrain
from timm_parallel.machine import hardware
from timm_parallel.machine.hardware import Driver
from timm_parallel.machine.ranks import Ranks
from timm_parallel.parallel.networks import Autocast, Networks, PhaseStep
from timm_parallel.parallel.strategy import build_strategy, use_deterministic_algorithms
from timm_parallel.run import checkpoint
from timm_parallel.run.meter import Meter, StepHooks
from timm_parallel.run.parts import Learning, Phase
from timm_parallel.run.progress import Progress
from timm_parallel.run.step import MetricWindow, Step, seed_step

# Fake tensors raise these errors where an operation needs the data of a tensor. All earlier
# operations have then succeeded.
NEEDS_DATA = (DataDependentOutputException, DynamicOutputShapeException)


class ThreadInTurn(threading.Thread):
    """Thread that runs to its end in `start`, because fake tensors support only one thread at a
    time. Each thread still has its own autocast state.
    """

    def start(self) -> None:
        super().start()
        self.join()


@pytest.fixture
def three_gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Simulate three GPUs with fake tensors, which have no data and no backward pass."""
    # FakeTensorMode looks for GPUs when it starts. Start this mode before GPUs are simulated,
    # because simulated GPUs have no driver.
    with FakeTensorMode():
        # Without the setting avoid_device_init, FakeTensorMode would initialize the missing CUDA
        # driver in every operation.
        monkeypatch.setattr(
            FakeTensorMode, "avoid_device_init", not torch.cuda.is_available(), raising=False
        )
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
        # Tensor.to initializes CUDA in the thread of a replica, which fails without a driver.
        monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *given, **named: True)
        monkeypatch.setattr(
            torch.cuda, "default_generators", tuple(torch.Generator() for _ in range(3))
        )
        monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
        monkeypatch.setattr(
            torch.accelerator, "current_accelerator", lambda *given: torch.device("cuda")
        )
        monkeypatch.setattr(torch.accelerator, "current_stream", lambda device=None: nullcontext())
        monkeypatch.setattr(torch.accelerator, "device_index", lambda index: nullcontext())
        monkeypatch.setattr(
            sys.modules["torch.nn.parallel.data_parallel"], "_check_balance", lambda devices: None
        )
        instead_of_threads = SimpleNamespace(Thread=ThreadInTurn, Lock=threading.Lock)
        monkeypatch.setattr(
            sys.modules["torch.nn.parallel.parallel_apply"], "threading", instead_of_threads
        )
        # In torch 2.11, init_gpu_context creates a real CUDA tensor, which fails without a driver.
        monkeypatch.setattr(
            "torch._subclasses.fake_tensor.init_gpu_context", lambda device: None, raising=False
        )
        on = torch.device

        def broadcast(tensors: Any, devices: Any, *given: Any) -> Any:
            return [[tensor.to(on("cuda", index)) for tensor in tensors] for index in devices]

        def scatter(
            tensor: Tensor, devices: Any, sizes: Any = None, dim: int = 0, streams: Any = None
        ) -> Any:
            chunks = zip(tensor.chunk(len(devices), dim), devices, strict=False)
            return tuple(chunk.to(on("cuda", index)) for chunk, index in chunks)

        def gather(tensors: Any, dim: int = 0, destination: Any = None, *given: Any) -> Tensor:
            return torch.cat([tensor.to(on("cuda", destination)) for tensor in tensors], dim)

        for name, instead in (
            ("broadcast_coalesced", broadcast),
            ("scatter", scatter),
            ("gather", gather),
        ):
            monkeypatch.setattr(comm, name, instead)
        yield


class Seen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 5)
        self.outputs: list[tuple[str, torch.dtype]] = []

    def forward(self, images: Tensor) -> Tensor:
        outputs: Tensor = self.linear(images.flatten(1))
        self.outputs.append((str(outputs.device), outputs.dtype))
        return outputs


def on_gpus(**keys: Any) -> Any:
    keys = {
        "strategy": "dp",
        "accelerator": "cuda",
        "threads_per_device": 1,
        "backend": "nccl",
        **keys,
    }
    train = ResolvedTrain(precision="fp32")
    return build_strategy(ResolvedConfig(parallel=ResolvedParallel(**keys), train=train))


def test_strategy_error_has_the_reason_of_the_driver_or_of_torch_when_cuda_is_unusable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def init() -> None:
        raise RuntimeError("torch's reason")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)
    for problem in ("the driver's reason", None):
        driver = Driver(problem=problem)
        monkeypatch.setattr(hardware, "cuda", lambda driver=driver: driver)
        with pytest.raises(RuntimeError, match=r"parallel\.accelerator=cpu") as failure:
            on_gpus(devices=1)
        assert (problem or "torch's reason") in str(failure.value)


def batch(size: int, device: torch.device) -> Batch:
    labels = torch.zeros(size, dtype=torch.int64, device=device)
    return Batch({"image": torch.zeros(size, 3, 2, 2, device=device), "target": labels})


@pytest.mark.sample(4)
@pytest.mark.parametrize("device_ids", [None, [2, 0, 1]], ids=str)
@pytest.mark.parametrize("output_device", [None, 0, 1])
@pytest.mark.usefixtures("three_gpus")
def test_dp_places_the_training_loss_on_the_configured_output_device(
    device_ids: list[int] | None,
    output_device: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    strategy = on_gpus(
        devices=len(device_ids or [0, 1]), device_ids=device_ids, output_device=output_device
    )
    with strategy.device:
        model: nn.Module = Seen()
    task = task_of(5)
    step = PhaseStep(task, Networks(task.networks(model)), "train")
    wrapped = strategy.wrap(step)
    learning = Learning(torch.optim.SGD(model.parameters(), 0.1), None)
    named = dict(model.named_parameters())
    phase = Phase("train", step, wrapped, named, learning, None, strategy.communication(wrapped))
    hooks = StepHooks(Meter(7, 1), strategy.group.stop)
    losses: list[Tensor] = []
    monkeypatch.setattr(Tensor, "backward", lambda loss: losses.append(loss))
    for accumulate in (1, 2):
        parts: Any = SimpleNamespace(
            config=resolved(
                "parallel=single",
                "parallel.accelerator=cpu",
                f"train.accumulate={accumulate}",
                "train.log_every=1",
            ),
            progress=Progress(step_in_epoch=1),
            steps_per_epoch=2,
            state=SimpleNamespace(phases=[phase]),
            strategy=strategy,
            task=task,
            hooks=hooks,
        )
        window = MetricWindow(strategy.device, parts.progress)
        whole = Step(parts, iter(()), window)
        for _ in range(accumulate):
            whole.backward(batch(7, strategy.device))
        with pytest.raises(NEEDS_DATA):
            window.fetch(strategy.group, is_logged=True)
    assert [loss.device for loss in losses] == [strategy.device] * 3
    with pytest.raises(NEEDS_DATA):
        evaluate_with(strategy, model, None, [batch(7, strategy.device)])


def evaluate_with(strategy: Any, model: nn.Module, dtype: torch.dtype | None, batches: Any) -> Any:
    autocast = Autocast(model, strategy.device.type, dtype)
    return evaluate_batches(autocast, batches, strategy, 7, 5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, None])
@pytest.mark.usefixtures("three_gpus")
def test_dp_evaluation_uses_every_gpu_and_the_training_precision(dtype: torch.dtype | None) -> None:
    strategy = on_gpus(devices=3)
    with strategy.device:
        model = Seen()
    with torch.inference_mode(), pytest.raises(NEEDS_DATA):
        evaluate_with(strategy, model, dtype, [batch(7, strategy.device)])
    assert {device for device, _ in model.outputs} == {"cuda:0", "cuda:1", "cuda:2"}
    assert {output_dtype for _, output_dtype in model.outputs} == {dtype or torch.float32}


@pytest.mark.usefixtures("three_gpus")
def test_dp_seeds_each_gpu_differently_in_every_step() -> None:
    strategy = on_gpus(devices=3, device_ids=[2, 0, 1])
    seeds = []
    for step in (1, 2, 1):
        seed_step(7, step, 0, strategy.devices)
        seeds.append([generator.initial_seed() for generator in torch.cuda.default_generators])
    assert len({*seeds[0], *seeds[1]}) == 6
    assert seeds[2] == seeds[0]


@pytest.mark.parametrize("name", ["test_efficientnet", "regnetx_002"])
def test_sync_bn_does_not_change_eval_outputs_of_timm_models(name: str) -> None:
    """BatchNorm layers of timm include the activation. torch's converter to SyncBatchNorm would
    drop this activation.
    """
    built = []
    for sync_bn in (False, True):
        torch.manual_seed(0)
        built.append(
            build_model(
                ModelConfig(name=name, sync_bn=sync_bn), 5, 3, None, torch.device("cpu")
            ).eval()
        )
    bare, synchronized = built
    assert any(isinstance(module, nn.SyncBatchNorm) for module in synchronized.modules())
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(synchronized(images), bare(images), rtol=0, atol=0)


@pytest.mark.usefixtures("three_gpus")
def test_checkpoint_file_has_only_cpu_tensors_and_stores_tied_weights_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved: list[Any] = []

    def write(contents: dict[str, Any], path: Path) -> None:
        saved.append(contents)
        path.touch()

    monkeypatch.setattr(torch, "save", write)
    tied, here = torch.zeros(4, device="cuda"), torch.zeros(2, device="cpu")
    contents = {
        "model": {"in": tied, "out": tied.detach(), "part": tied[:2]},
        "phases": {"train": {"in": {"step": torch.zeros((), device="cuda:1"), "mean": here}}},
        "buffers_by_rank": {"model": torch.zeros(2, 3, device="cuda")},
        **{"classes": ["a"], "made_by": {}},
        "progress": {"step": 1, "epoch": 0, "best_values": {}},
    }
    checkpoint.save(tmp_path, contents, 1, keep=1, is_best=False)
    leaves = [leaf for leaf in tree_leaves(saved[0]) if isinstance(leaf, Tensor)]
    assert {tensor.device.type for tensor in leaves} == {"cpu"}
    assert saved[0]["model"]["in"] is saved[0]["model"]["out"]
    assert saved[0]["model"]["part"].shape == (2,)
    assert saved[0]["phases"]["train"]["in"]["mean"] is here, (
        "expected no copy of what is in CPU memory"
    )


@pytest.fixture
def deterministic_here(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Undo the process-wide settings of `train.deterministic` after the test."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    yield
    torch.use_deterministic_algorithms(False)
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)


@pytest.mark.usefixtures("deterministic_here")
def test_deterministic_training_uses_deterministic_algorithms_or_names_the_operation_without_one(
    tmp_path: Path,
) -> None:
    config = resolved(
        "parallel=single",
        "parallel.accelerator=cpu",
        "train.deterministic=true",
        "train.max_steps=1",
    )
    train_run(config, tmp_path)
    assert (
        torch.are_deterministic_algorithms_enabled()
        and not torch.is_deterministic_algorithms_warn_only_enabled()
    )
    assert not torch.backends.cudnn.benchmark and os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    with pytest.raises(RuntimeError) as raised:
        torch.zeros(3).put_(torch.tensor([0]), torch.ones(1))
    reason = failure_record(raised.value, config, Ranks(), tmp_path / "log")["reason"]
    assert "train.deterministic=false" in reason and "put_" in reason


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.usefixtures("deterministic_here", "three_gpus")
def test_cudnn_benchmark_mode_is_enabled_unless_training_is_deterministic(
    deterministic: bool,
) -> None:
    if deterministic:
        use_deterministic_algorithms()
    on_gpus(devices=3)
    assert torch.backends.cudnn.benchmark == (not deterministic)

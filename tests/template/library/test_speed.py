"""Cost of the training loop: reads of tensor values, sent buffers, and model.compile."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import PrefixStore
from torch.utils._python_dispatch import TorchDispatchMode

from src.schema import COMPILE_MODES
from src.train.build import compile_network
from tests.template.runs import (
    cpu_strategy,
    evaluate_batches,
    parts_of,
    resolved,
    take_steps,
    task_of,
    train_run,
)
from timm_parallel.batch import Batch
from timm_parallel.machine.ranks import Ranks
from timm_parallel.parallel.distributed import has_only_batch_norm_buffers
from timm_parallel.parallel.group import share_buffers
from timm_parallel.parallel.networks import PhaseStep
from timm_parallel.parallel.strategy import build_strategy
from timm_parallel.run import checkpoint
from timm_parallel.run.parts import build_networks
from timm_parallel.run.progress import Progress
from timm_parallel.testing.gpu import ONLY_CUDA, error_on_waits
from timm_parallel.testing.ranks import in_ranks

# These options add work to a training step. None of them needs the CPU to read tensor values.
BUSY = (
    "model.ema.decay=0.99",
    "optim.clip_grad=1.0",
    "train.accumulate=2",
    "data.augment.cutmix=1.0",
    "train.smoothing=0.1",
)

# These options draw random numbers for each image.
DRAWN = (
    "data.augment.crop_padding=4",
    "data.augment.hflip=0.5",
    "data.augment.reprob=0.5",
    "data.augment.recount=2",
    "data.augment.mixup=0.8",
    "data.augment.cutmix=1.0",
    "data.augment.mixup_mode=elem",
    "optim.clip_grad=0.01",
    "optim.clip_mode=agc",
)


class ValueReads(TorchDispatchMode):
    """Dispatch mode of torch that counts operations that make the CPU wait for a GPU, such as
    reads of tensor values and copies to the host.
    """

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


def count_reads(steps: int, *overrides: str) -> int:
    """Count the tensor values that the CPU reads in `steps` steps, one of them logged."""
    config = resolved(
        "parallel=single",
        "parallel.accelerator=cpu",
        "data.batch_size=8",
        "data.limit_train=640",
        "train.log_every=100",
        *overrides,
    )
    run = parts_of(config)
    run.steps_per_epoch = steps
    with ValueReads() as reads:
        assert len(list(take_steps(run))) == 1
    return reads.count


@pytest.mark.parametrize(
    "overrides", [(*BUSY, "train.precision=bf16"), DRAWN], ids=["busy", "drawn"]
)
@pytest.mark.slow(seconds=2)
def test_training_steps_between_log_steps_read_no_tensor_values_from_the_device(
    overrides: tuple[str, ...],
) -> None:
    few, many = count_reads(4, *overrides), count_reads(10, *overrides)
    assert 1 <= few <= 10, "the sync step fetches its losses"
    assert many == few


@pytest.mark.slow(seconds=1)
def test_evaluation_of_more_batches_does_not_read_more_tensor_values_from_the_device() -> None:
    """An evaluation may read values only once, at its end. For example, torch.bincount or
    indexing with a mask would read values in every batch.
    """
    strategy, model = cpu_strategy(), nn.Sequential(nn.Flatten(), nn.Linear(12, 10))

    def reads_of(batches: int) -> int:
        images, labels = (
            torch.zeros(batches, 4, 3, 2, 2),
            torch.zeros(batches, 4, dtype=torch.int64),
        )
        with ValueReads() as reads:
            evaluate_batches(model, zip(images, labels, strict=True), strategy, 4 * batches, 10)
        return reads.count

    assert reads_of(2) == reads_of(20)


def test_train_precision_sets_the_float32_matmul_precision_of_torch() -> None:
    before = torch.get_float32_matmul_precision()
    try:
        for precision, expected in (("tf32", "high"), ("fp32", "highest")):
            config = resolved("parallel=single")
            config.train.precision = precision
            parts_of(config)
            assert torch.get_float32_matmul_precision() == expected
    finally:
        torch.set_float32_matmul_precision(before)


def buffers_and_bits(ranks: Ranks, store: Any, broadcast: str) -> tuple[bool, list[float]]:
    """Train five DDP steps; return whether it sends buffers, and sums of all tensors."""
    config = resolved(
        "parallel=ddp", "parallel.devices=2", "parallel.accelerator=cpu", "data.batch_size=8", "model.name=resnet10t",  # noqa: E501
        f"parallel.broadcast_buffers={broadcast}",
    )  # fmt: skip
    strategy = build_strategy(config, ranks, store)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 36, 10)
    )
    task = task_of(10)
    wrapped = strategy.wrap(PhaseStep(task, build_networks(task, model, strategy.device), "train"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(ranks.rank)
    for _ in range(5):
        fields = {"image": torch.randn(4, 3, 8, 8), "target": torch.randint(0, 10, (4,))}
        wrapped(Batch(fields))[0].mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    share_buffers(model, strategy.group, averages=False)
    sends = bool(
        wrapped.broadcast_buffers
        if hasattr(wrapped, "broadcast_buffers")
        else wrapped.forward_sync_buffers
    )
    bits = [float(tensor.double().sum()) for tensor in model.state_dict().values()]
    strategy.group.close()
    return sends, bits


@pytest.mark.slow(seconds=2)
def test_ddp_results_are_bit_identical_with_and_without_sending_batchnorm_buffers() -> None:
    (default, sending), (default_of_rank_1, _) = in_ranks(both_ways, 2)
    assert (default[0], sending[0]) == (False, True)
    assert default[1] == default_of_rank_1[1] == sending[1]


def both_ways(ranks: Ranks, store: Any) -> list[tuple[bool, list[float]]]:
    return [buffers_and_bits(ranks, PrefixStore(value, store), value) for value in ("null", "true")]


def test_has_only_batch_norm_buffers_is_false_for_a_model_with_a_custom_buffer() -> None:
    assert has_only_batch_norm_buffers(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    other = nn.Linear(2, 2)
    other.register_buffer("queue", torch.zeros(3))
    assert not has_only_batch_norm_buffers(nn.Sequential(nn.BatchNorm1d(2), other))


@pytest.mark.slow(seconds=1)
@pytest.mark.parametrize("accelerator", ONLY_CUDA)
@pytest.mark.parametrize(
    "options",
    [
        (*BUSY, "train.precision=bf16"),
        (*DRAWN, "train.precision=fp16"),
        (
            "data.augment.reprob=0.5",
            "data.augment.remode=const",
            "optim.clip_grad=1.0",
            "optim.clip_mode=value",
            *("data.augment.mixup=0.8", "data.augment.cutmix=1.0", "data.augment.mixup_mode=pair"),
        ),
    ],
    ids=["busy_bf16", "drawn_fp16", "const_value_pair"],
)
def test_training_step_between_log_steps_does_not_wait_for_the_gpu(
    options: tuple[str, ...], accelerator: str
) -> None:
    """Torch raises an error when a step synchronizes."""
    on = ("parallel=single", f"parallel.accelerator={accelerator}", "data.batch_size=8")
    config = resolved(*on, *options, "data=synthetic")
    run = parts_of(config)
    run.steps_per_epoch = 10**9

    def train(sync_step: int, progress: Progress) -> None:
        """Train up to the given step, which is the next one that is logged."""
        run.state.progress, config.train.log_every = progress, sync_step
        next(take_steps(run))

    # Train the first steps outside of the check, because the throughput meter waits for the GPU
    # after the first step and after the warm-up.
    train(7, Progress())
    progress = Progress()
    # The logged step must synchronize, because it reads the losses. The error shows that the check
    # works.
    with pytest.raises(RuntimeError, match="synchroniz"), error_on_waits(accelerator):
        train(8, progress)
    assert progress.step == 8


CPU, CUDA = torch.device("cpu"), torch.device("cuda")
COMMON = (
    "data.batch_size=8",
    "model.kwargs.depth=1",
    "model.ema.decay=0.9",
    "optim=sgd",
    "optim.lr=0.005",
)


def has_compiler() -> bool:
    # Import inside the function, because this import takes several seconds.
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except RuntimeError:
        return False
    return True


def train(ranks: Ranks, store: Any, folder: str, backend: str, *overrides: str) -> bool:
    """Train a run, and resume it if it has one rank. Return True if torch has compiled graphs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", partial(torch.compile, backend=backend))
        for steps in (2, 4) if ranks.world_size == 1 else (4,):
            config = resolved(*COMMON, *overrides, f"train.max_steps={steps}")
            train_run(config, Path(folder), ranks, store)
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and dynamo.counters["stats"]["unique_graphs"] > 0


@pytest.mark.slow(seconds=8)
@pytest.mark.parametrize(
    ("strategy", "backend"),
    [
        # This backend differs from inductor, the default, only in that it writes no C++ code.
        ("single", "aot_eager"),
        pytest.param("ddp", "inductor", marks=pytest.mark.nightly),
    ],
)
def test_compiled_training_with_a_resume_matches_uncompiled_training(
    tmp_path: Path, strategy: str, backend: str
) -> None:
    """Weights and averaged weights have equal names. Their values agree up to rounding, because a
    compiled kernel adds numbers in another order.
    """
    if not has_compiler():
        pytest.skip("torch.compile needs a C++ compiler on a CPU")
    devices = 2 if strategy == "ddp" else 1
    of_modes = []
    for mode in ("false", "true"):
        folder = tmp_path / mode
        folder.mkdir()
        words = (f"parallel={strategy}", f"parallel.devices={devices}", f"model.compile={mode}")
        compiled = in_ranks(train, devices, str(folder), backend, *words, timeout=600)
        assert compiled == [mode == "true"] * devices
        saved = checkpoint.load(folder / "checkpoints" / "last.pt")
        assert saved["progress"]["step"] == 4
        of_modes.append({"model": saved["model"], **saved["averages"]})
    for part in ("model", "ema"):
        eager, compiled_part = (of_mode[part] for of_mode in of_modes)
        assert list(compiled_part) == list(eager)
        for name, tensor in eager.items():
            torch.testing.assert_close(
                compiled_part[name], tensor, rtol=1e-4, atol=1e-6, msg=f"{part} {name}"
            )


@pytest.mark.slow(seconds=1)
def test_model_compile_mode_is_passed_to_torch_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []

    def record(model: nn.Module, **options: Any) -> nn.Module:
        given.append(options)
        return model

    monkeypatch.setattr(torch, "compile", record)
    model = nn.Linear(2, 2)
    assert compile_network(model, False) is model and given == []
    for mode in ("true", *COMPILE_MODES):
        compile_network(model, resolved(f"model.compile={mode}").model.compile)
    assert given == [{"mode": None}, *({"mode": mode} for mode in COMPILE_MODES)]
    assert set(COMPILE_MODES) <= set(torch._inductor.list_mode_options())

"""Test dp on a CPU, which runs its replicas in threads. Gradients, statistics, exceptions and
chunks must be as with torch's DataParallel.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from timm_parallel.batch import Batch
from timm_parallel.keys import ResolvedParallel
from timm_parallel.machine.ranks import Ranks
from timm_parallel.parallel.data_parallel import DataParallelStrategy, ThreadedDataParallel
from timm_parallel.parallel.networks import Autocast, Networks, PhaseStep
from timm_parallel.parallel.strategy import chunk_sizes
from timm_parallel.task import Task


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3))
        self.scale = nn.Parameter(torch.ones(3))
        self.register_buffer("unused", None)

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images) * self.scale


class Recurrent(nn.Module):
    """Model with torch.nn.LSTM. An LSTM keeps a second list of its weights, which replicas must
    not share.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(2, 4, batch_first=True, bidirectional=True), nn.Linear(8, 3)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.lstm(images.view(-1, 3, 2))[0].mean(1))  # type: ignore[no-any-return]


class OneLoss(Task[Any]):
    """Task with a model, and a loss of outputs and targets."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor] | None = None) -> None:
        self.loss = loss

    def losses(self, networks: Any, batch: Batch, phase: str) -> tuple[Tensor, dict[str, Tensor]]:
        outputs = networks.model(batch.image)
        targets = batch.target.to(outputs.device)
        loss = networks.loss if self.loss is None else self.loss
        return loss(outputs, targets), {"first": outputs.detach()[:, 0]}


def step_of(model: nn.Module, loss: Any) -> PhaseStep:
    """Build a step with a loss, which is a network if it is a module."""
    if isinstance(loss, nn.Module):
        return PhaseStep(OneLoss(), Networks({"model": model, "loss": loss}), "train")
    return PhaseStep(OneLoss(loss), Networks({"model": model}), "train")


def batch_of(images: Tensor, labels: Tensor) -> Batch:
    return Batch({"image": images, "target": labels})


def strategy(devices: int) -> DataParallelStrategy:
    config = ResolvedParallel(
        strategy="dp", devices=devices, accelerator="cpu", threads_per_device=1
    )
    return DataParallelStrategy(config, Ranks())


@pytest.mark.sample(4)
@pytest.mark.parametrize(("batch", "devices"), [(8, 2), (7, 3), (2, 3), (5, 1)])
@pytest.mark.parametrize("model", [Small, Recurrent])
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_gradients_of_dp_with_threads_on_cpu_equal_those_of_the_unwrapped_model(
    model: type[nn.Module], batch: int, devices: int, reduction: str
) -> None:
    torch.manual_seed(0)
    bare = model()
    copied = copy.deepcopy(bare)
    images, labels = torch.randn(batch, 6), torch.randint(0, 3, (batch,))
    expected = nn.functional.cross_entropy(bare(images), labels)
    expected.backward()
    step = step_of(copied, nn.CrossEntropyLoss(reduction=reduction))
    wrapped = strategy(devices).wrap(step)
    losses, numbers = wrapped(batch_of(images, labels))
    loss = losses.mean()
    loss.backward()
    assert numbers["first"].tolist() == pytest.approx(bare(images)[:, 0].tolist(), abs=1e-6)
    assert loss.item() == pytest.approx(expected.item(), abs=1e-6)
    for (name, ours), theirs in zip(copied.named_parameters(), bare.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None
        assert torch.allclose(ours.grad, theirs.grad, rtol=1e-6, atol=1e-6), name


def test_dp_replicas_in_threads_run_concurrently_even_when_the_model_draws_random_numbers() -> None:
    # The barrier raises an error unless three threads wait there at the same time.
    together = threading.Barrier(3, timeout=10)
    seen = []

    class Meeting(nn.Module):
        def forward(self, chunk: Tensor) -> Tensor:
            together.wait()
            seen.append((threading.get_ident(), len(chunk), torch.get_num_threads()))
            torch.rand(1)
            return chunk

    spread = ThreadedDataParallel(Meeting(), 3, 1, 0)
    assert torch.equal(spread(torch.arange(8)), torch.arange(8)), (
        "expected outputs in the order of the chunks"
    )
    assert len({thread for thread, _, _ in seen} - {threading.get_ident()}) == 3
    assert sorted(size for _, size, _ in seen) == [2, 3, 3]
    assert {threads for _, _, threads in seen} == {1}


def test_batchnorm_statistics_of_dp_with_threads_come_from_the_first_replica() -> None:
    torch.manual_seed(0)
    images = torch.randn(8, 4)
    alone, spread = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
    threads = torch.get_num_threads()
    # Use one thread, as each replica does. The order of additions depends on the number of threads,
    # and the results must be equal bit for bit.
    torch.set_num_threads(1)
    alone(images[:4])
    torch.set_num_threads(threads)
    ThreadedDataParallel(spread, 2, 1, 0)(images)
    for name in ("running_mean", "running_var"):
        assert torch.equal(spread.get_buffer(name), alone.get_buffer(name))
    assert spread.num_batches_tracked == 1


def test_exception_in_a_replica_thread_of_dp_is_raised_in_the_main_thread() -> None:
    class Picky(nn.Module):
        def forward(self, chunk: Tensor) -> Tensor:
            if (chunk < 0).any():
                raise ZeroDivisionError("a negative image")
            return chunk

    spread = ThreadedDataParallel(Picky(), 2, 1, 0)
    with pytest.raises(ZeroDivisionError, match="a negative image"):
        spread(torch.tensor([1.0, 1.0, -1.0, 1.0]))
    assert spread(torch.ones(4)).sum() == 4


def test_dp_refuses_a_task_with_a_network_next_to_its_model() -> None:
    networks = Networks({"model": Small(), "teacher": Small()})
    with pytest.raises(ValueError, match=r"parallel=dp: .*teacher.*parallel=ddp"):
        strategy(2).wrap(PhaseStep(OneLoss(), networks, "train"))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation_with_dp_replicas_in_threads_does_not_build_an_autograd_graph(
    mode: Callable[[], Any],
) -> None:
    torch.manual_seed(0)
    model = Small().eval()
    images = torch.randn(7, 6)
    with mode():
        outputs = strategy(3).for_evaluation(Networks({"model": model}))["model"](images)
        assert torch.allclose(outputs, model(images), atol=1e-6)
    assert not outputs.requires_grad


@pytest.mark.parametrize(
    ("batch", "devices", "chunks"), [(8, 2, [4, 4]), (7, 3, [3, 3, 1]), (4, 3, [2, 2])]
)
def test_dp_splits_a_batch_into_the_chunk_sizes_that_result_json_states(
    batch: int, devices: int, chunks: list[int]
) -> None:
    assert chunk_sizes(batch, devices) == chunks
    seen = []

    class Counted(nn.Module):
        def forward(self, chunk: Tensor) -> Tensor:
            seen.append(len(chunk))
            return chunk

    networks = strategy(devices).for_evaluation(Networks({"model": Counted()}))
    networks["model"](torch.zeros(batch, 4))
    assert sorted(seen, reverse=True) == chunks


def test_autocast_applies_inside_the_replica_threads_of_dp() -> None:
    seen = []

    class Typed(nn.Linear):
        def forward(self, chunk: Tensor) -> Tensor:
            outputs = super().forward(chunk)
            seen.append(outputs.dtype)
            return outputs

    step = step_of(Autocast(Typed(4, 3), "cpu", torch.bfloat16), nn.CrossEntropyLoss())
    batch = batch_of(torch.randn(4, 4), torch.zeros(4, dtype=torch.long))
    strategy(2).wrap(step)(batch)[0].backward()
    assert seen == [torch.bfloat16] * 2

"""Test replicas: those of dp on a CPU run in threads, and must act as with torch's DataParallel.
Those of ddp share BatchNorm statistics (parallel.dist_bn), and may differ only slightly, only after
training, and only on different GPU models. Averaged weights are those of timm.
"""

from __future__ import annotations

import copy
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small.model import Tiny
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.distributed import PrefixStore

from timm_parallel.batch import Batch
from timm_parallel.errors import ReplicasDifferError
from timm_parallel.keys import ResolvedParallel
from timm_parallel.machine.ranks import Ranks
from timm_parallel.parallel.data_parallel import DataParallelStrategy, ThreadedDataParallel
from timm_parallel.parallel.networks import Autocast, Networks, PhaseStep, build_ema
from timm_parallel.parallel.strategy import build_strategy, chunk_sizes
from timm_parallel.run import replica_checks
from timm_parallel.run.replica_checks import check_replicas_at_end, check_replicas_at_start
from timm_parallel.task import Task
from timm_parallel.testing.ranks import in_ranks
from timm_parallel.tests.small_runs import resolved, start_run, take_steps


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


# Module name under which configs find this file, because they may name only classes of small/.
HERE = "small.replicas_of_test"
sys.modules[HERE] = sys.modules[__name__]


class Normed(Tiny):
    __module__ = HERE

    def __init__(self, outputs: int, width: int) -> None:
        super().__init__(outputs, width)
        self.features.insert(1, nn.BatchNorm2d(width))


def evaluated_and_own_statistics(
    ranks: Ranks, store: Any, folder: Path, dist_bn: str | None
) -> tuple[list[float], list[float]]:
    """Train one epoch under ddp. Return the running statistics of BatchNorm after the evaluation,
    for which the ranks have shared them, and those from the images of this rank alone. All ranks
    must call this function.
    """
    # Use a learning rate so low that the weights do not change. The BatchNorm statistics then
    # depend only on the images.
    overrides = (f"model.name={HERE}.Normed", "optim.lr=1e-12", "train.epochs=1")
    given = () if dist_bn is None else (f"parallel.dist_bn={dist_bn}",)
    config = resolved("parallel=ddp", "parallel.devices=2", *overrides, *given)
    run = start_run(config, folder, ranks, store)
    alone = copy.deepcopy(run.parts.state.model).train()
    for batch in run.parts.train_loader.epoch(0):
        alone(batch.image)
    for _ in take_steps(run):
        pass
    return averages(run.parts.state.model), averages(alone)


def averages(model: nn.Module) -> list[float]:
    return torch.cat(
        [value.flatten() for name, value in model.named_buffers() if "running" in name]
    ).tolist()


@pytest.mark.slow(seconds=2)
@pytest.mark.processes
@pytest.mark.parametrize("dist_bn", ["reduce", "broadcast", None])
@pytest.mark.sample(2)
def test_dist_bn_averages_batchnorm_statistics_of_ranks_after_an_epoch_or_copies_those_of_rank_0(
    tmp_path: Path, dist_bn: str | None
) -> None:
    of_ranks = in_ranks(evaluated_and_own_statistics, 2, tmp_path, dist_bn, timeout=120)
    (evaluated, own), (evaluated_on_1, own_on_1) = of_ranks
    assert evaluated == evaluated_on_1
    # The ranks differ, or the statistics of rank 0 would pass too.
    assert own != pytest.approx(own_on_1, rel=0.01)
    mean = [(value + other) / 2 for value, other in zip(own, own_on_1, strict=True)]
    expected = mean if dist_bn == "reduce" else own
    assert evaluated == pytest.approx(expected, rel=1e-4, abs=1e-5)


def checked(
    ranks: Ranks, store: Any, kinds: list[str], apart: float, check: Any = check_replicas_at_end
) -> Any:
    """Check a model that differs between two ranks. Return the result, or the error message."""
    config = resolved("parallel=ddp", "parallel.devices=2", "parallel.accelerator=cpu")
    prefix = f"{kinds} {apart} {check.__name__}"
    strategy = build_strategy(config, ranks, PrefixStore(prefix, store))
    torch.manual_seed(0)
    model = nn.Linear(30, 40)
    if ranks.rank == 1:
        with torch.no_grad():
            model.weight += apart * model.weight
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replica_checks, "device_model", lambda device: kinds[ranks.rank])
        try:
            return check(model, strategy)
        except ReplicasDifferError as error:
            return str(error)
        finally:
            strategy.group.close()


def start_and_ends(ranks: Ranks, store: Any) -> list[Any]:
    alike, unlike = ["H100", "H100"], ["H100", "A100"]
    return [
        checked(ranks, store, *case)
        for case in (
            *((unlike, 0.0), (alike, 1e-5), (unlike, 1e-5), (unlike, 0.3)),
            (unlike, 1e-5, check_replicas_at_start),
        )
    ]


@pytest.mark.slow(seconds=2)
def test_ddp_weights_may_differ_slightly_only_after_training_and_on_different_gpu_models() -> None:
    for equal, fault, drifted, unsynchronised, at_start in in_ranks(start_and_ends, 2):
        assert at_start.startswith("the ranks start with different parameters")
        assert equal[1] == []
        assert fault == "the ranks end with different parameters: gradients were not synchronized"
        assert unsynchronised == fault, (
            "expected an error, because rounding cannot explain the difference"
        )
        assert len(drifted[1]) == 1 and drifted[0] == equal[0], (
            "expected the hash of rank 0, whose weights are in the checkpoints"
        )
        assert "A100, H100" in drifted[1][0] and "by 4.9e-06 of" in drifted[1][0]


def test_ema_weights_equal_those_of_timm_and_no_step_calls_state_dict(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 2))
    ours = build_ema(model, 0.9, warmup=False)
    assert ours is not None
    theirs = ModelEmaV3(model, decay=0.9)
    calls: Counter[str] = Counter()
    listed = nn.Module.state_dict

    def state_dict(self: nn.Module, *arguments: Any, **named: Any) -> Any:
        calls["state_dict"] += 1
        return listed(self, *arguments, **named)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(1, 6):
        # Load weights into the model between two steps, as a resumed run does.
        if step == 4:
            model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})
        model(torch.randn(8, 3, 3, 3)).square().sum().backward()
        optimizer.step()
        theirs.update(model, step)
        with monkeypatch.context() as patch:
            patch.setattr(nn.Module, "state_dict", state_dict)
            ours.update(model, step)
        for own, other in zip(
            ours.module.state_dict().values(), theirs.module.state_dict().values(), strict=True
        ):
            assert torch.equal(own, other)
    assert calls["state_dict"] <= 2 * sum(1 for _ in model.modules())

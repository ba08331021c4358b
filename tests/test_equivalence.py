"""single, dp, ddp and fsdp train alike: step n sees the same images, and the weights agree up to rounding."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from configs import read_lines, resolved
from ranks import in_ranks
from src.engine.machine.ranks import Ranks
from src.engine.parallel.threaded_data_parallel import ThreadedDataParallel
from src.engine.record.result import read_result
from src.engine.runtime import checkpoint
from src.parallel.data_parallel import DataParallelStrategy
from src.schema import ParallelConfig, ResolvedConfig
from src.train.run import Trainer
from src.train.step import Autocast, TrainStep

SPREADS = {
    "dp2": ("parallel=dp", "parallel.devices=2"),
    "dp3": ("parallel=dp", "parallel.devices=3"),
    "dp5_in_unequal_chunks_with_loss_in_replica": (
        "parallel=dp",
        "parallel.devices=5",
        "parallel.loss_in_replica=true",
    ),
    "ddp2": ("parallel=ddp", "parallel.devices=2"),
    "ddp3": ("parallel=ddp", "parallel.devices=3"),
    "fsdp2": ("parallel=fsdp", "parallel.devices=2"),
    "fsdp3_in_unequal_parts": ("parallel=fsdp", "parallel.devices=3", "parallel.reshard_after_forward=false"),
    "fsdp4_with_two_copies": ("parallel=fsdp", "parallel.devices=4", "parallel.shard_size=2"),
}
TRAININGS = {
    "sgd": ("optim=sgd", "optim.lr=0.005"),
    "adamw": ("optim=adamw",),
    "accumulate": ("optim=sgd", "optim.lr=0.005", "train.accumulate=2"),
    "clip_grad": ("optim=sgd", "optim.lr=0.005", "optim.clip_grad=0.5"),
}
COMMON = (
    "data.batch_size=24",  # divides by 2 and 3
    "data.limit_train=480",
    "train.epochs=1",
    "train.log_every=1",
    "optim.warmup_epochs=0.25",
    "data.augment.scale=[0.6,1.0]",
    "data.augment.hflip=0.5",
)
QUICK = ("dp2", "ddp2", "fsdp2")


def _case(training: str, spread: str) -> Any:
    marks = [] if spread.startswith("dp") else [pytest.mark.processes]
    if spread not in QUICK:
        marks.append(pytest.mark.slow(seconds=1))
    return pytest.param(training, spread, marks=marks)


CASES = [_case(training, spread) for training in TRAININGS for spread in SPREADS]


@dataclass
class Trained:
    weights: dict[str, Tensor]
    lines: list[dict[str, Any]]
    result: Any

    def steps(self, key: str) -> list[float]:
        return [line[key] for line in self.lines if key in line]


def train(ranks: Ranks, store: Any, jobs: list[tuple[ResolvedConfig, str]]) -> None:
    for number, (config, folder) in enumerate(jobs):
        own = None if store is None else torch.distributed.PrefixStore(str(number), store)
        Trainer(config, Path(folder), ranks, own).train()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Trained]:
    """Return a function `(training, spread) -> Trained`.

    Each training runs once, and all trainings of one world size share one group of ranks.
    """
    base = tmp_path_factory.mktemp("equivalence")

    def folder(training: str, spread: str) -> Path:
        return base / f"{training}_{spread}"

    def train_all(spread: str, overrides: tuple[str, ...]) -> None:
        jobs = [(resolved(*COMMON, *TRAININGS[t], *overrides), str(folder(t, spread))) for t in TRAININGS]
        for _, path in jobs:
            Path(path).mkdir()
        if jobs[0][0].parallel.has_ranks:
            in_ranks(train, jobs[0][0].parallel.devices, jobs)
        else:
            train(Ranks(), None, jobs)

    def get(training: str, spread: str) -> Trained:
        at = folder(training, spread)
        if not at.exists():
            train_all(spread, {"single": ("parallel=single",), **SPREADS}[spread])
        weights = checkpoint.load(at / "checkpoints" / "last.pt")["model"]
        return Trained(weights, read_lines(at / "metrics.jsonl"), read_result(at))

    return get


def distances(one: dict[str, Tensor], other: dict[str, Tensor]) -> tuple[float, float]:
    """Return (largest ‖Δ‖/‖w‖ of any tensor, ‖Δ‖/‖w‖ over all weights)."""
    assert one.keys() == other.keys()
    worst, differences, weights = 0.0, 0.0, 0.0
    for name, weight in one.items():
        difference, norm = (other[name] - weight).double().norm().item(), weight.double().norm().item()
        worst = max(worst, difference / norm if norm else difference)
        differences, weights = differences + difference**2, weights + norm**2
    return worst, (differences / weights) ** 0.5


@pytest.mark.parametrize(("training", "spread"), CASES)
def test_final_weights_of_dp_ddp_and_fsdp_match_single(
    trained: Callable[[str, str], Trained], training: str, spread: str
) -> None:
    worst, overall = distances(trained(training, "single").weights, trained(training, spread).weights)
    if training == "adamw":
        assert overall <= 1e-5
    else:
        assert worst <= 1e-6


@pytest.mark.parametrize(("training", "spread"), CASES)
def test_logged_losses_and_evaluations_of_dp_ddp_and_fsdp_match_single(
    trained: Callable[[str, str], Trained], training: str, spread: str
) -> None:
    single, other = trained(training, "single"), trained(training, spread)
    assert len(single.steps("train/loss")) == (10 if training == "accumulate" else 20)
    assert other.steps("lr") == single.steps("lr")
    assert other.steps("train/loss") == pytest.approx(single.steps("train/loss"), abs=1e-5)
    assert other.steps("train/acc") == pytest.approx(single.steps("train/acc"), abs=1e-6)
    assert other.steps("train/grad_norm") == pytest.approx(single.steps("train/grad_norm"), rel=1e-4)
    for split in ("val", "test"):
        ours, theirs = getattr(single.result, split), getattr(other.result, split)
        assert (theirs["samples"], theirs["correct"]) == (ours["samples"], ours["correct"])
        assert theirs["loss"] == pytest.approx(ours["loss"], rel=1e-5)
    assert other.result.world_size == other.result.devices == int(SPREADS[spread][1].partition("=")[2])


def test_optimizer_accumulation_and_clipping_each_change_final_weights(trained: Callable[[str, str], Trained]) -> None:
    """Otherwise the comparisons with single would pass although accumulation or clipping has no effect."""
    weights = [trained(training, "single").weights for training in TRAININGS]
    assert min(distances(first, second)[1] for first, second in combinations(weights, 2)) > 1e-3
    assert min(trained("clip_grad", "single").steps("train/grad_norm")) > 0.5, "expected clipping in every step"


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3))
        self.scale = nn.Parameter(torch.ones(3))
        self.register_buffer("unused", None)

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images) * self.scale


class Recurrent(nn.Module):
    """A model with torch.nn.LSTM, which keeps a second list of its weights that replicas must not share."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(2, 4, batch_first=True, bidirectional=True), nn.Linear(8, 3)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.lstm(images.view(-1, 3, 2))[0].mean(1))  # type: ignore[no-any-return]


def strategy(devices: int, loss_in_replica: bool | None = None) -> DataParallelStrategy:
    config = ParallelConfig(
        strategy="dp", devices=devices, accelerator="cpu", threads_per_device=1, loss_in_replica=loss_in_replica
    )
    return DataParallelStrategy(config, Ranks())


@pytest.mark.parametrize("loss_in_replica", [False, True])
@pytest.mark.parametrize(("batch", "devices"), [(8, 2), (9, 3), (7, 3), (4, 3), (2, 3), (1, 2), (5, 1)])
@pytest.mark.parametrize("model", [Small, Recurrent])
def test_gradients_of_threaded_dp_replicas_match_the_unwrapped_model(
    model: type[nn.Module], batch: int, devices: int, loss_in_replica: bool
) -> None:
    torch.manual_seed(0)
    bare = model()
    copied = copy.deepcopy(bare)
    images, labels = torch.randn(batch, 6), torch.randint(0, 3, (batch,))
    criterion = nn.CrossEntropyLoss()
    expected = criterion(bare(images), labels)
    expected.backward()
    loss, _ = strategy(devices, loss_in_replica).wrap(TrainStep(copied, criterion))(images, labels)
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), abs=1e-6)
    for (name, ours), theirs in zip(copied.named_parameters(), bare.parameters(), strict=True):
        assert torch.allclose(ours.grad, theirs.grad, rtol=1e-6, atol=1e-6), name


def test_threaded_dp_replicas_run_concurrently_when_model_draws_random_numbers() -> None:
    # The barrier raises unless three threads wait at the same time.
    together = threading.Barrier(3, timeout=10)
    seen = []

    class Meeting(nn.Module):
        def forward(self, chunk: Tensor) -> Tensor:
            together.wait()
            seen.append((threading.get_ident(), len(chunk), torch.get_num_threads()))
            torch.rand(1)
            return chunk

    spread = ThreadedDataParallel(Meeting(), 3, 1, 0)
    assert torch.equal(spread(torch.arange(8)), torch.arange(8)), "expected outputs in the order of the chunks"
    assert len({thread for thread, _, _ in seen} - {threading.get_ident()}) == 3
    assert sorted(size for _, size, _ in seen) == [2, 3, 3]
    assert {threads for _, _, threads in seen} == {1}


def test_batchnorm_statistics_come_from_the_first_threaded_dp_replica() -> None:
    torch.manual_seed(0)
    images = torch.randn(8, 4)
    alone, spread = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
    alone(images[:4])
    ThreadedDataParallel(spread, 2, 1, 0)(images)
    assert torch.equal(spread.running_mean, alone.running_mean)
    assert torch.equal(spread.running_var, alone.running_var)
    assert spread.num_batches_tracked == 1


def test_exception_in_a_threaded_dp_replica_reaches_the_caller() -> None:
    class Picky(nn.Module):
        def forward(self, chunk: Tensor) -> Tensor:
            if (chunk < 0).any():
                raise ZeroDivisionError("a negative image")
            return chunk

    spread = ThreadedDataParallel(Picky(), 2, 1, 0)
    with pytest.raises(ZeroDivisionError, match="a negative image"):
        spread(torch.tensor([1.0, 1.0, -1.0, 1.0]))
    assert spread(torch.ones(4)).sum() == 4


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation_with_threaded_dp_replicas_does_not_build_an_autograd_graph(mode: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    model = Small().eval()
    images = torch.randn(7, 6)
    with mode():
        outputs = strategy(3).for_evaluation(model)(images)
        assert torch.allclose(outputs, model(images), atol=1e-6)
    assert not outputs.requires_grad


@pytest.mark.parametrize(("batch", "devices", "chunks"), [(8, 2, [4, 4]), (7, 3, [3, 3, 1]), (4, 3, [2, 2])])
def test_dp_chunk_sizes_match_torch_chunk(batch: int, devices: int, chunks: list[int]) -> None:
    assert strategy(devices).chunk_sizes(batch) == chunks


def test_autocast_applies_inside_threaded_dp_replicas() -> None:
    seen = []

    class Typed(nn.Linear):
        def forward(self, chunk: Tensor) -> Tensor:
            outputs = super().forward(chunk)
            seen.append(outputs.dtype)
            return outputs

    step = TrainStep(Autocast(Typed(4, 3), "cpu", torch.bfloat16), nn.CrossEntropyLoss())
    strategy(2).wrap(step)(torch.randn(4, 4), torch.zeros(4, dtype=torch.long))[0].backward()
    assert seen == [torch.bfloat16] * 2

"""An evaluation counts every image once, in order, on any number of ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from src.tasks.classification import Classification, confusion
from tests.template.runs import cpu_strategy, evaluate_batches, task_of
from timm_parallel.data.dataset import InMemory
from timm_parallel.data.loader import BatchFetcher, Loader
from timm_parallel.data.prefetch import DevicePrefetcher
from timm_parallel.data.samplers import EvalSampler
from timm_parallel.errors import UnreadableImageError
from timm_parallel.machine.ranks import Ranks
from timm_parallel.metric import Metric
from timm_parallel.parallel.networks import Networks
from timm_parallel.parallel.strategy import Strategy
from timm_parallel.runtime.evaluation import evaluate
from timm_parallel.testing.configs import plain
from timm_parallel.testing.ranks import in_ranks

# Splits as (number of samples, number of classes). 37 samples cannot be divided equally among 2 or
# 3 ranks. With 2 samples or 1 sample, some ranks have none. With 700 classes, no confusion matrix
# is counted.
SPLITS = (
    (37, 7),
    (37, 700),
    (10, 6),
    (2, 4),
    (1, 6),
)


def split(num_samples: int, num_classes: int) -> InMemory:
    generator = torch.Generator().manual_seed(num_samples)
    images = torch.randint(0, 256, (num_samples, 1, 4, 4), dtype=torch.uint8, generator=generator)
    return InMemory(images, torch.randint(0, num_classes, (num_samples,), generator=generator))


def model(num_classes: int) -> nn.Module:
    """Build a model with BatchNorm, whose training mode depends on the other images."""
    torch.manual_seed(3)
    made = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(16), nn.Linear(16, num_classes))
    made(torch.randn(50, 1, 4, 4))
    return made


def loader_of(data: Any, task: Any, strategy: Strategy, **options: Any) -> Loader:
    sampler = EvalSampler(len(data), 6, strategy.group.rank, strategy.group.world_size)
    feed = DevicePrefetcher(torch.device("cpu"), **plain(1, 0.5, 0.25), channels_last=False)
    return Loader(BatchFetcher(data, task, None, 0, **options), sampler, feed, 0)


def measured(ranks: Ranks, store: Any, kind: str, devices: int) -> list[dict[str, Any]]:
    strategy = cpu_strategy(kind, devices, ranks, store)
    actual = []
    for num_samples, num_classes in SPLITS:
        data, task = split(num_samples, num_classes), task_of(num_classes)
        evaluation = evaluate(
            strategy.for_evaluation(Networks({"model": model(num_classes)})),
            loader_of(data, task, strategy),
            task,
            strategy.group,
        )
        assert evaluation is not None
        counts = evaluation.sums.get(confusion)
        if counts is not None:
            assert task.draw(evaluation).keys() == {"confusion"}
        actual.append(
            {
                **evaluation.numbers,
                **task.details(evaluation),
                "confusion": None if counts is None else counts.tolist(),
            }
        )
        # With thousands of classes, memory must not grow with their square.
        assert max(sums.numel() for sums in evaluation.sums.values()) <= 500 * num_classes
    strategy.close()
    return actual


def outputs(num_samples: int, num_classes: int) -> tuple[Tensor, Tensor]:
    data = split(num_samples, num_classes)
    with torch.no_grad():
        return model(num_classes).eval()((data.images / 255 - 0.5) / 0.25), data.labels


@pytest.fixture(scope="module")
def alone() -> list[dict[str, Any]]:
    return measured(Ranks(), None, "single", 1)


@pytest.mark.parametrize(("case", "size"), list(enumerate(SPLITS)))
def test_evaluation_metrics_match_a_plain_pytorch_computation(
    alone: list[dict[str, Any]], case: int, size: tuple[int, int]
) -> None:
    actual, (logits, labels) = alone[case], outputs(*size)
    hits = logits.argmax(1) == labels
    assert (actual["samples"], actual["correct"]) == (size[0], int(hits.sum()))
    assert actual["acc"] == pytest.approx(hits.double().mean().item())
    assert actual["loss"] == pytest.approx(
        functional.cross_entropy(logits, labels).item(), rel=1e-6
    )
    for label, accuracy in enumerate(actual["acc_per_class"]):
        own = hits[labels == label]
        assert accuracy == (pytest.approx(own.double().mean().item()) if len(own) else None)
    for label in range(size[1] if actual["confusion"] else 0):
        assert (
            actual["confusion"][label]
            == torch.bincount(logits.argmax(1)[labels == label], minlength=size[1]).tolist()
        )
    # acc5 needs more than five classes.
    if size[1] <= 5:
        assert actual["acc5"] is None
    else:
        within = (logits.topk(5).indices == labels[:, None]).any(1)
        assert actual["acc5"] == pytest.approx(within.double().mean().item())


@pytest.mark.slow(seconds=3)
def test_evaluation_gives_same_metrics_on_ddp_ranks_and_dp_replicas_as_on_single(
    alone: list[dict[str, Any]],
) -> None:
    of_ranks = in_ranks(measured, 3, "ddp", 3)
    for actual in (*of_ranks, measured(Ranks(), None, "dp", 3)):
        for ours, theirs in zip(actual, alone, strict=True):
            assert ours.pop("loss") == pytest.approx(theirs["loss"], rel=1e-6)
            assert ours == {key: value for key, value in theirs.items() if key != "loss"}


def test_evaluation_raises_when_a_sample_is_skipped_or_counted_twice() -> None:
    strategy = cpu_strategy()
    batch = (torch.zeros(3, 1, 4, 4), torch.zeros(3, dtype=torch.long))
    for num_samples in (2, 4):
        with pytest.raises(
            AssertionError, match=f"3 samples evaluated and 0 skipped of {num_samples}"
        ):
            evaluate_batches(model(2), [batch], strategy, num_samples, 2)


class Damaged:
    """Split in which the samples with the given indices are unreadable."""

    def __init__(self, whole: InMemory, unreadable: set[int]) -> None:
        self.whole, self.unreadable = whole, unreadable

    def __len__(self) -> int:
        return len(self.whole)

    def __getitem__(self, index: int) -> tuple[Tensor, int | float]:
        if index in self.unreadable:
            raise UnreadableImageError(f"{index}")
        return self.whole[index]


def weighted_by_row(scores: Tensor, labels: Tensor) -> float:
    places = torch.arange(1, len(labels) + 1, dtype=torch.float64)
    return float((places * (labels + scores.double().sum(1))).sum())


# Splits as (number of samples, indices of unreadable samples). The ranks read different numbers of
# samples, and some read none.
ROWS: tuple[tuple[int, set[int]], ...] = ((37, set()), (10, {1, 2, 6}), (2, set()), (3, {0}))


def value_of_rows(ranks: Ranks, store: Any) -> list[float | None]:
    strategy = cpu_strategy("ddp", ranks.world_size, ranks, store)
    values = []
    for num_samples, unreadable in ROWS:
        data = Damaged(split(num_samples, 4), unreadable)
        loader = loader_of(data, task_of(4), strategy, on_error="skip")
        metrics = {
            "acc": Classification.metrics["acc"],
            "by_row": Metric(from_rows=weighted_by_row),
        }
        networks = Networks({"model": model(4)})
        actual = evaluate(networks, loader, task_of(4), strategy.group, metrics=metrics)
        assert actual is not None and actual.samples == num_samples - len(unreadable)
        values.append(actual.numbers["by_row"])
    strategy.close()
    return values


@pytest.mark.slow(seconds=3)
def test_metric_from_rows_receives_all_scores_and_labels_in_dataset_order() -> None:
    expected = []
    for num_samples, unreadable in ROWS:
        scores, labels = outputs(num_samples, 4)
        read = [index for index in range(num_samples) if index not in unreadable]
        expected.append(weighted_by_row(scores[read], labels[read]))
    assert in_ranks(value_of_rows, 3) == [pytest.approx(expected, rel=1e-6)] * 3

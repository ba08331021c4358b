"""Evaluation counts every image once, in order, on any number of ranks; tables of predictions."""

from __future__ import annotations

import csv
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from src.commands.evaluate import table_of
from src.tasks.classification import (
    Classification,
    confusion,
)
from src.tasks.images import ImageTask
from tests.template.runs import cpu_strategy, evaluate_batches, resolved, task_of
from timm_parallel.data.dataset import InMemory
from timm_parallel.data.loader import BatchFetcher, Loader
from timm_parallel.data.on_device import DevicePrefetcher
from timm_parallel.data.samplers import EvalSampler
from timm_parallel.errors import UnreadableImageError
from timm_parallel.machine.ranks import Ranks
from timm_parallel.metric import Metric
from timm_parallel.parallel.networks import Networks
from timm_parallel.parallel.strategy import Strategy
from timm_parallel.run.evaluation import evaluate, write_predictions
from timm_parallel.task import Evaluation
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
    strategy.group.close()
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
        task = task_of(4)
        loader = loader_of(data, task, strategy, on_error="skip")
        task.metrics = {
            "acc": Classification.metrics["acc"],
            "by_row": Metric(from_rows=weighted_by_row),
        }
        actual = evaluate(Networks({"model": model(4)}), loader, task, strategy.group)
        assert actual is not None and actual.samples == num_samples - len(unreadable)
        values.append(actual.numbers["by_row"])
    strategy.group.close()
    return values


@pytest.mark.slow(seconds=3)
def test_metric_from_rows_receives_all_scores_and_labels_in_dataset_order() -> None:
    expected = []
    for num_samples, unreadable in ROWS:
        scores, labels = outputs(num_samples, 4)
        read = [index for index in range(num_samples) if index not in unreadable]
        expected.append(weighted_by_row(scores[read], labels[read]))
    assert in_ranks(value_of_rows, 3) == [pytest.approx(expected, rel=1e-6)] * 3


@pytest.mark.slow(seconds=1)
def test_predictions_are_written_as_csv_as_json_or_as_lines_on_stdout(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_predictions(FOUND, "csv", tmp_path / "x.csv")
    with open(tmp_path / "x.csv", newline="", encoding="utf-8") as file:
        first, second = csv.DictReader(file)
    assert (
        first["path"] == "a, b.png"
        and float(first["probability_2"]) == 0.25
        and first["class_1"] == "cat"
    )
    assert second["path"] == "torn.png" and second["class_1"] == ""
    write_predictions(FOUND, "json", tmp_path / "x.json")
    first, second = json.loads((tmp_path / "x.json").read_text())
    assert (first["class_2"], first["probability_2"]) == ("dog", 0.25)
    assert second == {"path": "torn.png", **dict.fromkeys(FOUND["a, b.png"] or {})}
    write_predictions(FOUND, "console", None)
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows == [
        ["path", "class_1", "probability_1", "class_2", "probability_2"],
        ["a,", "b.png", "cat", "0.7500", "dog", "0.2500"],
        ["torn.png", *["unreadable"] * 4],
    ]


def test_file_names_that_are_not_utf_8_keep_their_bytes(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    predictions = {os.fsdecode(b"r\xf6se\xff.png"): {"class_1": "cat", "probability_1": 1.0}}
    write_predictions(predictions, "csv", tmp_path / "x.csv")
    assert (tmp_path / "x.csv").read_bytes().splitlines()[1].startswith(b"r\xf6se\xff.png,cat")
    write_predictions(predictions, "json", tmp_path / "x.json")
    (row,) = json.loads((tmp_path / "x.json").read_bytes())
    assert os.fsencode(row["path"]) == b"r\xf6se\xff.png"
    for form in ("csv", "console"):
        write_predictions(predictions, form, None)
    sys.stdout.flush()
    # A terminal gets them as text.
    assert capfdbinary.readouterr().out.count(rb"r\udcf6se\udcff.png") == 2


def test_predictions_on_the_console_have_no_control_characters(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Names of files and classes may contain commands for a terminal."""
    name = "a\x1b]0;title\x07\x1b[2J\u202e\x9b.png"
    written: Any = {name: {"class_1": "dog\x1b[31m", "probability_1": 0.5}}
    for form in ("console", "csv", "json"):
        write_predictions(written, form, None)
        shown = capsys.readouterr().out
        assert "dog" in shown and not set(shown) & set("\x1b\x07\u202e\x9b")


def test_prediction_table_of_a_single_label_task_has_the_five_most_probable_classes() -> None:
    rows = (torch.arange(2), torch.eye(7)[:2], torch.tensor([0, 2]))
    task = task_of(7)
    task.names = list("abcdefg")
    table = table_of(Evaluation(2, {}, {}, rows), None, task)
    places = [f"{column}_{place}" for place in range(1, 6) for column in ("class", "probability")]
    assert list(table.columns) == ["path", "label", *places]
    assert table["probability_1"][0] == pytest.approx(0.311791, abs=1e-6)
    assert table["class_1"][0] == "a"


FOUND: dict[str, dict[str, Any] | None] = {
    "a, b.png": {
        "class_1": "cat",
        "probability_1": 0.75,
        "class_2": "dog",
        "probability_2": 0.25,
    },
    "torn.png": None,
}


@pytest.mark.parametrize(
    ("outputs", "expected"),
    [
        (torch.tensor([[1.0, 2.0], [3.0, 4.0]]), {"a": [1.0, 3.0], "b": [2.0, 4.0]}),
        (torch.tensor([1.0, 3.0]), {"output_1": [1.0, 3.0]}),
        (
            {"boxes": torch.ones(2, 3), "count": torch.tensor([0, 5])},
            {"output_1": [[1.0] * 3] * 2, "output_2": [0, 5]},
        ),
    ],
)
def test_task_without_own_predictions_has_a_column_per_name_or_per_tensor(
    outputs: Any, expected: dict[str, Any]
) -> None:
    task = ImageTask(resolved(), ["a", "b"])
    assert task.predictions(outputs, 1) == expected

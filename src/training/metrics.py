"""Exact evaluation: every image counts once; counts and sums are added over the ranks and divided once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from src.engine.machine.pulse import COUNTING, EVALUATING, pulse
from src.parallel.single import Single


@dataclass
class Evaluation:
    """Counts over a whole split, of all ranks."""

    samples: int
    correct: int
    correct5: int | None  # None with fewer than 6 classes
    loss_sum: float
    confusion: Tensor  # int64 [classes, classes]: rows are true classes, columns predicted ones

    @property
    def acc(self) -> float:
        return self.correct / self.samples

    @property
    def loss(self) -> float:
        return self.loss_sum / self.samples

    @property
    def acc5(self) -> float | None:
        return None if self.correct5 is None else self.correct5 / self.samples

    @property
    def acc_per_class(self) -> list[float | None]:
        """None for a class without samples."""
        totals = self.confusion.sum(1).tolist()
        hits = self.confusion.diag().tolist()
        return [hit / total if total else None for hit, total in zip(hits, totals, strict=True)]

    def numbers(self) -> dict[str, float | None]:
        """Every metric, None where this data has no such value. A metric is added here, and only here.

        It then stands in TensorBoard, metrics.jsonl and result.json as `<split>/<name>`, and `checkpoint.metric`,
        `optimized_metric` and searches can name it. They read the names from this dict without importing this file, so
        its keys are plain strings.
        """
        return {"loss": self.loss, "acc": self.acc, "acc5": self.acc5}

    def details(self) -> dict[str, Any]:
        """What else stands in result.json."""
        return {"correct": self.correct, "samples": self.samples, "acc_per_class": self.acc_per_class}


LOWER_IS_BETTER = ("loss",)  # of the numbers; the others are better when higher


def is_lower_better(name: str) -> bool:
    """`name` as in `numbers`, or with `_ema`."""
    return name.removesuffix("_ema") in LOWER_IS_BETTER


def check_metric(metric: str, num_classes: int) -> None:
    """Refuse a `checkpoint.metric` that has no value in data of so many classes, as acc5 of five."""
    correct5 = num_classes if num_classes > 5 else None
    one_each = Evaluation(num_classes, num_classes, correct5, 0.0, torch.eye(num_classes, dtype=torch.int64))
    if one_each.numbers()[metric.removeprefix("val/").removesuffix("_ema")] is None:
        raise ValueError(f"checkpoint.metric={metric}: has no value for {num_classes} classes; use val/acc or val/loss")


def with_averaged(raw: Evaluation, averaged: Evaluation | None) -> dict[str, float | None]:
    """The numbers of an evaluation, and of one of the averaged weights under the same names with `_ema`."""
    return raw.numbers() | {f"{name}_ema": value for name, value in (averaged.numbers() if averaged else {}).items()}


@torch.inference_mode()
def evaluate(
    model: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    *,
    strategy: Single,
    num_samples: int,
    num_classes: int,
    unreadable: Collection[int] = (),
    should_stop: Callable[[], bool] | None = None,
) -> Evaluation | None:
    """Evaluate the bare `model`, whose buffers must be equal on all ranks, on this rank's share of `num_samples`.

    `unreadable` fills while `batches` are read: samples that this rank had to leave out. Losses are plain cross entropy,
    without smoothing. Returns None, on all ranks, when `should_stop` said so on any of them: breaking off alone would
    leave the others waiting in the sums.

    Raises AssertionError when a sample was missed or counted twice.
    """
    model.eval()
    device = strategy.device
    confusion = torch.zeros(num_classes * num_classes, dtype=torch.int64, device=device)
    within5 = torch.zeros((), dtype=torch.int64, device=device)
    loss_sum = torch.zeros((), dtype=torch.float32 if device.type == "mps" else torch.float64, device=device)
    stopped = torch.zeros((), dtype=torch.int64, device=device)
    for images, labels in batches:
        pulse.at(EVALUATING)
        if should_stop is not None and should_stop():
            stopped += 1
            break
        outputs = model(images).float()
        loss_sum += functional.cross_entropy(outputs, labels, reduction="none").to(loss_sum.dtype).sum()
        scores = outputs[:, :num_classes]  # a head may have more (model.num_classes)
        # bincount would wait for the device: the size of what it returns depends on the values.
        confusion.index_add_(0, labels * num_classes + scores.argmax(1), torch.ones_like(labels))
        if num_classes > 5:
            within5 += (scores.topk(5, 1).indices == labels[:, None]).any(1).sum()
    pulse.at(COUNTING)
    if should_stop is not None and int(strategy.sum(stopped)):
        return None
    confusion = strategy.sum(confusion).view(num_classes, num_classes).cpu()
    samples = int(confusion.sum())
    skipped = int(strategy.sum(torch.tensor(len(unreadable), device=device)))
    assert samples + skipped == num_samples, f"{samples} samples evaluated and {skipped} skipped of {num_samples}"
    if samples == 0:
        raise ValueError(f"none of the {num_samples} images to evaluate on can be read")
    return Evaluation(
        samples=samples,
        correct=int(confusion.diag().sum()),
        correct5=int(strategy.sum(within5)) if num_classes > 5 else None,
        loss_sum=float(strategy.sum(loss_sum)),
        confusion=confusion,
    )

"""Exact evaluation on any number of ranks: every image counts once, and sums are added over the
ranks and divided once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from timm_parallel.data.loader import Loader
from timm_parallel.data.samplers import EvalSampler
from timm_parallel.faults.liveness import COUNTING, EVALUATING, liveness
from timm_parallel.metric import Metric
from timm_parallel.parallel.group import ProcessGroup
from timm_parallel.parallel.lockstep import Lockstep
from timm_parallel.task import Evaluation, Task


@dataclass(frozen=True)
class SplitEvaluation:
    """Evaluation of raw and averaged weights on one split."""

    numbers: dict[str, float | None]  # by metric; with the suffix `_ema` of the averaged weights
    details: dict[str, Any]  # further entries of result.json
    of_weights: dict[str, Evaluation]  # by `<split>`, and `<split>_ema` of the averaged weights


@torch.inference_mode()
def evaluate(
    model: nn.Module,
    loader: Loader,
    task: Task[Any],
    group: ProcessGroup,
    *,
    metrics: Mapping[str, Metric] | None = None,
    should_stop: Callable[[], bool] | None = None,
    batches: Any = None,
    keep_rows: bool = False,
) -> Evaluation | None:
    """Evaluate `model` on the whole split of a loader, over all ranks, which must have equal
    buffers. Collective.

    `metrics`: None for those of the task. `batches`: iterates over the loader, for example with a
    progress bar. Returns None on all ranks if `should_stop` returned True on any rank.
    """
    model.eval()
    device, metrics = loader.prefetcher.device, metrics or task.metrics
    used = {
        name: metric for name, metric in metrics.items() if task.num_outputs >= metric.min_outputs
    }
    scores, targets = (tensor.to(device) for tensor in task.blank(1, (1, 1)))
    totals = _zeros(used, scores, targets)
    keep_rows = keep_rows or any(metric.from_rows is not None for metric in used.values())
    rows = [task.rows(scores[:0], targets[:0])]
    samples = 0
    stopped = torch.zeros((), dtype=torch.int64, device=device)
    for images, targets in loader if batches is None else batches:
        liveness.at(EVALUATING)
        # All ranks return below if one has stopped: otherwise the others would wait for it in the
        # sums.
        if should_stop is not None and should_stop():
            stopped += 1
            break
        scores = task.predict(model, images)
        losses = _to_double(task.loss.of_samples(scores, targets))
        samples += len(targets)
        for function, total in totals.items():
            totals[function] = total + function(scores, targets, losses)
        if keep_rows:
            rows.append(task.rows(scores, targets))
    if isinstance(model, Lockstep):
        model.finish()
    liveness.at(COUNTING)
    if should_stop is not None and int(group.sum(stopped)):
        return None
    samples = _check_count(loader, samples, group)
    sums = {function: group.sum(total).cpu() for function, total in totals.items()}
    all_rows = _gather_rows(rows, loader, group) if keep_rows else None
    # A metric that needs more outputs than the task has is None.
    numbers: dict[str, float | None] = dict.fromkeys(metrics)
    for name, metric in used.items():
        if metric.from_rows is not None:
            assert all_rows is not None
            numbers[name] = metric.from_rows(*all_rows[1:])
        else:
            assert metric.from_sums is not None and metric.sums is not None
            numbers[name] = metric.from_sums(sums[metric.sums], samples)
    return Evaluation(samples, numbers, sums, all_rows)


def _to_double(values: Tensor) -> Tensor:
    return values if values.device.type == "mps" else values.double()


def _zeros(used: Mapping[str, Metric], scores: Tensor, targets: Tensor) -> dict[Any, Tensor]:
    """Return metric function -> tensor of zeros in the shape of its sums, for ranks that evaluate
    no image. `scores`, `targets`: of one sample.
    """
    functions = dict.fromkeys(metric.sums for metric in used.values() if metric.sums is not None)
    losses = _to_double(scores.new_zeros(1))
    return {function: torch.zeros_like(function(scores, targets, losses)) for function in functions}


def _check_count(loader: Loader, samples: int, group: ProcessGroup) -> int:
    """Return the number of images evaluated on all ranks, and assert that none is missing or
    counted twice. Collective.
    """
    counts = torch.tensor([samples, len(loader.unreadable)], device=loader.prefetcher.device)
    total, skipped = group.sum(counts).tolist()
    expected = len(loader.fetcher.split)
    assert total + skipped == expected, (
        f"{total} samples evaluated and {skipped} skipped of {expected}"
    )
    if total == 0:
        raise ValueError(
            f"data.root: none of the {expected} images to evaluate can be read; check the files"
        )
    return int(total)


def _gather_rows(
    rows: list[tuple[Tensor, Tensor]], loader: Loader, group: ProcessGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the indices, scores and targets of the images of all ranks, in dataset order, in CPU
    memory. Collective.
    """
    scores, targets = (torch.cat(tensors) for tensors in zip(*rows, strict=True))
    assert isinstance(loader.sampler, EvalSampler)
    read = [index for index in loader.sampler.indices.tolist() if index not in loader.unreadable]
    indices = torch.tensor(read, dtype=torch.int64, device=scores.device)
    # Shards may differ by a few rows: pad them to the longest one. Padding has the index -1.
    missing = max(group.gather(len(read))) - len(read)
    all_scores, all_targets = (
        group.rows(nn.functional.pad(of, (0,) * (2 * of.ndim - 1) + (missing,))).flatten(0, 1)
        for of in (scores, targets)
    )
    all_indices = group.rows(nn.functional.pad(indices, (0, missing), value=-1)).flatten()
    is_row = all_indices >= 0
    indices, order = all_indices[is_row].sort()
    return indices.cpu(), all_scores[is_row][order].cpu(), all_targets[is_row][order].cpu()

"""Evaluate a model on any number of ranks with the same result. Each image counts exactly once.
Sums are added over the ranks, and divided only once.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from timm_parallel.batch import Batch
from timm_parallel.data.loader import Loader
from timm_parallel.data.samplers import EvalSampler
from timm_parallel.faults.liveness import COUNTING, EVALUATING, liveness
from timm_parallel.machine.files import write_text
from timm_parallel.machine.text import for_terminal
from timm_parallel.parallel.fully_sharded import LockstepNetworks
from timm_parallel.parallel.group import ProcessGroup
from timm_parallel.parallel.networks import Networks
from timm_parallel.task import Evaluation, Task


@torch.inference_mode()
def evaluate(
    networks: Networks,
    loader: Loader,
    task: Task[Any],
    group: ProcessGroup,
    *,
    should_stop: Callable[[], bool] | None = None,
    batches: Any = None,
    keep_rows: bool = False,
    keep: Callable[[Any, Batch], tuple[Tensor, ...]] | None = None,
) -> Evaluation | None:
    """Evaluate networks on the whole split of a loader, over all ranks.

    All ranks must call this function, and the buffers of their networks must be equal. `batches`:
    iterator over the batches of the loader, for example with a progress bar. `should_stop`:
    function that returns True to stop early; if it does so on any rank, all ranks get None.
    `keep_rows`: also keep the rows of each sample. `keep`: function of the outputs and their batch
    that returns further tensors [B, …] of the samples to keep, as `Task.rows` does.
    """
    networks.eval()
    device = loader.prefetcher.device
    used = {
        name: metric
        for name, metric in task.metrics.items()
        if task.num_outputs >= metric.min_outputs
    }
    functions = dict.fromkeys(metric.sums for metric in used.values() if metric.sums is not None)
    keep_rows = (
        keep_rows
        or keep is not None
        or any(metric.from_rows is not None for metric in used.values())
    )
    totals: dict[Any, Tensor] = {}
    rows: list[tuple[Tensor, ...]] = []
    kept: list[tuple[Tensor, ...]] = []
    samples = 0
    stopped = torch.zeros((), dtype=torch.int64, device=device)
    for batch in loader if batches is None else batches:
        liveness.at(EVALUATING)
        # If one rank stops, all ranks return None below. Otherwise the other ranks would wait
        # forever for the sums of the stopped rank.
        if should_stop is not None and should_stop():
            stopped += 1
            break
        outputs = task.predict(networks, batch)
        samples += len(batch)
        for function in functions:
            assert function is not None
            of_batch = function(task, outputs, batch)
            totals[function] = totals[function] + of_batch if function in totals else of_batch
        # Call `keep` first, because it refuses a task without a loss per image, which may have no
        # rows either.
        if keep is not None:
            kept.append(keep(outputs, batch))
        if keep_rows:
            rows.append(task.rows(outputs, batch))
    if isinstance(networks, LockstepNetworks):
        networks.finish()
    liveness.at(COUNTING)
    if should_stop is not None and int(group.sum(stopped)):
        return None
    samples = _check_count(loader, samples, group)
    sums = {
        function: group.sum(total).cpu()
        for function, total in zip(
            functions, _with_zeros([*totals.values()], device, group), strict=True
        )
    }
    all_rows = _gather_rows(rows, loader, device, group) if keep_rows else None
    all_kept = None if keep is None else _gather_rows(kept, loader, device, group)[1:]
    # A metric that needs more outputs than the task has keeps the value None.
    numbers: dict[str, float | None] = dict.fromkeys(task.metrics)
    for name, metric in used.items():
        if metric.from_rows is not None:
            assert all_rows is not None
            numbers[name] = metric.from_rows(*all_rows[1:])
        else:
            assert metric.from_sums is not None and metric.sums is not None
            numbers[name] = metric.from_sums(sums[metric.sums], samples)
    return Evaluation(samples, numbers, sums, all_rows, all_kept)


def _with_zeros(
    tensors: list[Tensor], device: torch.device, group: ProcessGroup, rows: int | None = None
) -> list[Tensor]:
    """Return the tensors of this rank. A rank that has evaluated no sample has none, and gets zeros
    in the shapes of another rank. All ranks must call this function.

    `rows`: replaces the first side of these shapes; None: keep it.
    """
    shapes = [[list(tensor.shape), str(tensor.dtype)] for tensor in tensors]
    known: list[Any] = max(group.gather(shapes), key=len)
    return tensors or [
        torch.zeros(
            shape if rows is None else [rows, *shape[1:]],
            dtype=getattr(torch, dtype.removeprefix("torch.")),
            device=device,
        )
        for shape, dtype in known
    ]


def _check_count(loader: Loader, samples: int, group: ProcessGroup) -> int:
    """Return the number of images that all ranks together have evaluated.

    Asserts that no image is missing or counted twice. Raises ValueError if no image can be read.
    All ranks must call this function.
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
    rows: list[tuple[Tensor, ...]], loader: Loader, device: torch.device, group: ProcessGroup
) -> tuple[Tensor, ...]:
    """Gather the indices and the rows of the samples from all ranks, in the order of the dataset.

    The tensors are in CPU memory. All ranks must call this function.
    """
    own = [torch.cat(tensors) for tensors in zip(*rows, strict=True)]
    own = _with_zeros(own, device, group, rows=0)
    assert isinstance(loader.sampler, EvalSampler)
    read = [index for index in loader.sampler.indices.tolist() if index not in loader.unreadable]
    indices = torch.tensor(read, dtype=torch.int64, device=device)
    # Ranks may have different numbers of samples. Pad the tensors to the largest number; padding
    # has the index -1.
    missing = max(group.gather(len(read))) - len(read)
    padded = [
        group.rows(nn.functional.pad(of, (0,) * (2 * of.ndim - 1) + (missing,))).flatten(0, 1)
        for of in own
    ]
    all_indices = group.rows(nn.functional.pad(indices, (0, missing), value=-1)).flatten()
    is_row = all_indices >= 0
    indices, order = all_indices[is_row].sort()
    return (indices.cpu(), *(of[is_row][order].cpu() for of in padded))


# Dictionary from the path of an image to its predicted values by column, or to None if the file
# cannot be read.
Predictions = Mapping[str, dict[str, Any] | None]


def write_predictions(predictions: Predictions, form: str, output: Path | None) -> None:
    """Write a table of predictions to a file, or to the standard output if `output` is None. It has
    a row per image; the row of an image that cannot be read has only its path.

    `form`: console, csv or json.
    """
    # Import pandas here, because its import starts a thread, and a sweep forks a process that has
    # imported this module.
    import pandas as pd

    columns = next((list(values) for values in predictions.values() if values is not None), [])
    rows = [
        {"path": path, **(dict.fromkeys(columns) if values is None else values)}
        for path, values in predictions.items()
    ]
    if form == "json":
        text = json.dumps(rows, indent=1) + "\n"
    else:
        # Keep Python's texts, because pyarrow, if it is installed, refuses names that are not
        # UTF-8.
        table = pd.DataFrame(rows, dtype=object)
        if form == "csv":
            text = table.to_csv(index=False, lineterminator="\n")
        else:
            shown = table.where(table.notna(), "unreadable")
            text = shown.to_string(index=False, float_format="{:.4f}".format) + "\n"
    if output is None:
        # A file keeps all bytes of a name, but a terminal would obey control characters.
        sys.stdout.write(for_terminal(text))
    else:
        write_text(output, text)

"""Predictions of images as text, CSV or JSON,
and the calibration error of predicted probabilities.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from timm_parallel.data.csv_listing import SEPARATOR
from timm_parallel.machine.files import write_text
from timm_parallel.runtime.evaluation import Evaluation

BINS = 15


def prediction_table(
    evaluation: Evaluation,
    split: Any,
    class_names: list[str],
    probabilities: Callable[[Tensor], Tensor],
) -> pd.DataFrame:
    """Return a table with a row per evaluated image: path (or index), label, and classes with
    probabilities, best first.

    The classes are the five most likely ones, or with several labels per image all classes, to
    compute metrics from.
    """
    assert evaluation.rows is not None
    indices, scores, labels = evaluation.rows
    files = getattr(split, "files", None)
    columns: dict[str, Any] = {
        "path": [str(files[index][0]) if files else index for index in indices.tolist()]
    }
    if labels.ndim == 1:
        columns["label"] = [class_names[label] for label in labels.tolist()]
    else:
        columns["label"] = [_join_labels(row, class_names) for row in labels.tolist()]
    shown, form = min(5, len(class_names)), "{:.6f}"
    if labels.ndim == 2:
        # In single precision, different scores above 17 would have equal probabilities. `repr` has
        # all digits.
        scores, shown, form = scores.double(), len(class_names), "{!r}"
    best = probabilities(scores).topk(shown)
    for place in range(shown):
        columns[f"class_{place + 1}"] = [
            class_names[index] for index in best.indices[:, place].tolist()
        ]
        columns[f"probability_{place + 1}"] = [
            form.format(value) for value in best.values[:, place].tolist()
        ]
    return pd.DataFrame(columns)


def _join_labels(row: list[float], class_names: list[str]) -> str:
    return SEPARATOR.join(name for name, value in zip(class_names, row, strict=True) if value > 0.5)


def count_by_confidence(
    probabilities: Callable[[Tensor], Tensor], scores: Tensor, labels: Tensor, losses: Tensor
) -> Tensor:
    """Return [3, 15]: number of images, correct predictions and sum of confidences in each of 15
    bins of confidence.
    """
    confidence, predicted = probabilities(scores).max(1)
    bins = (confidence * BINS).ceil().long().clamp(1, BINS) - 1
    # As exact as the losses: in double precision, where the device has it.
    values = torch.stack([torch.ones_like(confidence), predicted == labels, confidence]).to(
        losses.dtype
    )
    return torch.zeros(3, BINS, dtype=losses.dtype, device=scores.device).index_add_(
        1, bins, values
    )


def calibration_error(sums: Tensor, samples: int) -> float:
    """Return the expected calibration error from `count_by_confidence` (Guo et al. 2017,
    arXiv:1706.04599).
    """
    return float((sums[1] - sums[2]).abs().sum() / samples)


@dataclass
class Prediction:
    """The most likely classes of one image, best first; empty for a file that cannot be read."""

    path: str
    classes: list[str]
    probabilities: list[float]


def write_predictions(predictions: list[Prediction], form: str, output: Path | None) -> None:
    """Write the predictions as `form` (console, csv or json) to the file `output`, or to stdout if
    it is None.
    """
    if form == "json":
        text = json.dumps([asdict(image) for image in predictions], indent=1) + "\n"
    elif form == "csv":
        text = _as_csv(predictions)
    else:
        text = "".join(map(_as_line, predictions))
    # The name of a file may not be UTF-8.
    text = text.encode(errors="replace").decode()
    if output is None:
        sys.stdout.write(text)
    else:
        write_text(output, text)


def _as_line(image: Prediction) -> str:
    best = [
        f"{name} {share:.4f}"
        for name, share in zip(image.classes, image.probabilities, strict=True)
    ]
    return f"{image.path}  {', '.join(best) or 'unreadable'}\n"


def _as_csv(predictions: list[Prediction]) -> str:
    rows = []
    for image in predictions:
        row: dict[str, str] = {"path": image.path}
        for position, (name, share) in enumerate(
            zip(image.classes, image.probabilities, strict=True), start=1
        ):
            row |= {f"class_{position}": name, f"probability_{position}": f"{share:.6f}"}
        rows.append(row)
    # An unreadable image has no classes, so the longest row names the columns.
    columns = max((list(row) for row in rows), key=len)
    return pd.DataFrame(rows, columns=columns).to_csv(index=False, lineterminator="\n")

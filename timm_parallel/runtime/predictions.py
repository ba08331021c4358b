"""Predictions of images as text, CSV or JSON."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from timm_parallel.machine.files import write_text
from timm_parallel.runtime.evaluation import Evaluation
from timm_parallel.task import Task


def prediction_table(evaluation: Evaluation, split: Any, task: Task[Any]) -> pd.DataFrame:
    """Return a table with a row per evaluated image: path (or index), and the columns of the
    task.
    """
    assert evaluation.rows is not None
    files = getattr(split, "files", None)
    paths = [str(files[index][0]) if files else index for index in evaluation.rows[0].tolist()]
    return pd.DataFrame({"path": paths, **task.table(evaluation)})


@dataclass
class Prediction:
    """The prediction for one image: plain values by name. None for a file that cannot be read."""

    path: str
    values: dict[str, Any] | None


def write_predictions(
    predictions: list[Prediction], task: Task[Any], form: str, output: Path | None
) -> None:
    """Write the predictions as `form` (console, csv or json) to the file `output`, or to stdout if
    it is None.
    """
    if form == "json":
        unreadable = task.unreadable
        rows = [{"path": image.path, **(image.values or unreadable)} for image in predictions]
        text = json.dumps(rows, indent=1) + "\n"
    elif form == "csv":
        text = _as_csv(predictions, task)
    else:
        text = "".join(
            f"{image.path}  {'unreadable' if image.values is None else task.text(image.values)}\n"
            for image in predictions
        )
    # The name of a file may not be UTF-8.
    text = text.encode(errors="replace").decode()
    if output is None:
        sys.stdout.write(text)
    else:
        write_text(output, text)


def _as_csv(predictions: list[Prediction], task: Task[Any]) -> str:
    rows = [
        {"path": image.path, **({} if image.values is None else task.columns(image.values))}
        for image in predictions
    ]
    # An unreadable image has no values, so the longest row names the columns.
    columns = max((list(row) for row in rows), key=len)
    return pd.DataFrame(rows, columns=columns).to_csv(index=False, lineterminator="\n")

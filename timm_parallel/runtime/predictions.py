"""Write the predictions for images as text, CSV or JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from timm_parallel.machine.files import write_text
from timm_parallel.machine.text import for_terminal
from timm_parallel.task import Task

# Dictionary from the path of an image to its predicted values by name, or to None if the file
# cannot be read.
Predictions = Mapping[str, dict[str, Any] | None]


def write_predictions(
    predictions: Predictions, task: Task[Any], form: str, output: Path | None
) -> None:
    """Write predictions to a file, or to the standard output if `output` is None.

    `form`: console, csv or json.
    """
    if form == "json":
        rows = [
            {"path": path, **(values or task.unreadable)} for path, values in predictions.items()
        ]
        text = json.dumps(rows, indent=1) + "\n"
    elif form == "csv":
        text = _as_csv(predictions, task)
    else:
        text = "".join(
            f"{path}  {'unreadable' if values is None else task.text(values)}\n"
            for path, values in predictions.items()
        )
    if output is None:
        # A file keeps all bytes of a name, but a terminal would obey control characters.
        sys.stdout.write(for_terminal(text))
    else:
        write_text(output, text)


def _as_csv(predictions: Predictions, task: Task[Any]) -> str:
    rows = [
        {"path": path, **({} if values is None else task.columns(values))}
        for path, values in predictions.items()
    ]
    # Take the column names from the longest row, because the row of an unreadable image has no
    # values.
    columns = max((list(row) for row in rows), key=len)
    # Keep Python's texts, because pyarrow, if it is installed, refuses names that are not UTF-8.
    return pd.DataFrame(rows, columns=columns, dtype=object).to_csv(
        index=False, lineterminator="\n"
    )

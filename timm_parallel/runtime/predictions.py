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

# Dictionary from the path of an image to its predicted values by column, or to None if the file
# cannot be read.
Predictions = Mapping[str, dict[str, Any] | None]


def write_predictions(predictions: Predictions, form: str, output: Path | None) -> None:
    """Write a table of predictions to a file, or to the standard output if `output` is None. It has
    a row per image; the row of an image that cannot be read has only its path.

    `form`: console, csv or json.
    """
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

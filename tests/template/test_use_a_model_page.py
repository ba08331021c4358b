"""The code of docs/use_a_model.md reads predictions of several labels."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from sklearn.metrics import average_precision_score

from src.schema import TrainConfig
from timm_parallel.runtime.evaluation import Evaluation
from timm_parallel.testing.commands import ROOT
from timm_parallel.testing.configs import task_of


def as_documented(path: Path) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """Run the Python of docs/use_a_model.md on a predictions.csv. Return the table, and labels and
    scores by class.
    """
    page = (ROOT / "docs" / "use_a_model.md").read_text(encoding="utf-8")
    (code,) = [
        block
        for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL)
        if "predictions.csv" in block
    ]
    names: dict[str, Any] = {}
    exec(code.replace("predictions.csv", str(path)), names)
    return names["table"], names["labels"], names["scores"]


def test_multilabel_prediction_table_has_all_classes_with_full_precision(tmp_path: Path) -> None:
    """The data has more than five classes, and some scores have equal sigmoids in single
    precision.
    """
    draw = torch.Generator().manual_seed(0)
    scores = torch.randn(60, 9, generator=draw) * 12
    labels = (torch.rand(60, 9, generator=draw) < 0.3).float()
    names = [f"class {number}" for number in range(9)]
    task = task_of(9, TrainConfig(task="multilabel", loss="bce"))
    task.names = names
    table = Evaluation(60, {}, {}, (torch.arange(60), scores, labels)).table(None, task)
    table.to_csv(tmp_path / "predictions.csv", index=False)
    _, read_labels, read_scores = as_documented(tmp_path / "predictions.csv")
    expected = average_precision_score(labels.numpy(), scores.numpy(), average="macro")
    assert average_precision_score(
        read_labels.to_numpy(), read_scores.to_numpy(), average="macro"
    ) == pytest.approx(expected, abs=1e-9)

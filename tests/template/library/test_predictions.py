"""Test predictions as table, CSV, JSON and text, and the calibration error."""

from __future__ import annotations

import csv
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.calibration import calibration_curve

from src.tasks.classification import calibration_error, count_by_confidence
from tests.template.runs import resolved, task_of
from timm_parallel.batch import Batch
from timm_parallel.runtime.evaluation import Evaluation
from timm_parallel.runtime.predictions import write_predictions
from timm_parallel.task import Task


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


LATIN_1 = os.fsdecode(b"r\xf6se\xff.png")


def test_file_names_that_are_not_utf_8_keep_their_bytes(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    predictions = {LATIN_1: {"class_1": "cat", "probability_1": 1.0}}
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


@pytest.mark.slow(seconds=1)
@pytest.mark.parametrize("form", ["console", "csv", "json"])
def test_predictions_on_the_console_have_no_control_characters(
    capsys: pytest.CaptureFixture[str], form: str
) -> None:
    """Names of files and classes may contain commands for a terminal."""
    name = "a\x1b]0;title\x07\x1b[2J\u202e\x9b.png"
    written: Any = {name: {"class_1": "dog\x1b[31m", "probability_1": 0.5}}
    write_predictions(written, form, None)
    shown = capsys.readouterr().out
    assert "dog" in shown and not set(shown) & set("\x1b\x07\u202e\x9b")


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 200), st.integers(2, 6), st.integers(0, 99))
def test_calibration_error_equals_the_error_from_scikit_learn_calibration_curve(
    images: int, classes: int, seed: int
) -> None:
    draw = torch.Generator().manual_seed(seed)
    scores = torch.randn(images, classes, generator=draw) * 3
    labels = torch.randint(classes, (images,), generator=draw)
    batch = Batch({"image": scores, "target": labels})
    sums = count_by_confidence(task_of(classes), scores, batch)
    confidence, predicted = scores.softmax(1).max(1)
    share, mean = calibration_curve(predicted == labels, confidence, n_bins=15)
    counts = np.histogram(confidence, bins=np.linspace(0, 1, 16))[0]
    expected = (np.abs(share - mean) * counts[counts > 0]).sum() / images
    assert calibration_error(sums, images) == pytest.approx(expected, abs=1e-6)


def test_prediction_table_of_a_single_label_task_has_the_five_most_probable_classes() -> None:
    rows = (torch.arange(2), torch.eye(7)[:2], torch.tensor([0, 2]))
    task = task_of(7)
    task.names = list("abcdefg")
    table = Evaluation(2, {}, {}, rows).table(None, task)
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
    task: Task[Any] = Task(resolved(), ["a", "b"])
    assert task.predictions(outputs, 1) == expected

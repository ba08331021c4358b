"""scripts/runs.py lists all runs of a folder, whatever else is in it, and thousands in seconds."""

from __future__ import annotations

import csv
import io
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from scripts import runs as script
from tests.template.runs import resolved
from timm_parallel.config.compose import save_config
from timm_parallel.machine.files import lock_folder
from timm_parallel.record.result import Result, write_result


def write_run(folder: Path, *overrides: str, age: float = 0, **result: Any) -> Path:
    """Write the files of a run. `age`: seconds since it was started."""
    (folder / ".hydra").mkdir(parents=True)
    save_config(resolved(*overrides), folder)
    (folder / ".hydra" / "overrides.yaml").write_text(json.dumps(["hydra.x=1", *overrides]))
    changed = time.time() - age
    os.utime(folder / "config.yaml", (changed, changed))
    if result:
        metrics = {"loss": {"lower_is_better": True}, "acc": {"lower_is_better": False}}
        write_result(folder, Result(**{"status": "done", "metrics": metrics, **result}))
    return folder


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write three runs that ended, two that did not, damaged folders and others."""
    tmp_path = tmp_path_factory.mktemp("outputs")
    write_run(
        tmp_path / "train/day/one",
        "optim.lr=0.5",
        age=50,
        val={"acc": 0.5, "loss": 1.0},
        objective=0.6,
        throughput={"images_per_sec": 123.4},
        seconds={"total": 90.0},
    )
    write_run(tmp_path / "train/day/two", "seed=7", age=40, val={"acc": 0.75, "loss": 2.0})
    write_run(tmp_path / "sweeps/day/s/0", "train.epochs=3", age=30, status="failed")
    write_run(tmp_path / "train/day/unfinished", age=20)
    write_run(tmp_path / "train/day/running", age=10)
    for number, text in enumerate(("{", "[]", '{"status": "great"}', "[" * 100_000)):
        folder = write_run(tmp_path / f"train/day/damaged_{number}", age=100 + number)
        (folder / "result.json").write_text(text)
    (tmp_path / "foreign" / "deep").mkdir(parents=True)
    (tmp_path / "foreign" / "notes.txt").write_text("no run")
    (tmp_path / "loop").symlink_to(tmp_path)
    return tmp_path


def listed(capsys: pytest.CaptureFixture[str], folder: Path, *words: str) -> list[dict[str, str]]:
    capsys.readouterr()
    assert script.main([f"folder={folder}", "csv=true", *words]) == 0
    return list(csv.DictReader(io.StringIO(capsys.readouterr().out)))


def names(rows: list[dict[str, str]]) -> list[str]:
    return [Path(row["folder"]).name for row in rows]


def test_runs_are_listed_from_the_newest_with_status_figures_and_settings(
    outputs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with lock_folder(outputs / "train/day/running"):
        rows = listed(capsys, outputs)
    assert names(rows)[:5] == ["running", "unfinished", "0", "two", "one"]
    statuses = [row["status"] for row in rows]
    assert statuses == ["running", "unfinished", "failed", "done", "done", *["damaged"] * 4]
    one = rows[4]
    assert (one["objective"], one["images/s"], one["minutes"]) == ("0.6", "123.4", "1.5")
    assert one["settings"] == "optim.lr=0.5"


@pytest.mark.parametrize(
    ("metric", "order"), [("val/acc", ["two", "one"]), ("val/loss", ["one", "two"])]
)
def test_runs_with_a_metric_are_listed_from_the_best(
    outputs: Path, capsys: pytest.CaptureFixture[str], metric: str, order: list[str]
) -> None:
    rows = listed(capsys, outputs, f"metric={metric}")
    assert names(rows)[:2] == order
    assert all(row[metric] for row in rows[:2]) and not any(row[metric] for row in rows[2:])


@pytest.mark.parametrize(
    ("where", "found"),
    [
        (("optim.lr=0.5",), ["one"]),
        (("optim.lr=5e-1", "seed=42"), ["one"]),
        (("seed=7",), ["two"]),
        (("seed=7", "optim.lr=0.5"), []),
        (("model.ema.decay=null", "train.epochs=3"), ["0"]),
        (("tags=[]", "seed=7"), ["two"]),
        (("model.kwargs.depth=2", "seed=7"), ["two"]),
    ],
    ids=str,
)
def test_where_keeps_the_runs_with_a_value_in_their_config(
    outputs: Path, capsys: pytest.CaptureFixture[str], where: tuple[str, ...], found: list[str]
) -> None:
    assert names(listed(capsys, outputs, *(f"where={word}" for word in where))) == found


@pytest.mark.parametrize(
    "word", ["where=optim.rate=1", "where=seed", "metric=val/accuracy", "folder=missing"]
)
def test_list_of_runs_refuses_what_no_run_has(
    outputs: Path, capsys: pytest.CaptureFixture[str], word: str
) -> None:
    assert script.main([f"folder={outputs}", word]) == 2
    assert capsys.readouterr().err.startswith(f"runs.py: {word}")


def test_resumed_run_is_listed_with_the_settings_of_its_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = "python train.py seed=3 'tags=[a b]' print_config=false"
    run = write_run(tmp_path / "run", "seed=3", segments=[{"command": command}, {"command": "x"}])
    (run / ".hydra" / "overrides.yaml").write_text(f"- resume={run}\n- train.epochs=9\n")
    assert [row["settings"] for row in listed(capsys, tmp_path)] == ["seed=3 tags=[a b]"]


@pytest.mark.slow(seconds=2)
def test_2000_runs_are_listed_in_less_than_a_second_of_processor_time(
    outputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = outputs / "train/day/one"
    for number in range(2000):
        folder = tmp_path / str(number % 100) / str(number)
        (folder / ".hydra").mkdir(parents=True)
        for name in ("config.yaml", "result.json", ".hydra/overrides.yaml"):
            os.link(first / name, folder / name)
    began = time.process_time()
    rows = listed(capsys, tmp_path, "metric=val/acc", "where=optim.lr=0.5")
    assert time.process_time() - began < 1
    assert len(rows) == 2000

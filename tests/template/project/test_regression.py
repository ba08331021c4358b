"""Regression trains equally under all strategies, with exact metrics."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.metrics import mean_absolute_error, r2_score
from torch.nn import functional

import evaluate as entry
from scripts import export, predict
from src.schema import TrainConfig
from src.tasks.regression import Regression
from tests.template.runs import cpu_strategy, resolved, run_warm, task_of
from timm_parallel.data.dataset import InMemory
from timm_parallel.data.loader import EvalLoader
from timm_parallel.data.on_device import DevicePrefetcher
from timm_parallel.parallel.networks import Networks
from timm_parallel.record.result import read_result
from timm_parallel.run.evaluation import evaluate
from timm_parallel.testing.configs import plain

NAMES = ("red", "green")
SMALL = (
    "train=regression",
    "data=csv",
    "+data.kwargs.targets=[red,green]",
    "data.val_fraction=0.4",
    "data.image_size=[16,24]",
    "data.batch_size=12",
    "data.limit_train=null",
    "data.workers=0",
    "parallel.accelerator=cpu",
)


@pytest.fixture(scope="module")
def colors(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write 60 images and a CSV with the shares of red and green."""
    folder = tmp_path_factory.mktemp("colors")
    draw = np.random.default_rng(0)
    rows = []
    for number in range(60):
        shares = draw.random(2).round(3)
        pixels = draw.integers(0, 30, (16, 24, 3))
        pixels[..., :2] += (shares * 200).astype(int)
        Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{number}.png")
        rows.append((f"{number}.png", *shares))
    with open(folder / "labels.csv", "w", newline="") as file:
        csv.writer(file).writerows([("file", *NAMES), *rows])
    return folder


@pytest.fixture(scope="module")
def trained(colors: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("regression") / "run"
    return run_warm(folder, *SMALL, f"data.root={colors}", "parallel=single")


def test_regression_loss_equals_the_torch_loss_of_the_first_outputs() -> None:
    outputs, targets = torch.randn(5, 4), torch.randn(5, 2)
    losses = {
        "mse": functional.mse_loss(outputs[:, :2], targets),
        "l1": functional.l1_loss(outputs[:, :2], targets),
        "huber": functional.huber_loss(outputs[:, :2], targets, delta=0.5),
    }
    for loss, expected in losses.items():
        options = {"delta": 0.5} if loss == "huber" else {}
        task = task_of(2, TrainConfig(task="regression", loss=loss, loss_kwargs=options))
        task.prepare(None)
        actual = task.build_criterion()(outputs, targets).mean().item()
        assert actual == pytest.approx(expected.item())


@pytest.mark.slow(seconds=1)
def test_regression_metrics_match_scikit_learn() -> None:
    draw = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (23, 1, 2, 2), generator=draw, dtype=torch.uint8)
    targets = torch.randn(23, 3, generator=draw) * 5 + 100
    task = task_of(3, TrainConfig(task="regression", loss="mse"))
    group = cpu_strategy().group
    prefetcher = DevicePrefetcher(torch.device("cpu"), **plain(1, 0.5, 0.25), channels_last=False)
    loader = EvalLoader(InMemory(images, targets), task, prefetcher, group, batch_size=6, workers=0)
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 3))
    bias = model[1].bias
    assert isinstance(bias, torch.Tensor)
    bias.data += 100
    evaluation = evaluate(Networks({"model": model}), loader, task, group, keep_rows=True)
    assert evaluation is not None and evaluation.rows is not None
    _, scores, labels = evaluation.rows
    expected = {
        "mae": mean_absolute_error(labels, scores),
        "rmse": float(((labels - scores).double().square().mean()).sqrt()),
        "r2": r2_score(labels.double(), scores.double()),
    }
    measured_numbers = {name: evaluation.numbers[name] for name in expected}
    assert measured_numbers == pytest.approx(expected, rel=1e-5)
    # R² has no value if all targets are equal.
    sums = torch.tensor([[1.0], [1.0], [6.0], [12.0]])
    assert Regression.metrics["r2"].from_sums is not None
    assert Regression.metrics["r2"].from_sums(sums, 3) is None


@pytest.mark.processes
def test_evaluate_py_and_predict_py_write_each_number_under_the_target_name(
    trained: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert read_result(trained).val["mae_per_number"].keys() == set(NAMES)
    table = tmp_path / "table.csv"
    assert entry.main([f"run={trained}", "split=val", f"predictions={table}"]) == 0
    with open(table, newline="") as file:
        first = next(csv.DictReader(file))
    capfd.readouterr()
    words = (f"run={trained}", f"images={first['path']}")
    assert predict.main([*words, "format=csv"]) == 0
    in_csv = next(csv.DictReader(capfd.readouterr().out.splitlines()))
    assert predict.main([*words, "format=json"]) == 0
    in_json = json.loads(capfd.readouterr().out)[0]
    for name in NAMES:
        expected = pytest.approx(float(first[f"{name}_predicted"]), abs=1e-5)
        assert float(in_csv[name]) == in_json[name] == expected


@pytest.mark.processes
def test_regression_hub_export_names_each_number_and_has_no_probabilities(
    trained: Path, tmp_path: Path
) -> None:
    assert export.main([f"run={trained}", f"output={tmp_path}", "format=hub"]) == 0
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["problem_type"] == "regression"
    assert config["label_names"] == list(NAMES)
    assert config["pretrained_cfg"]["input_size"] == [3, 16, 24]
    card = (tmp_path / "README.md").read_text()
    assert "2 numbers: red, green" in card
    assert not any(word in card for word in ("softmax", "sigmoid", "pipeline_tag"))


@pytest.mark.parametrize(("cell", "named"), [("x", "red=x"), ("", "red="), ("nan", "red=nan")])
def test_csv_cell_that_is_not_a_number_is_refused_with_the_line_number(
    tmp_path: Path, cell: str, named: str
) -> None:
    from timm_parallel.data.build import check_data

    (tmp_path / "labels.csv").write_text(f"file,red,green\na.png,1,2\nb.png,{cell},2\n")
    config = resolved("train=regression", "data=csv", f"data.root={tmp_path}")
    config.data.kwargs = {"targets": list(NAMES)}
    with pytest.raises(ValueError, match=f"line 3: {named}"):
        check_data(config)

"""Multi-label training and regression from CSV files, and class weights."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from sklearn.metrics import average_precision_score, f1_score, mean_absolute_error, r2_score
from sklearn.utils.class_weight import compute_class_weight
from torch import Tensor
from torch.nn import functional

import evaluate as entry
from scripts import export, predict
from src.schema import TrainConfig
from src.tasks.multilabel import count_labels, macro_f1, mean_average_precision
from src.tasks.regression import Regression
from tests.template.runs import cpu_strategy, resolved, run_warm, task_of
from timm_parallel.batch import Batch
from timm_parallel.data.build import check_data
from timm_parallel.data.dataset import InMemory
from timm_parallel.data.loader import EvalLoader
from timm_parallel.data.on_device import DevicePrefetcher
from timm_parallel.parallel.networks import Networks
from timm_parallel.record.result import read_result
from timm_parallel.run.evaluation import evaluate
from timm_parallel.testing.configs import plain

LABELS = ("beach", "night", "people")
OF_CSV = (
    *("data=csv", "data.val_fraction=0.4", "data.limit_train=null", "data.workers=0"),
    *("parallel=single", "parallel.accelerator=cpu"),
)
SMALL = (*OF_CSV, "train=multilabel", "data.image_size=16", "data.batch_size=6", "optim.lr=3e-3")


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write 44 images with zero to three labels each, and a CSV that lists them."""
    folder = tmp_path_factory.mktemp("scenes")
    draw = np.random.default_rng(0)
    rows = []
    for number in range(44):
        own = [name for bit, name in enumerate(LABELS) if number >> bit & 1]
        Image.fromarray(draw.integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(
            folder / f"{number}.png"
        )
        rows.append((f"{number}.png", ";".join(own)))
    with open(folder / "labels.csv", "w", newline="") as file:
        csv.writer(file).writerows([("file", "label"), *rows])
    return folder / "labels.csv"


# Draw scores from five values, so that some scores are equal.
rows_of_scores = st.integers(2, 40).flatmap(
    lambda n: st.tuples(
        st.lists(
            st.lists(st.sampled_from([-2.0, -0.5, 0.0, 0.25, 1.0]), min_size=3, max_size=3),
            min_size=n,
            max_size=n,
        ),
        st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=n, max_size=n),
    )
)


@pytest.mark.slow(seconds=1)
@settings(max_examples=60, deadline=None)
@given(rows_of_scores)
@pytest.mark.filterwarnings("ignore:No positive class")
def test_multilabel_map_and_macro_f1_match_scikit_learn(
    rows: tuple[list[list[float]], list[list[bool]]],
) -> None:
    scores, labels = torch.tensor(rows[0]), torch.tensor(rows[1]).float()
    expected = average_precision_score(labels.numpy(), scores.numpy(), average="macro")
    assert mean_average_precision(scores, labels) == pytest.approx(expected)
    batch = Batch({"image": scores, "target": labels})
    counts = count_labels(None, scores, batch)
    predicted = scores.sigmoid() >= 0.5
    assert macro_f1(counts, len(scores)) == pytest.approx(
        f1_score(labels, predicted, average="macro", zero_division=0)
    )


@pytest.fixture(scope="module")
def multilabel_run(scenes: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    averaged = ("model.ema.decay=0.9", "checkpoint.metric=val/map_ema")
    return run_warm(tmp_path_factory.mktemp("single"), *SMALL, f"data.root={scenes}", *averaged)


def read_predictions(path: Path) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """Return the table of a predictions.csv, and labels and scores with a column for each class."""
    table = pd.read_csv(path, keep_default_na=False).rename_axis("image").reset_index()
    places = pd.wide_to_long(table, ["class_", "probability_"], "image", "place")
    scores = places.reset_index().pivot(index="image", columns="class_", values="probability_")
    return (
        table,
        table["label"].str.get_dummies(";").reindex(columns=scores.columns, fill_value=0),
        scores,
    )


@pytest.mark.slow(seconds=2)
def test_multilabel_trains_a_model_of_one_sigmoid_on_one_label(
    scenes: Path, tmp_path: Path
) -> None:
    rows = [f"{number}.png,{'night' if number % 3 else ''}" for number in range(44)]
    path = scenes.with_name("one.csv")
    path.write_text("\n".join(["file,label", *rows]))
    run = run_warm(tmp_path / "run", *SMALL, f"data.root={path}", "train.class_weights=auto")
    table = tmp_path / "predictions.csv"
    last = ("checkpoint=last", "data.workers=0")
    assert entry.main([f"run={run}", f"predictions={table}", *last]) == 0
    written, labels, scores = read_predictions(table)
    expected = average_precision_score(labels.to_numpy(), scores.to_numpy(), average="macro")
    assert read_result(run).val["map"] == pytest.approx(expected, abs=1e-6)
    assert set(written["class_1"]) == {"night"} and "class_2" not in written


@pytest.mark.parametrize(("word", "weights"), [("", "ema"), ("weights=model", "model")])
def test_multilabel_metrics_of_a_run_match_scikit_learn_on_predictions_csv(
    multilabel_run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], word: str, weights: str
) -> None:
    """Without `weights`, evaluate.py evaluates raw and averaged weights, and writes the predictions
    of the set that checkpoint.metric names.
    """
    path = tmp_path / "predictions.csv"
    words = (f"run={multilabel_run}", f"predictions={path}", "checkpoint=last", "data.workers=0")
    assert entry.main([*words, *word.split()]) == 0
    printed = [json.loads(line)["weights"] for line in capfd.readouterr().out.splitlines()]
    assert printed == ([weights] if word else ["model", "ema"])
    table, labels, scores = read_predictions(path)
    val, suffix = read_result(multilabel_run).val, "_ema" if weights == "ema" else ""
    assert len(table) == val["samples"] and set(table["weights"]) == {weights}
    assert sorted(scores.columns) == sorted(LABELS) == list(labels.columns)
    expected = average_precision_score(labels.to_numpy(), scores.to_numpy(), average="macro")
    assert expected == pytest.approx(val[f"map{suffix}"], abs=1e-6)
    expected = f1_score(
        labels.to_numpy(), scores.to_numpy() >= 0.5, average="macro", zero_division=0
    )
    assert expected == pytest.approx(val[f"f1_macro{suffix}"], abs=1e-6)


def test_class_weights_auto_are_inversely_proportional_to_class_frequency() -> None:
    labels = torch.tensor([0] * 6 + [1] * 3 + [2])
    weights = task_of(3, TrainConfig(class_weights="auto")).class_weights(labels)["class_weight"]
    # The weights equal those of scikit-learn's class_weight="balanced".
    balanced = compute_class_weight("balanced", classes=np.arange(3), y=labels.numpy())
    assert weights.tolist() == pytest.approx(balanced.tolist())
    several = torch.tensor([[1.0, 0.0], [1.0, 1.0], [1.0, 0.0], [0.0, 0.0]])
    train = TrainConfig(task="multilabel", loss="bce", class_weights="auto")
    weights_of = task_of(2, train).class_weights(several)
    assert weights_of["pos_weight"].tolist() == pytest.approx([1 / 3, 3])
    assert weights_of["class_weight"].tolist() == pytest.approx([4 / 2, 4 / 6])


def loss_of(config: TrainConfig, scores: Tensor, labels: Tensor) -> float:
    """Return the training loss on all training images in one batch."""
    task = task_of(scores.shape[1], config)
    task.prepare(labels)
    return float(task.build_criterion()(scores, labels).mean().item())


@pytest.mark.parametrize("weights", ["auto", [0.2, 7.0]])
@pytest.mark.parametrize(("loss", "share"), [("ce", 0.99), ("ce", 0.5), ("bce", 0.99)])
def test_class_weights_do_not_change_the_mean_loss_of_an_untrained_model(
    loss: str, share: float, weights: Any
) -> None:
    labels = (torch.arange(200) >= 200 * share).long()
    config = TrainConfig(loss=loss, class_weights=weights)
    assert loss_of(config, torch.zeros(200, 2), labels) == pytest.approx(np.log(2), rel=1e-4)


@pytest.mark.parametrize("loss", ["bce", "asl"])
@pytest.mark.parametrize("positives", [(1, 50, 99), (0, 50, 100)])
def test_multilabel_class_weights_do_not_change_the_mean_loss(
    loss: str, positives: tuple[int, ...]
) -> None:
    labels = torch.stack([(torch.arange(100) < count).float() for count in positives], 1)
    # Turn off focusing and clipping, because the asymmetric loss then equals binary cross entropy.
    kwargs = {"gamma_pos": 0, "gamma_neg": 0, "clip": 0} if loss == "asl" else {}
    plain, auto, listed = (
        TrainConfig(task="multilabel", loss=loss, loss_kwargs=kwargs, class_weights=weights)
        for weights in (None, "auto", [1.0, 10.0, 100.0])
    )
    scores = torch.zeros(100, 3)
    expected = pytest.approx(loss_of(plain, scores, labels), rel=1e-4)
    assert loss_of(auto, scores, labels) == expected
    assert loss_of(listed, scores, labels) == expected
    half = labels[:, [1, 1, 1]]
    scores = torch.randn(100, 3, generator=torch.Generator().manual_seed(2))
    assert loss_of(auto, scores, half) == pytest.approx(loss_of(plain, scores, half), rel=1e-4)


def test_class_weights_must_have_one_number_per_class_and_auto_includes_absent_classes() -> None:
    with pytest.raises(ValueError, match=r"train\.class_weights=\[0\.0, 1\.0\]"):
        task_of(2, TrainConfig(class_weights=[0.0, 1.0])).class_weights(torch.tensor([0, 0]))
    with pytest.raises(ValueError, match=r"train\.class_weights=\[1\.0, 2\.0\]: .* 3 classes"):
        task_of(3, TrainConfig(class_weights=[1.0, 2.0])).class_weights(None)
    # The last class has no training image, which data.limit_train can cause.
    weights = task_of(3, TrainConfig(class_weights="auto")).class_weights(torch.tensor([0, 0, 1]))
    assert weights["class_weight"].tolist() == pytest.approx([0.75, 1.5, 1.125])


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_class_weighted_cross_entropy_of_an_image_is_multiplied_by_the_weight_of_its_class(
    smoothing: float,
) -> None:
    """The library divides by the number of images, not by the sum of weights."""
    weights = [0.5, 2.0, 1.0]
    task = task_of(3, TrainConfig(class_weights=weights, smoothing=smoothing))
    task.prepare(None)
    scores = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([0, 1, 2, 1])
    losses = task.build_criterion()(scores, labels)
    options: Any = {"reduction": "none", "label_smoothing": smoothing}
    expected = torch.nn.functional.cross_entropy(scores, labels, torch.tensor(weights), **options)
    assert losses.tolist() == pytest.approx(expected.tolist())


NAMES = ("red", "green")


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
    targets = ("train=regression", "+data.kwargs.targets=[red,green]", f"data.root={colors}")
    words = (*OF_CSV, *targets, "data.image_size=[16,24]", "data.batch_size=12")
    return run_warm(tmp_path_factory.mktemp("regression") / "run", *words)


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
    (tmp_path / "labels.csv").write_text(f"file,red,green\na.png,1,2\nb.png,{cell},2\n")
    config = resolved("train=regression", "data=csv", f"data.root={tmp_path}")
    config.data.kwargs = {"targets": list(NAMES)}
    with pytest.raises(ValueError, match=f"line 3: {named}"):
        check_data(config)

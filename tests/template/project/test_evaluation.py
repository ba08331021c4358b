"""Evaluation reproduces the metrics of a checkpoint. With worst=N, it writes a page of the images
with the highest loss.
"""

from __future__ import annotations

import base64
import io
import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional
from torchvision.transforms import v2

import evaluate as entry
from src.commands.evaluate import _check_head, evaluate_config, worst_images
from src.commands.load import load_trained
from src.commands.predict import predict
from src.data.transforms import OnImage
from src.schema import ModelConfig, ResolvedConfig, ResolvedTrain
from src.tasks.classification import Classification
from src.tasks.images import ImageTask
from src.train.build import build_data_and_model
from tests.template.runs import (
    cpu_strategy,
    evaluate_batches,
    own,
    parts_of,
    resolved,
    run_python,
    run_warm,
)
from timm_parallel import checked_configs, find_task
from timm_parallel.checked_configs import evaluation_config
from timm_parallel.config.compose import save_config
from timm_parallel.data.build import build_dataset
from timm_parallel.data.dataset import InMemory
from timm_parallel.data.loader import Loader
from timm_parallel.machine.ranks import Ranks
from timm_parallel.parallel.strategy import Single, build_strategy
from timm_parallel.record.result import read_result
from timm_parallel.task import Evaluation
from timm_parallel.testing.commands import Finished
from timm_parallel.testing.ranks import in_ranks


def test_evaluation_of_a_slurm_run_uses_the_devices_of_this_machine_and_compiles_no_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm = ("cluster=slurm", "cluster.submit=false", "cluster.gpus=1", "cluster.nodes=2")
    save_config(resolved(*slurm, "parallel=ddp", "model.compile=true"), tmp_path)
    config = evaluation_config(tmp_path, [])
    assert isinstance(config.model, ModelConfig) and not config.model.compile
    parallel = config.parallel
    assert (parallel.strategy, parallel.devices) == ("single", 1)
    assert parallel.accelerator == resolved("parallel=single").parallel.accelerator
    spread = ["parallel=ddp", "parallel.backend=gloo"]
    monkeypatch.setattr(
        checked_configs, "ranks_from_environment", lambda environment: Ranks(0, 2, 0, 2)
    )
    assert evaluation_config(tmp_path, spread).parallel.devices == 2


@pytest.mark.parametrize("word", ["data.batch_size=x", "data.image_size=[32"])
def test_value_that_cannot_be_read_is_refused_for_the_evaluation_of_a_run(
    tmp_path: Path, word: str
) -> None:
    save_config(resolved("parallel=single"), tmp_path)
    with pytest.raises(ValueError, match=f"^{re.escape(word)}: "):
        evaluation_config(tmp_path, [word])


def test_images_in_memory_are_evaluated_with_the_transform_of_an_own_task(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Resizing and cropping are skipped for such images, but a transform of a task is not."""
    config = resolved("parallel=single")

    def val_images() -> Tensor:
        loader = build_data_and_model(config, Single(config.parallel, Ranks())).eval_loaders["val"]
        return next(iter(loader)).image

    before, inherited = val_images(), ImageTask.evaluation_transform

    def upside_down(task: Any, preprocessing: Any) -> Any:
        return OnImage(v2.Compose([inherited(task, preprocessing).transform, _flip]))

    monkeypatch.setattr(Classification, "evaluation_transform", upside_down)
    assert torch.equal(val_images(), before.flip(2))


def _flip(image: Tensor) -> Tensor:
    return image.flip(1)


def test_head_outputs_beyond_dataset_classes_are_never_predicted() -> None:
    """With a larger `model.num_classes`, top-1 and top-5 predictions are classes of the data."""

    class Larger(nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            return torch.cat([images.flatten(1), torch.full((len(images), 5), 9.0)], 1)

    labels = torch.arange(7)
    actual = evaluate_batches(
        Larger(), [(torch.eye(7).view(7, 1, 7, 1), labels)], cpu_strategy(), 7, 7
    )
    assert (actual.numbers["acc"], actual.numbers["acc5"]) == (1.0, 1.0)
    assert actual.numbers["loss"] == pytest.approx(
        functional.cross_entropy(torch.eye(7), labels).item()
    )


def test_bce_evaluation_and_prediction_ignore_outputs_beyond_the_classes_of_the_dataset(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (
        *("train.loss=bce", "train.smoothing=0.1", "model.num_classes=13"),
        *("parallel=single", "train.epochs=1", "checkpoint.metric=val/loss"),
    )
    run, photos = run_warm(tmp_path / "run", *words), tmp_path / "photos"
    trained = load_trained(run, None, None, torch.device("cpu"))
    data = build_dataset(trained.config.data).val
    assert isinstance(data, InMemory)
    mean, std = trained.preprocessing.mean[0], trained.preprocessing.std[0]
    with torch.no_grad():
        scores = trained.model((data.images / 255 - mean) / std)
    assert scores.shape == (270, 13)
    odds = scores[:, :10].sigmoid().double()
    is_class = functional.one_hot(data.labels, 10).bool()
    wanted = -torch.where(is_class, odds, 1 - odds).log().mean().item()
    assert read_result(run).val["loss"] == pytest.approx(wanted, rel=1e-5)
    saved = torch.load(run / "checkpoints" / "best.pt", weights_only=True)
    assert saved["progress"]["best"] == pytest.approx(-wanted, rel=1e-5)
    assert entry.main([f"run={run}", "split=val"]) == 0
    assert json.loads(capsys.readouterr().out)["loss"] == pytest.approx(wanted, rel=1e-5)
    photos.mkdir()
    Image.fromarray(data.images[0][0].numpy()).save(photos / "digit.png")
    (actual,) = predict(run, photos, cpu_strategy(), topk=10, workers=0).values()
    assert actual is not None
    shares = [actual[f"probability_{place}"] for place in range(1, 11)]
    assert shares == pytest.approx(sorted(odds[0].tolist(), reverse=True), rel=1e-4)


@pytest.mark.parametrize("fault", ["in the data", "in evaluating"])
def test_failed_evaluation_closes_loaders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """Loader workers ignore SIGTERM, so the interpreter would wait for open loaders at exit."""
    closed: list[str] = []
    monkeypatch.setattr(Loader, "close", lambda loader: closed.append("loader"))
    if fault == "in evaluating":
        monkeypatch.setattr("src.commands.evaluate.evaluate", lambda *_, **__: 1 / 0)
    config = resolved("parallel=single", "parallel.accelerator=cpu", "model=tiny")
    # Give a file of weights, because the number of classes is then not checked.
    config.model.weights = str(tmp_path)
    monkeypatch.setattr("src.commands.evaluate.load_weights", lambda *_, **__: "")
    split = "val" if fault == "in evaluating" else "other"
    with pytest.raises((ZeroDivisionError, ValueError)):
        next(evaluate_config(config, build_strategy(config), None, split, None))
    assert closed == ["loader", "loader"]


@pytest.mark.processes
def test_evaluate_py_prints_null_for_a_metric_that_is_not_a_number(
    finished_run: Finished, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def infinite(*_: Any, **__: Any) -> Evaluation:
        return Evaluation(3, {"loss": float("nan"), "acc": 0.25, "perplexity": float("inf")}, {})

    monkeypatch.setattr("src.commands.evaluate.evaluate", infinite)
    monkeypatch.setattr(Classification, "details", lambda *_: {"per_class": [float("nan"), 1.0]})
    assert entry.main([f"run={finished_run.folder}", "split=val"]) == 0
    line = json.loads(capfd.readouterr().out, parse_constant=pytest.fail)
    assert (line["loss"], line["acc"], line["perplexity"]) == (None, 0.25, None)
    assert line["per_class"] == [None, 1.0]


@pytest.mark.slow(seconds=14)
def test_evaluate_py_reproduces_metrics_of_best_and_last_checkpoint(
    finished_run: Finished, capsys: pytest.CaptureFixture[str]
) -> None:
    done = run_python("evaluate.py", f"run={finished_run.folder}")
    assert done.returncode == 0, done.stderr
    actual = {line["split"]: line for line in map(json.loads, done.stdout.splitlines())}
    result = finished_run.result
    assert actual["val"]["acc"] == result["val"]["acc_best"]
    assert actual["val"]["samples"] == 270
    for key in ("correct", "samples", "acc", "acc5", "acc_per_class"):
        assert actual["test"][key] == result["test"][key], key
    assert actual["test"]["loss"] == pytest.approx(result["test"]["loss"], rel=1e-6)
    words = ("split=val", "checkpoint=last", "data.batch_size=7")
    assert entry.main([f"run={finished_run.folder}", *words]) == 0
    last = json.loads(capsys.readouterr().out)
    assert last["correct"] == result["val"]["correct"]
    assert last["loss"] == pytest.approx(result["val"]["loss"], rel=1e-6)


@pytest.mark.processes
def test_evaluate_py_refuses_a_damaged_or_missing_checkpoint_or_that_of_another_model(
    finished_run: Finished, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(finished_run.folder, tmp_path / "run")

    def refusal() -> str:
        assert entry.main([f"run={folder}"]) == 2
        out, err = capfd.readouterr()
        assert out == "" and len(err.splitlines()) == 1 and err.startswith("evaluate.py: "), err
        return err

    config, text = folder / "config.yaml", (folder / "config.yaml").read_text()
    config.write_text(text.replace("embed_dim: 48", "embed_dim: 96"))
    assert "a different model" in refusal()
    config.write_text(text)
    for path in (folder / "checkpoints").iterdir():
        path.write_bytes(path.read_bytes()[:1000])
    assert "best.pt" in refusal()
    shutil.rmtree(folder / "checkpoints")
    assert "checkpoint" in refusal()


OWN_WEIGHTS = f"model.weights={__file__}"


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ([], "run=<run folder>"),
        (["-m", "run=a,b"], "shell loop"),
        (["model.name=resnet18"], "model.pretrained=true or model.weights"),
        (["model.name=resnet18", "checkpoint=best"], "give run=<run folder> too"),
        (["model.name=resnet18", "optim.lr=1"], "optim.lr=1: not an evaluation option"),
        (["run=/nowhere", "model.name=resnet18"], "model.name=resnet18: not an evaluation option"),
        (["run=/nowhere", "data.rot=/x"], "did you mean data.root"),
        (["run=/nowhere"], "/nowhere"),
        (["run=/nowhere", "splt=val"], "did you mean split"),
        (["run=/nowhere", "page=worst.html"], "page=worst.html"),
        (["run=/nowhere", "split=train"], "split: invalid choice: 'train'"),
        ([OWN_WEIGHTS, "parallel.devices=2"], "parallel.devices=2: single uses one device"),
        ([OWN_WEIGHTS, "data.mean=[0.5]"], "data.mean and data.std: set both or neither"),
    ],
)
def test_evaluate_py_refuses_invalid_arguments_in_one_line(
    overrides: list[str], reason: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert entry.main(overrides) == 2
    err = capfd.readouterr().err
    assert reason in err and len(err.splitlines()) == 1


@pytest.mark.processes
def test_evaluate_py_evaluates_a_model_given_by_model_name_and_model_weights(
    finished_run: Finished, capsys: pytest.CaptureFixture[str]
) -> None:
    """The weights come from a run, so the metrics are known."""
    weights = finished_run.folder / finished_run.result["checkpoint"]
    assert entry.main(["model=tiny", f"model.weights={weights}", "data=digits", "split=test"]) == 0
    actual = json.loads(capsys.readouterr().out)
    assert actual["correct"] == finished_run.result["test"]["correct"]
    assert (actual["model"], actual["world_size"]) == (finished_run.result["model"], 1)


@pytest.mark.processes
def test_evaluate_py_refuses_data_with_other_classes_than_the_run(
    finished_run: Finished, capfd: pytest.CaptureFixture[str]
) -> None:
    """Labels of different classes have different meanings, even if the number of classes is the
    same.
    """
    overrides = ["data=synthetic", "data.kwargs.in_chans=1", "data.kwargs.num_classes=10"]
    assert entry.main([f"run={finished_run.folder}", *overrides]) == 2
    err = capfd.readouterr().err
    assert (
        "class_0, class_1" in err and "0, 1, 2, 3, 4 …" in err and str(finished_run.folder) in err
    )


@pytest.mark.processes
def test_evaluate_py_refuses_data_without_an_image_in_val_or_test(
    finished_run: Finished, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A CSV file without the column split has training images only."""
    Image.new("L", (8, 8)).save(tmp_path / "a.png")
    lines = ["file,label", *(f"a.png,{digit}" for digit in range(10))]
    (tmp_path / "labels.csv").write_text("\n".join(lines))
    # The run has gray images, and those of a CSV file have three channels.
    colors = ("data.mean=[0.5,0.5,0.5]", "data.std=[0.5,0.5,0.5]")
    overrides = ["data=csv", f"data.root={tmp_path}", *colors]
    assert entry.main([f"run={finished_run.folder}", *overrides]) == 2
    assert f"data.root={tmp_path}: no image is in val or test" in capfd.readouterr().err


def test_checkpoint_metric_is_refused_when_the_model_has_too_few_outputs_for_it() -> None:
    classes = ("data=synthetic", "data.kwargs.num_classes=5", "parallel=single")
    with pytest.raises(ValueError, match=r"checkpoint.metric=val/acc5: .* 5 outputs"):
        parts_of(resolved(*classes, "checkpoint.metric=val/acc5"))


def test_evaluate_py_refuses_head_with_wrong_number_of_classes() -> None:
    model = nn.Linear(2, 2)
    model.pretrained_cfg = {"num_classes": 1000}  # type: ignore[assignment]
    _check_head(ResolvedConfig(), model, 1000)
    with pytest.raises(ValueError, match=r"1000 classes, the data has 10"):
        _check_head(ResolvedConfig(), model, 10)


SEGMENTATION = (
    *("experiment=segmentation", "model=segmenter", "model.kwargs={backbone: resnet10t}"),
    *("data=shapes", "train=segmentation", "data.batch_size=8", "data.limit_train=16"),
    *("train.max_steps=1", "parallel=single", "parallel.accelerator=cpu"),
)


def pictures_of(page: Path) -> list[Image.Image]:
    codes = re.findall(r"base64,([^\"]+)", page.read_text(encoding="utf-8"))
    return [Image.open(io.BytesIO(base64.b64decode(code))) for code in codes]


def write_worst(ranks: Ranks, store: Any, run: str, page: str) -> None:
    words = []
    if store is not None:
        # This process has no environment variables of torchrun.
        checked_configs.ranks_from_environment = lambda environment: ranks
        words = ["parallel=ddp", "parallel.devices=2"]
    config = own(evaluation_config(Path(run), words))
    options: Any = {"worst": 7, "page": Path(page)}
    strategy = build_strategy(config, ranks, store)
    assert list(evaluate_config(config, strategy, Path(run), "val", "last", **options))


@pytest.mark.slow(seconds=3)
def test_page_has_the_images_with_the_highest_loss_on_one_and_two_ranks(
    finished_run: Finished, tmp_path: Path
) -> None:
    page = tmp_path / "single.html"
    write_worst(Ranks(), None, str(finished_run.folder), str(page))
    text = page.read_text(encoding="utf-8")
    # The losses of a loop of its own, from the highest.
    trained = load_trained(finished_run.folder, "last", "model", torch.device("cpu"))
    val = build_dataset(trained.config.data).val
    mean, std = (
        torch.tensor(of)[:, None, None]
        for of in (trained.preprocessing.mean, trained.preprocessing.std)
    )
    losses: list[Tensor] = []
    with torch.inference_mode():
        for index in range(len(val)):
            image, label = val[index]
            scores = trained.networks["model"](((image / 255 - mean) / std)[None])
            losses.append(torch.nn.functional.cross_entropy(scores, torch.tensor([label])))
    order = torch.stack(losses).argsort(descending=True)[:7].tolist()
    assert [int(index) for index in re.findall(r"path: (\d+)", text)] == order
    shown = [float(loss) for loss in re.findall(r"loss: ([\d.]+)", text)]
    assert shown == pytest.approx([float(losses[index]) for index in order], rel=1e-3)
    labels = re.findall(r"label: (\w+)", text)
    assert labels == [trained.task.names[int(val[index][1])] for index in order]
    assert len(re.findall("class_1: ", text)) == len(re.findall("probability_1: ", text)) == 7
    assert len(pictures_of(page)) == 7
    other = tmp_path / "ddp.html"
    in_ranks(write_worst, 2, str(finished_run.folder), str(other))
    assert re.findall(r"path: \d+", other.read_text()) == re.findall(r"path: \d+", text)


def test_task_without_a_table_writes_no_predictions_and_a_page_with_the_indices_of_images(
    finished_run: Finished,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delattr(Classification, "table")
    words, table, page = [f"run={finished_run.folder}", "split=val"], tmp_path / "t.csv", "p.html"
    with monkeypatch.context() as patch:
        # The refusal comes before the evaluation.
        patch.delattr("src.commands.evaluate.evaluate")
        assert entry.main([*words, f"predictions={table}"]) == 2 and not table.exists()
    assert "predictions: train.task=classification has no table" in capsys.readouterr().err
    assert entry.main([*words, "worst=2", f"page={tmp_path / page}"]) == 0
    assert len(re.findall(r"index: \d+", (tmp_path / page).read_text())) == 2


@pytest.mark.slow(seconds=3)
def test_page_of_a_segmentation_shows_image_mask_and_prediction_side_by_side(
    tmp_path: Path,
) -> None:
    run = run_warm(tmp_path / "run", *SEGMENTATION)
    assert entry.main([f"run={run}", "split=val", "worst=2"]) == 0
    page = run / "worst.html"
    pictures = pictures_of(page)
    assert [picture.size for picture in pictures] == [(192, 64)] * 2
    photo, mask, predicted = (pictures[0].crop((64 * k, 0, 64 * k + 64, 64)) for k in range(3))
    assert len({photo.tobytes(), mask.tobytes(), predicted.tobytes()}) == 3
    assert "miou: " in page.read_text()


def test_images_of_a_regression_are_described_by_their_numbers_and_nan_comes_first() -> None:
    config = resolved()
    config.train = ResolvedTrain(task="regression", loss="mse")
    task = find_task("regression", ImageTask)(config, ["age"])
    # Image 1 could not be read.
    indices, predicted = torch.tensor([0, 2, 3]), torch.tensor([[1.0], [5.0], [math.nan]])
    truth = torch.tensor([[1.0], [1.0], [2.5]])
    losses = torch.tensor([0.0, 16.0, math.nan])
    evaluation = Evaluation(3, {}, {}, (indices, predicted, truth), (losses,))
    split = [(torch.full((1, 4, 6), shade, dtype=torch.uint8), None) for shade in range(4)]
    (first, of_first), (second, of_second) = worst_images(evaluation, split, task, 2)
    assert of_first == ["loss: nan", "path: 3", "age: 2.500", "age_predicted: nan"]
    assert of_second == ["loss: 16", "path: 2", "age: 1.000", "age_predicted: 5.000"]
    assert (first.size, first.getpixel((0, 0)), second.getpixel((0, 0))) == (
        (6, 4),
        (3, 3, 3),
        (2, 2, 2),
    )

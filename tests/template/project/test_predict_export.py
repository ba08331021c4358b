"""Prediction and export of a trained model have the accuracy of its evaluation."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file

from scripts import export as export_script
from scripts import predict as predict_script
from src.commands import export
from src.commands.load import load_trained
from src.commands.predict import Predictions, predict
from src.schema import DataConfig
from src.tasks.classification import Classification
from src.tasks.images import ImageTask
from tests.template.runs import assert_equal_trees, cpu_strategy, run_warm
from timm_parallel import find_task
from timm_parallel.batch import Batch
from timm_parallel.data.build import build_dataset
from timm_parallel.data.dataset import InMemory
from timm_parallel.machine.ranks import NEEDED, Ranks
from timm_parallel.parallel.strategy import Strategy
from timm_parallel.record.result import Result, write_result
from timm_parallel.testing.commands import Finished
from timm_parallel.testing.ranks import in_ranks

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save the test split of digits as <label>/<number>.png, and add an unreadable file."""
    folder = tmp_path_factory.mktemp("digits")
    test = build_dataset(DataConfig(name="digits")).test
    assert test is not None
    for number in range(len(test)):
        image, label = test[number]
        (folder / str(int(label))).mkdir(exist_ok=True)
        Image.fromarray(image[0].numpy()).save(folder / str(int(label)) / f"{number}.png")
    (folder / "0" / "torn.png").write_bytes(b"\x89PNG\r\n\x1a\nhello")
    return folder


def predicted(
    ranks: Ranks | None,
    store: Any,
    run: Path,
    images: Path,
    parallel: str = "single",
    topk: int = 3,
) -> Predictions:
    devices = 1 if parallel == "single" else 2
    strategy = cpu_strategy(parallel, devices, ranks, store)
    return predict(run, images, strategy, topk=topk, workers=0)


def shares_of(values: dict[str, Any]) -> list[float]:
    return [share for name, share in values.items() if name.startswith("probability_")]


def test_predict_reaches_test_accuracy_of_run_and_lists_unreadable_images(
    finished_run: Finished, digits: Path
) -> None:
    """topk exceeds the number of classes, so the table has all classes."""
    actual = predicted(None, None, finished_run.folder, digits, topk=99)
    assert [Path(path).name for path, values in actual.items() if values is None] == ["torn.png"]
    assert list(actual) == sorted(str(path) for path in digits.rglob("*.png"))
    read = {path: values for path, values in actual.items() if values is not None}
    right = [values["class_1"] == Path(path).parent.name for path, values in read.items()]
    expected = finished_run.result["test"]["acc"]
    assert sum(right) / len(right) == pytest.approx(expected, abs=1e-9)
    for values in read.values():
        shares = shares_of(values)
        assert shares == sorted(shares, reverse=True)
        assert sum(shares) == pytest.approx(1, abs=1e-5)
        assert sorted(values[f"class_{place}"] for place in range(1, 11)) == [*"0123456789"]


def test_predict_states_which_files_are_no_images(
    finished_run: Finished, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a.heic", "b.heic", "c\x1b.raw", "no_suffix"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(ValueError, match=r"no image.*\.heic \(2\)"):
        predicted(None, None, finished_run.folder, tmp_path)
    Image.new("L", (8, 8)).save(tmp_path / "d.png")
    (tmp_path / ".cache").mkdir()
    predicted(None, None, finished_run.folder, tmp_path)
    err = capsys.readouterr().err
    for shown in (".heic (2)", ".raw (1)", "no suffix (1)", "folder .cache (1)"):
        assert shown in err
    assert "\x1b" not in err


@pytest.mark.processes
def test_predict_py_writes_its_output_again_when_an_image_is_a_broken_link(
    finished_run: Finished, tmp_path: Path
) -> None:
    Image.new("L", (8, 8)).save(tmp_path / "a.png")
    (tmp_path / "b.png").symlink_to(tmp_path / "missing.png")
    output = tmp_path / "predictions.csv"
    output.touch()
    words = [f"run={finished_run.folder}", f"images={tmp_path}", f"output={output}", "workers=0"]
    assert predict_script.main(words) == 0
    _, predicted_row, unreadable_row = output.read_text().splitlines()
    assert "a.png" in predicted_row and unreadable_row.startswith(f"{tmp_path / 'b.png'},,")


@pytest.mark.processes
def test_predict_py_names_the_image_of_which_the_prediction_is_not_a_number(
    finished_run: Finished,
    digits: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Finite weights may overflow, for example in half precision."""
    predict_scores = Classification.predict

    def overflowing(task: Classification, networks: Any, batch: Batch) -> torch.Tensor:
        scores = predict_scores(task, networks, batch)
        scores[1, 3] = float("inf")
        return scores

    monkeypatch.setattr(Classification, "predict", overflowing)
    words = [f"run={finished_run.folder}", f"images={digits / '4'}", "workers=0"]
    assert predict_script.main(words) == 2
    out, err = capsys.readouterr()
    second = sorted((digits / "4").glob("*.png"))[1]
    assert out == "" and str(second) in err.splitlines()[-1]


@pytest.mark.parametrize(("parallel", "world"), [("ddp", 2), ("ddp", 3), ("dp", 1)])
@pytest.mark.sample(3)
@pytest.mark.slow(seconds=2)
def test_predictions_of_dp_and_ddp_match_those_of_single(
    finished_run: Finished, digits: Path, parallel: str, world: int
) -> None:
    alone = predicted(None, None, finished_run.folder, digits)
    for actual in in_ranks(predicted, world, finished_run.folder, digits, parallel):
        assert list(actual) == list(alone)
        for one, other in zip(actual.values(), alone.values(), strict=True):
            assert (one is None) == (other is None)
            if one is not None and other is not None:
                assert one["class_1"] == other["class_1"]
                assert shares_of(one) == pytest.approx(shares_of(other), abs=1e-5)
                assert len(shares_of(one)) == 3


SRUN = ("STEP_ID", "PROCID", "LOCALID", "NODEID")


def test_command_uses_srun_tasks_as_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Starting ranks in each task of srun would make all of them write the same file."""
    for name in NEEDED:
        monkeypatch.delenv(name, raising=False)
    tasks = {"STEP_NUM_TASKS": "2", "STEP_NUM_NODES": "1", "STEP_TASKS_PER_NODE": "2"}
    for name, value in {**dict.fromkeys(SRUN, "0"), **tasks}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    given: list[Any] = []
    monkeypatch.setattr("timm_parallel.launch.torchrun.kill_on_parent_exit", lambda: None)
    monkeypatch.setattr("timm_parallel.launch.torchrun.open_store", lambda ranks: None)

    def build(config: Any, ranks: Ranks, store: Any) -> Strategy:
        given.append(ranks)
        return cpu_strategy()

    monkeypatch.setattr("timm_parallel.parallel.strategy.build_strategy", build)
    monkeypatch.setattr("src.commands.predict.predict", lambda *given, **options: {})
    (tmp_path / "config.yaml").touch()
    assert predict_script.main([f"run={tmp_path}", f"images={tmp_path}", "parallel=ddp"]) == 0
    assert [(ranks.rank, ranks.world_size) for ranks in given] == [(0, 2)]


@pytest.mark.parametrize(
    ("script", "overrides", "message"),
    [
        (predict_script, ["images=x"], r"required: --run"),
        (predict_script, ["run={run}", "images=nowhere"], r"images=nowhere: no such file"),
        (predict_script, ["run={run}", "images={empty}"], r"images=.*: no image in this folder"),
        (predict_script, ["run={empty}", "images={digits}"], r"no run folder|config\.yaml"),
        (predict_script, ["run={run}", "images={digits}", "format=xml"], r"'xml'.*csv.*json"),
        (predict_script, ["run={run}", "images={digits}", "output={image}"], r"one of the images"),
        (predict_script, ["run={run}", "images={digits}", "output={empty}"], r"output: .*folder"),
        (predict_script, ["run={run}", "images={digits}", "weights=ema"], r"weights=ema"),
        (predict_script, ["run={run}", "images={digits}", "devices=2"], r"devices=2"),
        (predict_script, ["run={run}", "images={digits}", "checkpoint=nowhere.pt"], r"nowhere\.pt"),
        (export_script, ["run={run}", "weights=ema"], r"weights=ema"),
    ],
)
def test_predict_and_export_scripts_refuse_bad_arguments_in_one_line(
    finished_run: Finished,
    digits: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    script: Any,
    overrides: list[str],
    message: str,
) -> None:
    image = next(digits.rglob("*.png"))
    places = {"run": finished_run.folder, "digits": digits, "image": image, "empty": tmp_path}
    assert script.main([word.format(**places) for word in overrides]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(message, line), line


def test_exported_model_loaded_by_timm_reaches_test_accuracy_of_the_run(
    finished_run: Finished, tmp_path: Path
) -> None:
    assert export_script.main([f"run={finished_run.folder}", f"output={tmp_path}"]) == 0
    config = json.loads((tmp_path / "config.json").read_text())
    model = timm.create_model(f"local-dir:{tmp_path}", pretrained=True)
    assert config["label_names"] == [*"0123456789"]
    data = config["pretrained_cfg"]
    test = build_dataset(DataConfig(name="digits")).test
    assert isinstance(test, InMemory)
    images = test.images.float().div(255).sub(data["mean"][0]).div(data["std"][0])
    assert images.shape[1:] == tuple(data["input_size"])
    expected = pytest.approx(finished_run.result["test"]["acc"], abs=1e-6)
    with torch.inference_mode():
        right = model.eval()(images).argmax(1) == test.labels
    assert right.float().mean().item() == expected


def test_exported_config_omits_tag_and_license_of_timm_weights_and_names_the_base_model(
    finished_run: Finished, tmp_path: Path
) -> None:
    origin = "timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k"
    trained = load_trained(finished_run.folder, None, None, CPU)
    trained.config = replace(trained.config, model=replace(trained.config.model, pretrained=True))
    export.export_safetensors(trained, tmp_path / "folder")
    export.export_hub(trained, tmp_path / "hub")
    # transformers passes num_classes to timm in addition to `model_args`.
    assert "num_classes" not in json.loads((tmp_path / "hub/config.json").read_text())["model_args"]
    for folder in ("folder", "hub"):
        config = json.loads((tmp_path / folder / "config.json").read_text())
        assert not {"license", "origin_url", "paper_ids", "tag"} & config["pretrained_cfg"].keys()
        assert "augreg" not in str(config["pretrained_cfg"])
        assert config.get("base_model") == origin
    card = (tmp_path / "hub" / "README.md").read_text()
    header = yaml.safe_load(card.split("---")[1])
    assert header.get("base_model") == origin and "license" not in header
    assert header["library_name"] == "timm"
    test = finished_run.result["test"]
    assert f"| test | acc | {test['acc']:.4f} | {test['samples']} |" in card


def test_export_exits_1_when_exported_model_and_checkpoint_outputs_differ(
    finished_run: Finished,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def save_changed_weights(model: Any, folder: str, **more: Any) -> None:
        with torch.no_grad():
            # Change the model while the file is written, so that file and model differ.
            model.head.weight[0] += 1
        save_for_hf(model, folder, **more)
        with torch.no_grad():
            model.head.weight[0] -= 1

    save_for_hf = export.save_for_hf
    monkeypatch.setattr(export, "save_for_hf", save_changed_weights)
    assert export_script.main([f"run={finished_run.folder}", f"output={tmp_path}/x"]) == 1
    assert "outputs differ from the checkpoint" in capsys.readouterr().err


def test_model_of_the_project_is_exported_as_its_weights_alone(
    finished_run: Finished, tmp_path: Path
) -> None:
    trained = load_trained(finished_run.folder, None, None, CPU)
    model = replace(trained.config.model, name="src.models.cifar_resnet.CifarResNet18")
    trained.config = replace(trained.config, model=model)
    (expression,) = export.export_safetensors(trained, tmp_path / "new")
    path = tmp_path / "new" / "model.safetensors"
    assert f"{model.name}(…).load_state_dict(safetensors.torch.load_file('{path}'))" == expression
    assert [*(tmp_path / "new").iterdir()] == [path]
    assert_equal_trees(load_file(path), dict(trained.model.state_dict()))


needs_onnx = pytest.mark.skipif(
    not all(map(find_spec, export_script.ONNX_PACKAGES)), reason="needs requirements-export.txt"
)


@pytest.mark.slow(seconds=7)
@needs_onnx
def test_onnx_export_matches_checkpoint_outputs_at_batch_sizes_1_and_7(
    finished_run: Finished, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import onnxruntime

    words = [f"run={finished_run.folder}", f"output={tmp_path}", "format=onnx"]
    assert export_script.main(words) == 0
    assert f"onnxruntime.InferenceSession('{tmp_path}/model.onnx')" in capsys.readouterr().out
    trained = load_trained(finished_run.folder, None, None, CPU)
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    for batch in (1, 7):
        images = torch.randn(batch, 1, 32, 32)
        (scores,) = session.run(["scores"], {"images": images.numpy()})
        torch.testing.assert_close(
            torch.from_numpy(scores), trained.model(images), atol=1e-4, rtol=0
        )
    metadata = session.get_modelmeta().custom_metadata_map
    assert json.loads(metadata["class_names"]) == [*"0123456789"]
    assert json.loads(metadata["input_size"]) == [1, 32, 32]
    assert json.loads(metadata["mean"]) == list(trained.preprocessing.mean)


def test_onnx_export_is_refused_with_a_pip_command_when_packages_are_missing(
    finished_run: Finished, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        export_script, "find_spec", lambda name: None if name == "onnxscript" else name
    )
    assert export_script.main([f"run={finished_run.folder}", "format=onnx"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "onnxscript: not installed; pip install -r requirements-export.txt" in line


@pytest.mark.skipif(find_spec("transformers") is None, reason="needs requirements-export.txt")
@pytest.mark.slow(seconds=3)
def test_hub_export_loads_in_transformers_with_class_names_and_normalization(
    finished_run: Finished, tmp_path: Path
) -> None:
    from transformers import AutoImageProcessor, AutoModelForImageClassification

    words = [f"run={finished_run.folder}", f"output={tmp_path}", "format=hub"]
    assert export_script.main(words) == 0
    trained = load_trained(finished_run.folder, None, None, CPU)
    model = AutoModelForImageClassification.from_pretrained(tmp_path).eval()
    assert model.config.id2label == {number: str(number) for number in range(10)}
    prepare = AutoImageProcessor.from_pretrained(tmp_path).data_config
    assert (prepare["mean"], prepare["input_size"]) == (trained.preprocessing.mean, (1, 32, 32))
    images = torch.randn(5, 1, 32, 32)
    with torch.inference_mode():
        torch.testing.assert_close(model(images).logits, trained.model(images))


def test_multilabel_hub_export_states_problem_type_in_config_and_sigmoid_in_model_card(
    finished_run: Finished, tmp_path: Path
) -> None:
    """The config also names outputs without a class, because transformers ignores a list of names
    that is too short.
    """
    trained = load_trained(finished_run.folder, None, None, CPU)
    train = replace(trained.config.train, task="multilabel", loss="bce")
    trained.config = replace(trained.config, train=train)
    trained.task = find_task(trained.config.train.task, ImageTask)(
        trained.config, trained.task.names[:8]
    )
    export.export_hub(trained, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["problem_type"] == "multi_label_classification"
    assert config["label_names"] == [*(str(n) for n in range(8)), "unused_8", "unused_9"]
    assert ".sigmoid()" in (tmp_path / "README.md").read_text()


@pytest.mark.parametrize(
    ("checkpoint", "weights", "values"),
    [
        ("best", "model", [("val", 0.5, 40), ("test", 0.7, 30)]),
        ("best", "ema", [("val", 0.6, 40), ("test", 0.8, 30)]),
        ("last", "model", [("val", 0.1, 40)]),
    ],
)
def test_hub_model_card_has_the_metrics_of_the_exported_checkpoint_and_weights(
    finished_run: Finished, tmp_path: Path, checkpoint: str, weights: str, values: list[Any]
) -> None:
    """Only the weights that the run tested have metrics of the test split."""
    lines = [
        {"step": 3, "val/acc": 0.5, "val/acc_ema": 0.6},
        {"step": 9, "val/acc": 0.1, "val/acc_best": 0.5},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    trained = load_trained(finished_run.folder, None, None, CPU)
    trained.run, trained.weights, trained.step = tmp_path, weights, 3 if checkpoint == "best" else 9
    trained.checkpoint = tmp_path / "checkpoints" / f"{checkpoint}.pt"
    test = {"acc": 0.7, "acc_ema": 0.8, "samples": 30, "acc_per_class": [0.7]}
    result = Result(status="done", checkpoint="checkpoints/best.pt", val={"samples": 40}, test=test)
    write_result(tmp_path, result)
    assert export._metrics(trained) == [
        (split, "acc", value, images) for split, value, images in values
    ]


@pytest.mark.parametrize(
    ("name", "status", "message"),
    [
        ("src.models.cifar_resnet.CifarResNet18", "done", "model.name=src"),
        (None, "interrupted", "interrupted, exp"),
    ],
)
def test_hub_export_of_custom_model_or_unfinished_run_is_refused_and_writes_nothing(
    finished_run: Finished, tmp_path: Path, name: str | None, status: str, message: str
) -> None:
    trained = load_trained(finished_run.folder, None, None, CPU)
    trained.run = tmp_path / "run"
    trained.run.mkdir()
    trained.config = replace(
        trained.config, model=replace(trained.config.model, name=name or "resnet18")
    )
    write_result(trained.run, Result(status=status))
    with pytest.raises(ValueError, match=message):
        export.export_hub(trained, tmp_path / "hub")
    assert not (tmp_path / "hub").exists()


@pytest.mark.slow(seconds=2)
def test_export_uses_ema_weights_when_checkpoint_metric_is_computed_with_ema_weights(
    tmp_path: Path,
) -> None:
    ema = ("model.ema.decay=0.9", "checkpoint.metric=val/acc_ema")
    run = run_warm(tmp_path / "run", "parallel=single", "train.epochs=1", "data=synthetic", *ema)
    loaded, raw = (load_trained(run, None, weights, CPU) for weights in (None, "model"))
    assert export_script.main([f"run={run}"]) == 0
    written = load_file(run / "export" / "model.safetensors")
    assert loaded.weights == "ema"
    assert_equal_trees(written, dict(loaded.model.state_dict()))
    assert not torch.equal(written["head.weight"], raw.model.state_dict()["head.weight"])

"""Each example trains alike under all strategies, with accumulation, and after a resume."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pages import EXTEND_PAGES, code_of, read
from PIL import Image
from timm.models import VisionTransformer
from torch import Tensor
from torchvision.transforms import v2

import evaluate as evaluate_script
from src.commands.evaluate import evaluate_config
from src.commands.predict import predict
from src.schema import DataConfig
from tests.template.runs import EXAMPLES, IMPORT_EXAMPLES, cpu_strategy, own
from timm_parallel import build_strategy, is_own_class
from timm_parallel.checked_configs import check_config, evaluation_config
from timm_parallel.config.compose import compose_command, load_config
from timm_parallel.config.resolve import resolve
from timm_parallel.data.build import load_dataset
from timm_parallel.errors import RefusedError
from timm_parallel.launch.job import prepare
from timm_parallel.record.result import read_result
from timm_parallel.run import checkpoint
from timm_parallel.testing.configs import conf as write_conf
from timm_parallel.testing.configs import parse, read_lines
from timm_parallel.testing.ranks import warm_ranks

# Examples of several networks, phases, averages, own weights and gathered samples.
EACH_COMMIT = ("byol", "detr", "gan", "simclr")
# Examples without a YAML, and the overrides with which a page trains them.
ON_PAGES = {
    name: [word for word in command.split() if not word.startswith("parallel")]
    for page in EXTEND_PAGES
    for name, command in re.findall(
        r"^cp examples/(\w+)\.py .*\npython train\.py (.*)$", read(page), re.MULTILINE
    )
    if not (EXAMPLES / f"{name}.yaml").exists()
}
ON_PAGES["csv_tracker"] = ["tracker=csv"]
# The others run with a small model.
OWN_MODEL = ["patches"]
NAMES = sorted([*(path.stem for path in EXAMPLES.glob("*.yaml")), *ON_PAGES])
# Number that an example logs.
LOGGED = {
    "macro_f1": "val/f1",
    "confident": "train/confidence",
    "z_loss": "train/z_loss",
    "watched": "train/largest_gradient",
}
COMMON = {
    "print_config": "false",
    "parallel.threads_per_device": "1",
    "data.batch_size": "24",
    "data.limit_train": "144",
    "train.epochs": "2",
    "train.max_steps": "8",
    "train.log_every": "2",
    "checkpoint.every_steps": "4",
    "checkpoint.keep": "9",
    "optim.warmup_epochs": "0",
    "tracker": "none",
}
HALVES = {"data.batch_size": "12", "train.accumulate": "2"}
SPREADS: dict[str, dict[str, str]] = {
    "single": {"parallel": "single"},
    "accumulated": {"parallel": "single", **HALVES},
    "dp2": {"parallel": "dp", "parallel.devices": "2"},
    "ddp3": {"parallel": "ddp", "parallel.devices": "3"},
    "ddp2_accumulated": {"parallel": "ddp", "parallel.devices": "2", **HALVES},
    "fsdp2_accumulated": {"parallel": "fsdp", "parallel.devices": "2", **HALVES},
}
# Spreads of the example of a strategy, which runs under this strategy only.
LOCAL_SGD = {
    "local_sgd": {
        "parallel.devices": "2",
        "parallel.options.period": "2",
        "+parallel.options.momentum": "0.9",
    },
    "local_sgd_of_each_step": {"parallel.devices": "2", "parallel.options.period": "1"},
    "local_sgd_on_one_device": {"parallel.devices": "1"},
}
# Spreads that the config of an example rejects, and the key that it names.
REFUSED = {
    # SAM needs the norm of whole gradients.
    ("sam", "fsdp2_accumulated"): "optim.opt",
    # DataParallel spreads one network.
    **{(name, "dp2"): "parallel" for name in ("byol", "dino", "gan", "mean_teacher", "simclr")},
}
# Options of an example in addition to COMMON.
OPTIONS = {
    # A stream has no indices of which some could be chosen.
    "stream": {"data.limit_train": "null", "+data.kwargs.num_samples": "144"},
    "csv_tracker": {"tracker": "csv"},
    # The ranks have momentum of their own, and a checkpoint that of rank 0 only.
    "local_sgd": {"optim.momentum": "0"},
}
# Rounding errors change the weights more with SAM and signum, which normalize gradients.
TOLERANCE = {"sam": 1e-5, "signum": 1e-3}


@pytest.fixture(scope="module")
def conf(tmp_path_factory: pytest.TempPathFactory, examples: Path) -> Path:
    """Return a folder of configs that has the experiments of all examples, and the tracker of a
    page.
    """
    folder = tmp_path_factory.mktemp("examples") / "conf"
    (folder / "experiment").mkdir(parents=True)
    for path in examples.glob("*.yaml"):
        shutil.copy(path, folder / "experiment")
    [tracker] = code_of("docs/extend_training.md", "yaml")
    return write_conf(folder, tracker__csv=tracker)


def write_npz(path: Path) -> Path:
    """Write gray images of two classes with the arrays and the image size of MedMNIST."""
    draw, arrays = np.random.default_rng(0), {}
    for name, count in (("train", 160), ("val", 16), ("test", 8)):
        labels = np.arange(count)[:, None] % 2
        noise = draw.integers(0, 100, (count, 28, 28))
        arrays[f"{name}_images"] = (noise + 150 * labels[..., None]).astype(np.uint8)
        arrays[f"{name}_labels"] = labels.astype(np.uint8)
    np.savez(path, allow_pickle=True, **arrays)
    return path


@pytest.fixture(scope="module")
def train(conf: Path) -> Callable[..., Path]:
    """Return a function `(example, spread, folder) -> folder` that trains an example."""
    base = conf.parent
    (base / "first.py").write_text(IMPORT_EXAMPLES, encoding="utf-8")

    def needed(example: str) -> dict[str, str]:
        """Return the options without which an example has no data or no teacher."""
        if example == "tiff":
            if not (base / "tiff").exists():
                import_module("src.data.tiff").make_up(base / "tiff")
            return {"data.root": str(base / "tiff")}
        if example == "distillation":
            return {"train.task_kwargs.teacher": str(get("lora", "single"))}
        if example == "npz":
            return {"data.root": str(write_npz(base / "data.npz"))}
        return {}

    def get(example: str, spread: str, folder: Path | None = None) -> Path:
        at = folder or base / f"{example}_{spread}"
        if folder is None and at.exists():
            return at
        options = needed(example)
        at.mkdir(exist_ok=True)
        config = compose(conf, example, spread, options)
        check_config(config)
        config = resolve(config)
        prepare(config, at)
        ended = warm_ranks(config, at, first=base / "first.py")
        assert not ended.exit_codes, (at / "console.txt").read_text(encoding="utf-8")
        return at

    return get


def compose(conf: Path, example: str, spread: str, options: dict[str, str]) -> Any:
    own = ON_PAGES.get(example, [f"experiment={example}"])
    if example in ON_PAGES and example not in OWN_MODEL:
        own = ["model=tiny", *own]
    words = dict(word.partition("=")[::2] for word in own)
    how = (SPREADS | LOCAL_SGD)[spread]
    words |= {**COMMON, **OPTIONS.get(example, {}), **how, **options}
    given = parse(*(f"{key}={value}" for key, value in words.items()), "--config-dir", str(conf))
    config: Any = compose_command(given).config
    # With SGD, rounding errors stay small.
    if not is_own_class(config.optim.opt):
        config.optim.opt, config.optim.lr, config.optim.kwargs = "momentum", 0.01, {}
        config.optim.of = {phase: {"lr": 0.02} for phase in config.optim.of}
    return config


def weights_of(folder: Path, name: str = "last") -> dict[str, Tensor]:
    contents = checkpoint.load(folder / "checkpoints" / f"{name}.pt")
    parts = {"model": contents["model"], **contents["networks"], **contents["averages"]}
    return {
        f"{part}.{key}": tensor.double()
        for part, tensors in parts.items()
        for key, tensor in tensors.items()
    }


def difference(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    """Return the norm of the difference of all weights, relative to the norm of the weights."""
    assert first.keys() == second.keys()
    squares = sum(float((first[name] - second[name]).square().sum()) for name in first)
    return float((squares / sum(float(of.square().sum()) for of in first.values())) ** 0.5)


def _cases() -> list[Any]:
    """Return each example under each spread that it accepts. At every commit, those of EACH_COMMIT
    run under ddp with accumulation.
    """
    cases = []
    for example in NAMES:
        spreads = ["ddp3"] if example in ON_PAGES else ["dp2", "ddp3", "fsdp2_accumulated"]
        # BatchNorm of patches gets the images of a rank. The teacher of distillation is a second
        # network, which DataParallel would not spread.
        left_out = {"patches": spreads, "local_sgd": spreads, "distillation": ["dp2"]}
        for spread in spreads:
            if spread not in left_out.get(example, ()) and (example, spread) not in REFUSED:
                cases.append(pytest.param(example, spread, marks=pytest.mark.nightly))
    return cases + [(example, "ddp2_accumulated") for example in EACH_COMMIT]


def some_at_each_commit(names: list[str], *chosen: str) -> list[Any]:
    """Return parameter sets of which those that are not chosen are nightly."""
    nightly = [pytest.mark.nightly]
    return [pytest.param(name, marks=[] if name in chosen else nightly) for name in names]


@pytest.mark.processes
@pytest.mark.slow(seconds=3)
@pytest.mark.parametrize(("example", "spread"), _cases())
def test_example_trains_alike(train: Any, example: str, spread: str) -> None:
    # The negatives of SimCLR are those of a batch, so it differs with accumulation.
    is_accumulated = example == "simclr" and "accumulated" in spread
    single = train(example, "accumulated" if is_accumulated else "single")
    tolerance = TOLERANCE.get(example, 1e-6)
    assert difference(weights_of(single), weights_of(train(example, spread))) <= tolerance


@pytest.mark.parametrize(("example", "spread"), REFUSED)
def test_example_is_refused_under_strategies_that_it_does_not_support(
    conf: Path, example: str, spread: str
) -> None:
    with pytest.raises(RefusedError, match=rf"^{re.escape(REFUSED[example, spread])}="):
        check_config(compose(conf, example, spread, {}))


@pytest.mark.processes
@pytest.mark.slow(seconds=3)
# Examples with averages, phases, a loss with parameters and a schedule with a state have more to
# resume than a network.
@pytest.mark.parametrize("example", some_at_each_commit(NAMES, "byol", "gan", "arcface", "plateau"))
def test_example_resumes_exactly(train: Any, example: str, tmp_path: Path) -> None:
    spread = example if example in LOCAL_SGD else "single"
    whole = train(example, spread)
    folder = tmp_path / "resumed"
    (folder / "checkpoints").mkdir(parents=True)
    for suffix in (".pt", ".json"):
        for name in ("step_4", "last"):
            shutil.copy(
                whole / "checkpoints" / f"step_4{suffix}",
                folder / "checkpoints" / f"{name}{suffix}",
            )
    train(example, spread, folder)
    for name, tensor in weights_of(whole).items():
        assert torch.equal(tensor, weights_of(folder)[name]), name
    logged = {key for line in read_lines(whole / "metrics.jsonl") for key in line}
    assert LOGGED.get(example, "train/loss") in logged


@pytest.mark.processes
@pytest.mark.slow(seconds=3)
def test_local_sgd_trains_like_a_single_device_when_it_averages_after_each_step(train: Any) -> None:
    single = weights_of(train("local_sgd", "local_sgd_on_one_device"))
    each_step = weights_of(train("local_sgd", "local_sgd_of_each_step"))
    every_2_steps = weights_of(train("local_sgd", "local_sgd"))
    assert difference(single, each_step) <= 1e-6 < difference(single, every_2_steps)


def evaluated(run: Path) -> dict[str, Any]:
    """Evaluate the last checkpoint of a run on val, as evaluate.py does."""
    config = own(evaluation_config(run, ["parallel=single"]))
    return dict(evaluate_config(config, build_strategy(config), run, "val", "last"))["val"]


@pytest.mark.processes
@pytest.mark.slow(seconds=3)
@pytest.mark.parametrize(
    "example",
    some_at_each_commit(sorted({*NAMES} - {*LOCAL_SGD}), "detr", "macro_f1", "mean_teacher"),
)
def test_evaluation_of_an_example_repeats_the_numbers_of_its_run(train: Any, example: str) -> None:
    run = train(example, "single")
    result, repeated = read_result(run), evaluated(run)
    assert result is not None
    last = {name: value for name, value in result.val.items() if not name.endswith("_best")}
    # Metrics that the number of classes leaves out are None.
    measured = {name: value for name, value in last.items() if value is not None}
    assert measured == {name: pytest.approx(repeated[name], rel=1e-6) for name in measured}
    assert all(repeated[name] is None for name in last.keys() - measured.keys())


@pytest.mark.processes
@pytest.mark.slow(seconds=3)
def test_evaluate_py_refuses_worst_in_one_line_when_a_task_has_no_loss_of_an_image(
    train: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    # Its batches have boxes, and no target that a row of a table could contain.
    run = train("detr", "single")
    assert evaluate_script.main([f"run={run}", "worst=2", "parallel=single"]) == 2
    err = capfd.readouterr().err
    assert "worst: train.task=src.tasks.detr.Detr" in err and len(err.splitlines()) == 1


def predicted(run: Path, split: Any, folder: Path) -> list[dict[str, Any]]:
    """Write the images of a split to files, and predict them as predict.py does. Return the
    predictions in the order of the split.
    """
    for index in range(len(split)):
        pixels = split[index][0]
        # Some tasks have several views of an image.
        pixels = pixels[0] if pixels.dim() == 4 else pixels
        # Squeeze gray images, which Pillow stores without a dimension for channels.
        pixels = pixels.permute(1, 2, 0).squeeze(2).numpy()
        Image.fromarray(pixels).save(folder / f"{index:04}.png")
    predictions = predict(run, folder, cpu_strategy(), checkpoint="last", topk=1, workers=0)
    ordered = [predictions[name] for name in sorted(predictions)]
    assert len(ordered) == len(split) and None not in ordered
    return [prediction for prediction in ordered if prediction is not None]


def test_points_of_keypoints_stay_on_the_dots_in_a_mirrored_and_resized_image(conf: Path) -> None:
    keypoints = import_module("src.tasks.keypoints")
    image, points = keypoints.Dots(DataConfig()).val[0]
    steps = [v2.RandomHorizontalFlip(1), v2.RandomVerticalFlip(1), v2.Resize((80, 120))]
    moved, shares = keypoints.WithPoints(v2.Compose(steps))(image, points)
    for channel, share in zip((0, 2), shares, strict=True):
        # The dots are brighter than the noise.
        rows, columns = (moved[channel] > 150).nonzero(as_tuple=True)
        center = torch.stack([columns, rows]).double().mean(1) + 0.5
        assert torch.allclose(share.double() * torch.tensor([120, 80]), center, atol=0.2)


@pytest.mark.processes
@pytest.mark.slow(seconds=3)
def test_predictions_of_keypoints_have_the_distance_of_the_evaluation(
    train: Any, tmp_path: Path
) -> None:
    run = train("keypoints", "single")
    dataset = load_dataset(load_config(run))
    predictions = predicted(run, dataset.val, tmp_path)
    outputs = torch.tensor([list(prediction.values()) for prediction in predictions])
    points = torch.stack([points for _, points in map(dataset.val.__getitem__, range(256))])
    distances = (outputs.view_as(points) - points / 40).norm(dim=2).mean(1)
    assert distances.mean().item() == pytest.approx(evaluated(run)["distance"], rel=1e-4)


@pytest.mark.processes
@pytest.mark.slow(seconds=3)
def test_predictions_of_lora_have_the_accuracy_of_the_evaluation(
    train: Any, tmp_path: Path
) -> None:
    run = train("lora", "single")
    val = load_dataset(load_config(run)).val
    predictions = predicted(run, val, tmp_path)
    hits = [
        prediction["class_1"] == str(val[index][1]) for index, prediction in enumerate(predictions)
    ]
    assert sum(hits) / len(hits) == pytest.approx(evaluated(run)["acc"])


def test_lora_output_equals_output_of_model_with_merged_low_rank_weights(conf: Path) -> None:
    sizes: dict[str, Any] = {"num_classes": 3, "in_chans": 3, "img_size": 32, "patch_size": 8}
    sizes |= {"embed_dim": 16, "depth": 2, "num_heads": 2}
    torch.manual_seed(0)
    model = import_module("src.models.lora").LoraVit(rank=2, **sizes).eval()
    images = torch.randn(2, 3, 32, 32)
    weights = model.state_dict()
    adapted = [name.removesuffix(".lora_a") for name in weights if name.endswith(".lora_a")]
    assert len(adapted) == 2 * 2
    plain = {name: weight.clone() for name, weight in weights.items() if "lora_" not in name}
    merged = VisionTransformer(**sizes).eval()
    merged.load_state_dict(plain)
    assert torch.allclose(model(images), merged(images), atol=1e-6)
    for name in adapted:
        weights[f"{name}.lora_b"].normal_()
        plain[f"{name}.weight"] += weights[f"{name}.lora_b"] @ weights[f"{name}.lora_a"]
    assert not torch.allclose(model(images), merged(images), atol=1e-2)
    merged.load_state_dict(plain)
    assert torch.allclose(model(images), merged(images), atol=1e-4)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {
        *(f"{name}.lora_{part}" for name in adapted for part in "ab"),
        *("head.weight", "head.bias"),
    }


# Examples whose images are no files that Pillow writes, or need more than an image.
WITHOUT_FILES = {*LOCAL_SGD, "tiff", "two_inputs"}


@pytest.mark.nightly
@pytest.mark.processes
@pytest.mark.slow(seconds=3)
@pytest.mark.parametrize("example", sorted({*NAMES} - WITHOUT_FILES - {"keypoints", "lora"}))
def test_predict_py_predicts_each_image_with_an_example(
    train: Any, example: str, tmp_path: Path
) -> None:
    run = train(example, "single")
    predictions = predicted(run, load_dataset(load_config(run)).val, tmp_path)
    assert all(predictions) and len({frozenset(prediction) for prediction in predictions}) == 1


@pytest.mark.nightly
@pytest.mark.processes
@pytest.mark.slow(seconds=3)
def test_predict_py_names_the_field_that_a_task_needs_besides_the_image(
    train: Any, tmp_path: Path
) -> None:
    run = train("two_inputs", "single")
    val = load_dataset(load_config(run)).val
    with pytest.raises(ValueError, match="numbers"):
        predicted(run, val, tmp_path)

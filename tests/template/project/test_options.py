"""Every option of every config group trains one step; a saved config reproduces its run."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import timm_parallel.entry
from src.app import app
from tests.template.library.test_timm_data import write_mnist
from tests.template.runs import draw_images, files_below
from timm_parallel.config.compose import compose_command, load_config
from timm_parallel.config.resolve import resolve
from timm_parallel.lab.sweep.points import expand
from timm_parallel.launch import job
from timm_parallel.machine.files import claim_folder
from timm_parallel.machine.ranks import NEEDED
from timm_parallel.patches import hydra_parser
from timm_parallel.testing.ranks import warm_ranks

ROOT = Path(__file__).resolve().parents[3]
OPTIONS = sorted(
    (path.parent.name, path.stem)
    for path in (ROOT / "conf").glob("*/*.yaml")
    if path.parent.name not in ("local", "hydra")
    # test_cluster.py tests slurm and kubernetes, which start no run here. test_measured.py tests
    # profile, which needs several steps. The packages of wandb and mlflow are optional.
    and path.stem not in ("slurm", "kubernetes", "profile", "wandb", "mlflow")
)
ONE_STEP = (
    "train.max_steps=1",
    "data.limit_train=64",
    "print_config=false",
    "parallel.accelerator=cpu",
    "parallel.threads_per_device=1",
)
SEVERAL_DEVICES = ("dp", "ddp", "fsdp")

RunCommand = Callable[..., None]


@pytest.fixture
def run_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> RunCommand:
    """Run `python train.py …`; with `-m`, only its first job that can run here."""
    for name in (*NEEDED, "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        job, "run_ranks", lambda config, folder, **_: warm_ranks(config, folder.resolve())
    )

    def run(folder: Path, *words: str) -> None:
        if "-m" in words:
            _, points = expand(
                hydra_parser().parse_args([*words, f"hydra.sweep.dir={folder.parent}"])
            )
            runnable = [point for point in points if not point.reason]
            assert runnable, [point.reason for point in points]
            code = job.run_job(resolve(runnable[0].config), claim_folder(folder))
        else:
            monkeypatch.setattr(sys, "argv", ["train.py", *words, f"hydra.run.dir={folder}"])
            code = timm_parallel.entry.run_command(app)
        console = folder / "console.txt"
        output = [
            *capfd.readouterr(),
            console.read_text(encoding="utf-8") if console.exists() else "",
        ]
        assert code == 0, "\n".join(output)

    return run


@pytest.fixture(scope="module")
def image_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write eight images per class, also as a CSV."""
    root = tmp_path_factory.mktemp("images")
    draw_images(root, "train/a", "train/b", "val/a", "val/b", count=8, size=24)
    files = sorted(path.relative_to(root).as_posix() for path in root.glob("*/*/*"))
    lines = ["file,label", *(f"{file},{file.split('/')[1]}" for file in files)]
    (root / "labels.csv").write_text("\n".join(lines) + "\n")
    return root


def result_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "result.json").read_text(encoding="utf-8"))  # type: ignore[no-any-return]


# Overrides that make a recipe small. It keeps its model and settings, but trains on eight small
# images.
STAND_INS = {
    "imagenet_resnet50_a1": ("data.image_size=64", "parallel.devices=2"),
    "imagenet_resnet50_a2": ("data.image_size=64", "parallel.devices=2"),
    "finetune": ("data.image_size=32", "data.val_fraction=null", "model.pretrained=false"),
    "finetune_convnext_tiny": ("data.image_size=32", "model.pretrained=false"),
    "finetune_swin_tiny": ("data.image_size=224", "model.pretrained=false"),
    "imagenet_resnet50_a3": ("data.image_size=64", "data.eval_image_size=96", "parallel.devices=2"),
    "imagenet_vit_small": ("data.image_size=32", "parallel.devices=2"),
    "cifar10_resnet18": ("data.name=folder",),
}


# Options of segmentation, which work only with the task segmentation and its data.
OF_MASKS = (("data", "segmentation"), ("data", "shapes"), ("model", "segmenter"))


def write_targets(folder: Path) -> list[str]:
    """Write images with masks, and a CSV with numbers; return the words that split them."""
    rows = ["file,label"]
    for kind in ("images", "masks"):
        (folder / kind).mkdir(parents=True)
    for number in range(20):
        name = f"images/{number}.png"
        Image.new("RGB", (32, 32), (12 * number, 0, 0)).save(folder / name)
        Image.new("L", (32, 32), number % 2).save(folder / "masks" / f"{number}.png")
        rows.append(f"{name},{number}")
    (folder / "labels.csv").write_text("\n".join(rows))
    return ["data.val_fraction=0.4", "data.image_size=32", "data.batch_size=8", "data.workers=0"]


def words_for(group: str, option: str, images: Path, scratch: Path) -> list[str]:
    """Return a small command for an option, with -m if the example command in its file has -m.

    `scratch`: a folder for images with masks and numbers.
    """
    shortened = () if option in STAND_INS else ("train.epochs=2", "optim.warmup_epochs=0")
    words = [f"{group}={option}", *ONE_STEP, *shortened]
    in_files = (f"data.root={images}", "data.batch_size=8", "data.workers=0")
    has_masks = (group, option) in OF_MASKS or option == "segmentation"
    if group not in ("model", "experiment"):
        words.append("model=segmenter" if has_masks else "model=tiny")
    if group == "parallel" and option in SEVERAL_DEVICES:
        words.append("parallel.devices=2")
    if option == "buckets":
        # Select one of twelve configurations, because composing all takes longer than a step.
        words += [
            "parallel.bucket_cap_mb=1",
            "parallel.gradient_as_bucket_view=true",
            "parallel.static_graph=true",
        ]
    if has_masks and group not in ("train", "experiment"):
        words.append("train=segmentation")
    if (group, option) == ("data", "segmentation"):
        classes = "+data.kwargs.classes=[one,two]"
        words += [f"data.root={scratch}", classes, *write_targets(scratch)]
    elif (group, option) == ("train", "regression"):
        words += ["data=csv", f"data.root={scratch}", *write_targets(scratch)]
    elif has_masks:
        words += ["data=shapes", "+data.kwargs.num_samples=64", "data.image_size=32"]
    elif option in STAND_INS:
        words += [*in_files, *STAND_INS[option]]
    elif (group, option) == ("data", "folder"):
        words += [*in_files, "data.image_size=32"]
    elif (group, option) == ("data", "timm"):
        write_mnist(scratch, 24)
        words += [f"data.root={scratch}", *in_files[1:], "data.name=torch/mnist"]
    elif (group, option) in (("data", "csv"), ("train", "multilabel")):
        words += ["data=csv", *in_files, "data.image_size=32", "data.val_fraction=0.4"]
    elif group != "data":
        # With 64 images, the run evaluates 8 instead of the 540 of the digits.
        words += ["data=synthetic", "data.kwargs.num_samples=64"]
    text = (ROOT / "conf" / group / f"{option}.yaml").read_text(encoding="utf-8")
    return ["-m", *words] if f"train.py -m {group}={option}" in text else words


@pytest.mark.slow
@pytest.mark.parametrize(
    ("group", "option"), [pytest.param(*row, id="=".join(row)) for row in OPTIONS]
)
@pytest.mark.sample(24)
def test_every_option_of_every_config_group_trains_one_step(
    run_command: RunCommand, image_folder: Path, tmp_path: Path, group: str, option: str
) -> None:
    folder = tmp_path / "run"
    run_command(folder, *words_for(group, option, image_folder, tmp_path / "targets"))
    result = result_of(folder)
    assert (result["status"], result["steps"]) == ("done", 1)
    assert result["val"]["samples"] > 0
    assert isinstance(result["train"]["loss"], float)
    if group == "parallel" and option != "auto":
        assert result["strategy"] == option
    if option in ("ddp", "fsdp"):
        assert (result["world_size"], result["processes"]) == (2, 2)
    again = ["--config-path", str(folder), "--config-name", "config"]
    frozen = compose_command(hydra_parser().parse_args(again)).config
    assert dataclasses.asdict(frozen) == dataclasses.asdict(load_config(folder)), (
        "expected config.yaml to match the config of the run"
    )


@pytest.mark.slow(seconds=4)
def test_run_from_the_saved_config_of_another_run_reproduces_metrics_and_weights(
    run_command: RunCommand, tmp_path: Path
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    chosen = (
        "model=tiny",
        "optim=sgd",
        "optim.lr=0.01",
        "seed=7",
        "data.augment.hflip=0.5",
        "+model.kwargs.drop_rate=0.1",
    )
    run_command(first, *ONE_STEP, *chosen, "train.max_steps=3", "data.batch_size=32")
    before = files_below(first)
    run_command(second, "--config-path", str(first), "--config-name", "config")
    old, new = result_of(first), result_of(second)
    assert old["train"]["loss"] == new["train"]["loss"]
    assert old["val"] == new["val"]
    assert old["test"] == new["test"]
    assert old["parameters_hash"] == new["parameters_hash"]
    assert (new["steps"], new["status"]) == (3, "done")
    assert load_config(first) == load_config(second)
    assert files_below(first) == before, "expected unchanged files in the folder of the first run"
